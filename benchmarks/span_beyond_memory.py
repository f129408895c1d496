"""Claim: two machines train on a graph that the memory of neither holds, as one large machine does.

A generated graph is cut into two parts within a bound of memory.  Two machines, network namespaces
of this host with a memory cgroup each, load a part each and train GraphSAGE over gloo.  So do two
ranks of one machine without a limit, on a store of the whole graph; parts keep the order of the
nodes, so samples are the same, and losses and accuracies must be alike.  One machine with the limit
of one of the two is tried as well.  Without the right to make namespaces and cgroups (root has it)
there is no figure.

    python -m benchmarks.span_beyond_memory --out span_beyond_memory.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.machine import keep
from benchmarks.span_loading import AIM, peak_of
from benchmarks.two_machines import Machine, free_port, two_machines
from dgl_mgpu.config.store_options import parse_bytes

_CLASSES, _HIDDEN = 16, 64
_FANOUTS = [10, 10]
#: By how much accuracies may differ.
TOLERANCE = 0.01


@contextlib.contextmanager
def memory_limit(nbytes: int, name: str) -> Iterator[Path]:
    """A cgroup within this process's; who writes its id to the file has so much memory."""
    (own,) = (
        line.rpartition(":")[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if ":memory:" in line
    )
    folder = Path(f"/sys/fs/cgroup/memory{own}") / f"{name}-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(nbytes))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def start(words: Sequence[Any], machine: Machine, group: Path | None, **environment: Any) -> Any:
    """A process of this program on a machine, within a group."""
    command = machine.command(
        [sys.executable, "-m", "benchmarks.span_beyond_memory", *map(str, words)]
    )
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group), *command]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": machine.cable}
    added = {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(command, env={**os.environ, **own, **added})


def ended(jobs: Sequence[Any]) -> list[int]:
    """The statuses of jobs that are waited for; the others are ended when one fails."""
    try:
        while None in [job.poll() for job in jobs]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(job for job in jobs if job.poll() is None).wait(1)
            if any(job.returncode for job in jobs):
                break
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()
                job.wait()
    return [job.returncode for job in jobs]


class Bench:
    """A graph, and what is done with it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._limit = parse_bytes(options.limit, "--limit") or 0
        self._words = [
            *("--nodes", options.nodes, "--edges", options.edges, "--width", options.width),
            *("--steps", options.steps, "--batch", options.batch, "--memory", options.memory),
            *("--replica-ratio", options.replica_ratio, "--folder", folder),
        ]

    def run(self) -> dict[str, Any]:
        """Figures of all ways."""
        with memory_limit(self._limit, "cut") as group:
            self._do([start(["cut", *self._words], Machine(), group)], "cut the graph")
        with two_machines() as machines:
            if not machines[0].namespace:
                raise OSError("without network namespaces machines are none of their own")
            with (
                memory_limit(self._limit, "one") as one,
                memory_limit(self._limit, "two") as two,
            ):
                jobs = self._ranks("parts", machines, [one, two])
                self._do(jobs, "train on two machines")
        alone: str | list[int] = "not tried"
        if self._options.alone:
            with memory_limit(self._limit, "alone") as group:
                alone = ended([self._ranks("whole", [Machine()], [group])[0]])
        self._do(self._ranks("whole", [Machine(), Machine()], [None, None]), "train on one machine")
        cut, parts, whole = (
            json.loads((self._folder / f"{way}.json").read_text())
            for way in ("cut", "parts", "whole")
        )
        apart = abs(parts["accuracy"] - whole["accuracy"])
        return {
            "graph_bytes": whole["store_bytes"],
            "limit_bytes": self._limit,
            "cut": cut,
            "trainings": [{"machines": 2, **parts}, {"machines": 1, **whole}],
            "one_machine_with_the_limit_ended_with": alone,
            "accuracies_differ_by": apart,
            "reached": apart <= TOLERANCE and parts["times_share"] <= AIM,
        }

    def _do(self, jobs: Sequence[Any], what: str) -> None:
        if any(statuses := ended(jobs)):
            raise RuntimeError(f"to {what} ended with {statuses}")

    def _ranks(self, way: str, machines: Sequence[Machine], groups: Sequence[Any]) -> list[Any]:
        port = free_port()
        return [
            start(
                [way, *self._words],
                machine,
                group,
                RANK=rank,
                WORLD_SIZE=len(machines),
                MASTER_ADDR=machines[0].address,
                MASTER_PORT=port,
            )
            for rank, (machine, group) in enumerate(zip(machines, groups, strict=True))
        ]


def dataset_of(options: argparse.Namespace) -> dgl_mgpu.Dataset:
    """The graph, generated once, and mapped."""
    return dgl_mgpu.load(
        "generated",
        options.folder / "data",
        num_nodes=options.nodes,
        num_edges=options.edges,
        num_features=options.width,
        num_classes=_CLASSES,
    )


def cut(options: argparse.Namespace) -> dict[str, Any]:
    """Write parts, and say what it took."""
    dataset = dataset_of(options)
    _, peak = peak_of(
        lambda: dgl_mgpu.write_partition(
            dataset, options.folder / "parts", 2, by="order", memory=options.memory
        )
    )
    return {"peak_bytes": peak, "memory_bytes": parse_bytes(options.memory, "--memory")}


class Sage(nn.Module):
    """GraphSAGE of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(width, _HIDDEN, "mean")
        self.second = dgl.nn.SAGEConv(_HIDDEN, _CLASSES, "mean")

    def forward(self, blocks: Sequence[Any], rows: torch.Tensor) -> torch.Tensor:
        return self.second(blocks[1], self.first(blocks[0], rows).relu())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Build a store, train some steps, and count what is right of some test nodes."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # What the libraries take of their own is there before.
    dgl_mgpu.GlobalStore.from_dgl(dgl.graph(([0, 1, 2], [1, 2, 3]))).close()

    def build() -> dgl_mgpu.GlobalStore:
        if options.way == "parts":
            return dgl_mgpu.GlobalStore.from_partition(
                options.folder / "parts" / "generated.json", replica_ratio=options.replica_ratio
            )
        return dgl_mgpu.GlobalStore.from_dataset(dataset_of(options) if rank == 0 else None)

    store, peak = peak_of(build)
    nbytes = sum(store.plan.gpu_bytes) + store.plan.host_bytes
    dataset = dataset_of(options)
    seeds = torch.tensor(dataset.train[: size * options.steps * options.batch])
    held_out = torch.tensor(dataset.test[: size * options.batch * 8])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Sage(options.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = dgl.dataloading.NeighborSampler(
        _FANOUTS, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )

    def batches(ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _, _, blocks in dgl.dataloading.DataLoader(
            store.graph, ids[rank::size], sampler, batch_size=options.batch
        ):
            yield model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]

    losses = []
    for logits, labels in batches(seeds):
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = [int((logits.argmax(1) == labels).sum()) for logits, labels in batches(held_out)]
    store.close()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, (nbytes, peak, sum(right), losses[0], losses[-1]))
    dist.destroy_process_group()
    sizes, peaks, counts, first, last = zip(*every, strict=True)
    return {
        "store_bytes": sum(sizes) if options.way == "parts" else sizes[0],
        "share_bytes": sizes,
        "peak_bytes": peaks,
        "times_share": max(peak / share for peak, share in zip(peaks, sizes, strict=True)),
        "loss_of_the_first_step": first,
        "loss_of_the_last_step": last,
        "accuracy": sum(counts) / len(held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", nargs="?", choices=["cut", "parts", "whole"], help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=13_500_000)
    parser.add_argument("--edges", type=int, default=202_500_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--limit", default="6GiB", help="memory of a machine")
    parser.add_argument("--memory", default="512MiB", help="of which the graph is cut within")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=256, help="seeds of a rank")
    parser.add_argument("--replica-ratio", type=float, default=0.05, help="of the bytes")
    parser.add_argument("--alone", action="store_true", help="try one machine with the limit")
    parser.add_argument("--folder", type=Path, help="where the graph is written; removed again")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    if options.way is not None:
        figures = cut(options) if options.way == "cut" else train(options)
        if os.environ.get("RANK", "0") == "0":
            (options.folder / f"{options.way}.json").write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        figures = Bench(options, Path(made)).run()
    print(json.dumps(figures, indent=1))
    keep(options, figures)


if __name__ == "__main__":
    main()
