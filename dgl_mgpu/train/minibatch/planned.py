"""Plans for a configuration whose data need not be there, on a machine that need not be there."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import numpy as np

from dgl_mgpu.config.schema import Config
from dgl_mgpu.data import HETEROGENEOUS, Dataset, HeteroDataset
from dgl_mgpu.data.outline import Outline, data_folder, outline
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.machine import Cluster, cluster, probe, probe_shared_memory
from dgl_mgpu.machine.shared_memory import SharedMemory
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES
from dgl_mgpu.placement import Plan
from dgl_mgpu.store.embedding.tables import read_specs, require_in_memory
from dgl_mgpu.store.global_store import sources_of
from dgl_mgpu.store.memory import Blueprint
from dgl_mgpu.store.planning import make_blueprint, reads_of
from dgl_mgpu.store.span import Kept, Shares, choose_span, modelled_seconds
from dgl_mgpu.train.minibatch.run import load
from dgl_mgpu.train.minibatch.task import Task
from dgl_mgpu.train.setup import adapt_to_model


class Planned(NamedTuple):
    """A plan, and what it goes by."""

    plan: Plan
    origin: str  # of sizes, and whether hotness is counted or modelled, in a sentence
    num_machines: int = 1
    span: str = ""  # how several machines have the data, and why, in a sentence


def plan_for(config: Config) -> Planned:
    """Solve the placement of a configuration's topology and features.

    Nothing is downloaded for it. A real data set whose files are there is read and counted; of
    others the published sizes count, and of a generated graph those that it would have, with
    degrees by a model. The machine is a preset (used whole when ``trainer.ranks`` is 1), or this
    one with its GPUs. Of several machines (``8x-hgx-h200``) it is the first one's plan. Unless
    ``store.device`` is 'cpu', GPUs hold the store, and what it has there
    beside its tables counts as :class:`~dgl_mgpu.store.planning.StoreOptions` says. Raises
    ConfigError if rows are to be ordered by counts, for which the graph would have to be there; if
    learned rows would go to disk; with ``store.span=job`` on one machine; or if a whole graph is
    trained on, which no store keeps; DGLMGPUError, as :func:`dgl_mgpu.train.minibatch.run.train`.
    """
    if config.mode == "fullgraph":
        raise ConfigError(
            "plan with mode=fullgraph",
            "full-graph training has no store",
            "leave mode out, for the plan of a mini-batch run's store",
        )
    options = config.store_options()
    machines = _machines(config)
    if options.span == "job" and machines.num_machines == 1:
        raise ConfigError(
            f"plan with store.span={options.span}",
            "how much of the data a machine keeps depends on the job's machines",
            "name several, as topology=8x-hgx-h200, or use store.span=machine",
        )
    topology = machines.machine
    on_gpus = options.device != "cpu" and topology.name != "cpu"
    memory = topology.host_memory
    shared = None if on_gpus else SharedMemory(memory, memory)
    if not on_gpus and config.topology == "auto":
        shared = SharedMemory.of_this_machine()
    dataset: Dataset | HeteroDataset
    known, origin = _known_sizes(config)
    if known is None:
        dataset, task = load(config)
        hotness = None
    else:
        if options.hotness != "degree":
            raise ConfigError(
                f"plan for data={config.data.name} with store.hotness={options.hotness}",
                "reads are counted in a graph, and this one is not here"
                if not config.data.name.startswith("generated")
                else "reads are counted in a graph, and none is generated for a plan",
                "use store.hotness=degree, or look at the plan of a store that is built "
                "(store.plan)",
            )
        # Machines own runs of nodes: of a graph as it comes, not of the hottest first.
        dataset, hotness = _draw_dataset(config, known, shuffled=machines.num_machines > 1)
        task = Task.from_dataset(config, dataset)
    tables, hotness = sources_of(
        dataset, options, config.trainer.seed, task.embeddings, hotness=hotness
    )
    span = ""

    def place(kept: Kept | None = None) -> Blueprint:
        return make_blueprint(
            tables, hotness, topology, options,
            on_gpus=on_gpus, shared=shared, kept=kept, network=machines.network,
        )  # fmt: skip

    if machines.num_machines == 1:
        plan = place().plan
    else:
        reads = reads_of(tables, hotness, options)
        shares = Shares.of(tables, reads, machines.num_machines)

        def of_first(ratio: float | None) -> Blueprint:
            return place(None if ratio is None else shares.kept(0, ratio))

        ratio, span = choose_span(
            machines.num_machines, options, lambda ratio: modelled_seconds(partial(of_first, ratio))
        )
        plan = of_first(ratio).plan
    require_in_memory(plan, read_specs(task.embeddings, list(task.embeddings)))
    return Planned(plan, origin, machines.num_machines, span)


def _known_sizes(config: Config) -> tuple[Outline | None, str]:
    """The data in outline, or None where they are read; and what a plan then goes by."""
    data = config.data
    options = dict(data.options)
    if config.model.self_loops and data.name not in HETEROGENEOUS:
        options["self_loops"] = True
    sketch = outline(data.name, options)
    if sketch is None:
        return None, "sizes, degrees and hotness are counted in the graph as it is generated"
    if data.name.startswith("generated"):
        return sketch, sketch.origin
    files = data_folder(data.name, data.root)
    if files is not None:
        return None, f"sizes, degrees and hotness are counted in the files in {files}"
    return sketch, f"{data.name} is not in {data.root} (no plan downloads it): {sketch.origin}"


def _draw_dataset(
    config: Config, known: Outline, *, shuffled: bool
) -> tuple[Dataset | HeteroDataset, dict[str, np.ndarray]]:
    """A data set in outline, with the features and self-loops that its model wants."""
    dataset, hotness = known.draw(shuffled=shuffled)
    dataset = adapt_to_model(config, dataset)
    if isinstance(dataset, HeteroDataset):
        if config.model.self_loops:
            hotness = {ntype: hot + 1 for ntype, hot in hotness.items()}
    elif config.model.name == "gcn":
        roots = np.broadcast_to(np.float32(0), (dataset.num_nodes, 2))
        features = {**dataset.node_features, INV_SQRT_DEGREES: roots}
        dataset = dataclasses.replace(dataset, node_features=features)
    return dataset, hotness


def _machines(config: Config) -> Cluster:
    if config.topology == "auto":
        find = probe_shared_memory if config.store.device == "cpu" else probe
        return Cluster(find(config.trainer.ranks))
    ranks = config.trainer.ranks
    return cluster(config.topology, None if ranks == 1 else ranks)
