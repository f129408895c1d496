"""Modelled: an epoch of GraphSAGE on 1 to 64 machines of 8 H200s, from steps on one or two GPUs.

Nothing is measured here.  A step is that of ``epoch_gpu`` (6000 seeds a GPU, fanouts 25 and 10), as
it was measured on two GPUs that had all data in their memory.  What reads take longer by the plan
that ``store.span=auto`` chooses for so many machines comes on top of it, or hides behind it: an
epoch takes between ``overlapped_s`` and ``in_turn_s``.  Gradients are summed up over the network.
ASSUMPTIONS has what all of this takes for granted; the checks set parts of it beside what was
counted or measured.

Graphs are papers100M's and some that are so many times as large, of the same degrees, power law,
width and share of training nodes.  They are planned at a size that can be handled, on machines
whose memories and bandwidths are as much smaller; what a mini-batch is expected to read is in
proportion.

    python -m benchmarks.scaling_modelled --out scaling_modelled.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import dgl_mgpu  # noqa: F401  (lets dgl import)
from benchmarks.machine import describe_machine
from dgl_mgpu.config.store_options import StoreOptions
from dgl_mgpu.data.generate import SHAPES
from dgl_mgpu.data.outline import outline
from dgl_mgpu.machine import HostGroup, Network, Topology, preset
from dgl_mgpu.placement import Plan
from dgl_mgpu.report.tables import plan_table
from dgl_mgpu.store.memory import Blueprint, FeatureSource, TopologySource
from dgl_mgpu.store.planning import make_blueprint, reads_of
from dgl_mgpu.store.span import Shares, choose_span, modelled_seconds, with_other_machines

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks"
MACHINES = (1, 2, 4, 8, 16, 32, 64)
#: How many times papers100M, and GB/s that a GPU gets of the network, a way.
SIZES, NETWORKS = (1, 10, 20), (40.0, 10.0)
BATCH, FANOUTS, HIDDEN = 6000, (10, 25), 256  # the seeds' fanout last
LATENCY = 40e-6
#: Of papers100M, planned in place of each graph.
_PLANNED = 0.01
_GPU_SHARE, _HOST_SHARE = 0.75, 0.9
_SHOWN = (
    "size", "network_gbs", "machines", "steps", "span", "replica_ratio", "local_ms", "network_ms",
    "overlapped_s", "in_turn_s", "overlapped_times_first",
)  # fmt: skip

ASSUMPTIONS = [
    "A step takes on every GPU what it took on two of one machine, with the data in their memory "
    "and gradients between these included (captured of epoch_gpu_2.json), however large the graph, "
    "and what its reads take longer.",
    "Reads from GPUs, host memory and peers take their modelled time, and what the kernels of a "
    "step took beside it whose data were in the GPU's own memory (sample and gather of "
    "captured_profile in epoch_gpu.json).",
    "A machine is the preset hgx-h200: 8 GPUs, of whose memory three quarters hold the store, and "
    "560 GiB of host memory, of which nine tenths do. Nothing is on disk.",
    "Each GPU has a network adapter of 400 Gb/s, or of 100 Gb/s, of which messages reach 0.8: 40 "
    "and 10 GB/s a way, all GPUs at once, between any two machines. No link of the network is "
    "shared, and none is slowed by other jobs.",
    "An all-to-all of few bytes takes 40 us, on 2 machines as on 64. Two are made for each hop and "
    "for each of features and labels.",
    "Every GPU waits for the network in every step, without any spread between ranks or steps.",
    "Ids take 4 bytes on the network, and positions of nodes 4 bytes each on every GPU.",
    "Gradients take 2 (machines - 1) / machines times their bytes over the adapters of a machine "
    "together, and 40 us for each doubling of the machines.",
    "Seeds of a GPU stay 6000 a step, so that those of a step grow with the GPUs; what that does "
    "to the accuracy is not modelled. The last step of an epoch is a whole one.",
    "How often a node is read follows its degree, a power law of exponent 1.5; nodes are dealt out "
    "over machines at random.",
]


#: Measured milliseconds: in which file, of which figure, under which key.
MEASURED = {
    "step_of_two": ("epoch_gpu_2.json", {"case": "papers100M graphsage"}, "captured"),
    "step_of_one": ("epoch_gpu.json", {"case": "papers100M graphsage"}, "captured"),
    "step_with_host": (
        "epoch_gpu_layouts_papers100M_1.json",
        {"case": "papers100M graphsage", "layout": "auto"},
        "captured",
    ),
}


def measured(name: str) -> float:
    """Seconds of a step that was measured."""
    file, of, key = MEASURED[name]
    return float(_figure(file, of)[key]) / 1e3


def measured_reads() -> float:
    """Seconds of a step's kernels that sample and gather, on one GPU with all data."""
    file, of, _ = MEASURED["step_of_one"]
    work = _figure(file, of)["captured_profile"]["work_seconds"]
    return float(work["sample"] + work["gather"])


def _figure(file: str, of: Mapping[str, str]) -> dict[str, Any]:
    figures = json.loads((KEPT / file).read_text())["figures"]
    return next(each for each in figures if of.items() <= each.items())


class Graph:
    """A graph some times as large as papers100M, and machines, both smaller by the same factor.

    ``factor`` is how much smaller: times are those of the whole.
    """

    def __init__(self, size: float) -> None:
        self.factor = size / _PLANNED
        sketch = outline("generated-papers100M", {"scale": _PLANNED})
        assert sketch is not None
        data, self._hotness = sketch.draw(shuffled=True)
        (ntype,) = self._hotness
        nodes = data.num_nodes
        # More edges than 32 bits count have ids of 64.
        idtype = torch.int64 if size * SHAPES["papers100M"].num_edges >= 2**31 else torch.int32
        width = SHAPES["papers100M"].num_features
        self._sources = {
            "topology": TopologySource(data.indptr, data.indices, None, nodes, idtype, ntype),
            "features": FeatureSource(np.broadcast_to(np.float32(0), (nodes, width)), ntype),
            "labels": FeatureSource(np.broadcast_to(np.int64(0), nodes), ntype),
        }
        self._options = StoreOptions(
            batch_size=round(BATCH / self.factor), fanouts=FANOUTS, span="auto"
        )
        self.reads = reads_of(self._sources, self._hotness, self._options)

    def plan(
        self,
        machine: Topology,
        machines: int = 1,
        bandwidth: float = 1.0,
        gpu_memory: int | None = None,
    ) -> Plan | None:
        """As the planner chooses it for several machines; None if there is no room.

        ``gpu_memory`` is what the store has of each GPU, if not the share of its memory.
        """
        if gpu_memory is None:
            gpu_memory = int(machine.gpu_memory[0] * _GPU_SHARE)
        options = replace(self._options, gpu_memory=int(gpu_memory / self.factor))
        network = Network(bandwidth / self.factor, LATENCY)
        place = partial(
            make_blueprint, self._sources, self._hotness, _smaller(machine, self.factor), options,
            on_gpus=True, network=network,
        )  # fmt: skip
        shares = self._shares(machines)

        def planned(ratio: float | None) -> Blueprint:
            return place(kept=None if ratio is None else shares.kept(0, ratio))

        def seconds(ratio: float | None) -> float:
            return modelled_seconds(partial(planned, ratio))

        if machines == 1:
            return None if math.isinf(seconds(None)) else planned(None).plan
        ratio, _ = choose_span(machines, options, seconds)
        return None if math.isinf(seconds(ratio)) else planned(ratio).plan

    @cache  # noqa: B019  (graphs stay)
    def _shares(self, machines: int) -> Shares:
        return Shares.of(self._sources, self.reads, machines)


def _smaller(machine: Topology, factor: float) -> Topology:
    """A machine with so many times less of everything."""
    return replace(
        machine,
        link_bandwidth=machine.link_bandwidth / factor,
        gpu_memory=(machine.gpu_memory / factor).astype(np.int64),
        host_bandwidth=machine.host_bandwidth / factor,
        host_memory=int(machine.host_memory * _HOST_SHARE / factor),
        host_groups=tuple(
            HostGroup(group.gpus, group.bandwidth / factor) for group in machine.host_groups
        ),
        port_bandwidth=machine.port_bandwidth / factor,
    )


def local_reads(graph: Graph, gpus: int, gpu_memory: int | None = None) -> float:
    """Modelled seconds of a step's reads on some GPUs of one machine."""
    plan = graph.plan(preset("hgx-h200", gpus), gpu_memory=gpu_memory)
    assert plan is not None
    return plan.step_seconds


def gradient_bytes() -> int:
    """Of GraphSAGE: two weights and a bias a layer, in float32."""
    shape = SHAPES["papers100M"]
    widths = (shape.num_features, HIDDEN, shape.num_classes)
    return 4 * sum((2 * before + 1) * after for before, after in itertools.pairwise(widths))


def epochs(
    graph: Graph, size: int, bandwidth: float, beside: float, base_reads: float
) -> list[dict[str, Any]]:
    """An epoch on each number of machines.

    Local reads take ``beside`` more than their modelled time, and ``base_reads`` in the step that
    was measured.
    """
    machine = preset("hgx-h200")
    shape = SHAPES["papers100M"]
    seeds = size * int(shape.num_nodes * shape.train)
    step = measured("step_of_two")
    found: list[dict[str, Any]] = []
    for machines in MACHINES:
        plan = graph.plan(machine, machines, bandwidth)
        gpus = machines * machine.num_gpus
        row: dict[str, Any] = {"size": size, "network_gbs": bandwidth, "machines": machines}
        if plan is None:
            found.append({**row, "gpus": gpus, "fits": False})
            continue
        network = max((load.seconds for load in plan.loads if load.kind == "network"), default=0.0)
        local = beside + plan.step_seconds - network
        gradients = 2 * gradient_bytes() * (machines - 1) / machines
        gradients /= bandwidth * 1e9 * machine.num_gpus
        gradients += LATENCY * math.ceil(math.log2(machines))
        steps = math.ceil(seeds / (BATCH * gpus))
        share = plan.share
        found.append({
            **row, "gpus": gpus, "fits": True, "steps": steps,
            "span": "machine" if share is None else "job",
            "replica_ratio": 1.0 if share is None else share.replica_ratio,
            "remote_reads": None if share is None else share.remote_reads["features"],
            "local_ms": 1e3 * local, "network_ms": 1e3 * network,
            "gradients_ms": 1e3 * gradients,
            "overlapped_s": steps * (max(step, local + network) + gradients),
            "in_turn_s": steps * (step + max(local - base_reads, 0) + network + gradients),
        })  # fmt: skip
    first = next((row for row in found if row["fits"]), None)
    for row in found:
        if first and row["fits"]:
            for way in ("overlapped", "in_turn"):
                times = first[f"{way}_s"] / row[f"{way}_s"]
                row[f"{way}_times_first"] = times
                row[f"{way}_of_linear"] = times * first["machines"] / row["machines"]
    return found


def counted_bytes() -> list[dict[str, Any]]:
    """Bytes that machines send by the model, over those that ``span_bytes`` counted."""
    kept = json.loads((KEPT / "span_bytes.json").read_text())
    nodes, edges, steps = (int(kept["options"][name]) for name in ("nodes", "edges", "steps"))
    fanouts = json.loads(kept["options"]["fanouts"])
    machines = 3
    # As its graph is: nodes in the order of hotness are sources in proportion to a power, anywhere
    # among the ids, and destinations are drawn with equal chances.
    draw = np.random.default_rng(0)
    ends = (np.arange(nodes + 1) / nodes) ** (1 / float(kept["options"]["skew"]))
    hotness = (edges * np.diff(ends))[draw.permutation(nodes)]
    indptr = np.concatenate([[0], draw.multinomial(edges, np.full(nodes, 1 / nodes)).cumsum()])
    sources = {
        "topology": TopologySource(
            indptr, np.zeros(edges, np.int32), None, nodes, torch.int64, "n"
        ),
        "features": FeatureSource(np.broadcast_to(np.float32(0), (nodes, 128)), "n"),
    }
    found = []
    for figure in kept["figures"]:
        options = StoreOptions(batch_size=figure["batch"], fanouts=fanouts)
        shares = Shares.of(sources, reads_of(sources, {"n": hotness}, options), machines)
        plan = make_blueprint(sources, {"n": hotness}, preset("single"), options).plan
        modelled = 0.0
        for machine in range(machines):
            share = shares.kept(machine, figure["replica_ratio"])
            network = Network(1.0, 0.0)
            of_one = with_other_machines(plan, share, sources, network, len(fanouts))
            modelled += steps * sum(x.nbytes for x in of_one.loads if x.kind == "network")
        counted = figure["bytes_sent"]["all"]
        found.append({
            "check": f"bytes of {machines} machines, {figure['batch']} seeds, "
            f"{figure['replica_ratio']:g} replicated",
            "modelled": modelled, "measured": counted, "quotient": modelled / counted,
        })  # fmt: skip
    return found


def step_with_host(beside: float, of_one: float) -> list[dict[str, Any]]:
    """Both bounds of a step on a GPU that has room for a part of the graph, over the measured one.

    ``of_one`` is what local reads take if there is room for all.
    """
    file, _, _ = MEASURED["step_with_host"]
    options = json.loads((KEPT / file).read_text())["options"]
    size = float(options["scale"])  # of the graph, and of the memory that is named
    local = beside + local_reads(Graph(size), 1, int(size * int(options["gpu_memory"])))
    step, found = measured("step_of_one"), measured("step_with_host")
    bounds = {"overlapped": max(step, local), "in turn": step + local - of_one}
    return [
        {
            "check": f"seconds of a step with a part in host memory, {name}",
            "modelled": modelled, "measured": found, "quotient": modelled / found,
        }
        for name, modelled in bounds.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    quarter = Graph(0.25)  # of the size that steps were measured at
    of_one, of_two = (local_reads(quarter, gpus) for gpus in (1, 2))
    beside = measured_reads() - of_one
    checks = [*counted_bytes(), *step_with_host(beside, beside + of_one)]
    figures = []
    for size in SIZES:
        graph = Graph(size)
        for bandwidth in NETWORKS:
            figures += epochs(graph, size, bandwidth, beside, beside + of_two)
    console = Console(width=120)
    console.print(plan_table(checks, "Checks"))
    shown = [{key: row.get(key) for key in _SHOWN} for row in figures]
    console.print(plan_table(shown, "Modelled: an epoch of GraphSAGE"))
    if options.out:
        steps = {
            name: {"file": file, "figure": of, "key": key, "seconds": measured(name)}
            for name, (file, of, key) in MEASURED.items()
        }
        report = {
            "machine": describe_machine(), "modelled": True, "assumptions": ASSUMPTIONS,
            "measured": steps, "measured_reads_s": measured_reads(), "reads_beside_s": beside,
            "gradient_bytes": gradient_bytes(),
            "checks": checks, "figures": figures,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
