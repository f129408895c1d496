"""Claim: replicas in a tenth of the memory leave a third of the bytes of remote reads to send.

Machines share one store of a power-law graph, each a rank of this host.  What all of them send
for mini-batches, of features and in all, is set beside the bytes of the rows that mini-batches
read and other machines own: each row once in a mini-batch, and as often as it is a neighbour.

    torchrun --nproc-per-node=3 -m benchmarks.span_bytes --out span_bytes.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.machine import keep
from benchmarks.span_gpu import counted_collectives, power_law
from dgl_mgpu.comm import communicator
from dgl_mgpu.comm.communicator import Communicator

#: Bytes sent, of those of remote reads.
AIM = 1 / 3


def remote_reads(store: dgl_mgpu.GlobalStore, batches: Iterator[Any]) -> dict[str, int]:
    """Nodes of mini-batches that other machines own: once in each, and as often as sampled.

    ``store`` has no replicas: what is not here is not owned.
    """
    kept = store.graph.get_node_storage("feat")._kept.position
    distinct = sampled = num_nodes = 0
    for inputs, seeds, blocks in batches:
        num_nodes += len(inputs)
        distinct += int((kept[inputs] < 0).sum())
        sampled += int((kept[seeds] < 0).sum())
        for block in blocks:
            sources = block.srcdata[dgl.NID][block.edges()[0]]
            sampled += int((kept[sources] < 0).sum())
    return {"distinct": distinct, "sampled": sampled, "input_nodes": num_nodes}


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Sum up the bytes that this rank sends to others."""
    found, send = [0], dist.all_to_all_single

    def call(
        output: Any, rows: torch.Tensor, receives: Any, sends: list[int] | None, **more: Any
    ) -> Any:
        ranks = dist.get_world_size()
        sends_of = [len(rows) // ranks] * ranks if sends is None else sends
        to_others = sum(sends_of) - sends_of[dist.get_rank()]
        found[0] += to_others * rows[:1].nbytes
        return send(output, rows, receives, sends, **more)

    dist.all_to_all_single = call
    try:
        yield found
    finally:
        dist.all_to_all_single = send


class Bench:
    """A graph, its stores, and what mini-batches of them send, on one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._everyone = options, Communicator.of_all_machines()
        self._graph = power_law(options.nodes, options.edges, options.skew)

    def run(self) -> list[dict[str, Any]]:
        return [figure for batch in self._options.batch for figure in self._of_batches(batch)]

    def _of_batches(self, batch: int) -> list[dict[str, Any]]:
        options = self._options
        with self._store(0.0, batch) as store:
            reads = remote_reads(store, self._batches(store, batch))
        reads = self._sum(reads)
        row_bytes = self._graph.ndata["feat"][0].nbytes
        figures = []
        for ratio in options.replica_ratio:
            with self._store(ratio, batch) as store, counted_bytes() as sent:
                store.graph.traffic.take()
                with counted_collectives() as counts:
                    for _, _, blocks in self._batches(store, batch):
                        blocks[0].srcdata["feat"]
                rows = store.graph.traffic.take().nbytes["feat", "remote"]
                found = self._sum({"rows": rows, "all": sent[0]})
            distinct, sampled = reads["distinct"] * row_bytes, reads["sampled"] * row_bytes
            of_sampled = found["all"] / sampled
            figures.append(
                {
                    "batch": batch,
                    "replica_ratio": ratio,
                    "bytes_sent": found,
                    "bytes_of_remote_reads": {"distinct": distinct, "sampled": sampled},
                    "rows_of_distinct": found["rows"] / distinct,
                    "all_of_distinct": found["all"] / distinct,
                    "rows_of_sampled": found["rows"] / sampled,
                    "all_of_sampled": of_sampled,
                    "reached": of_sampled <= AIM,
                    "input_nodes_a_batch": reads["input_nodes"]
                    / (options.steps * self._everyone.size),
                    "collectives_a_batch": sum(counts.values()) / options.steps,
                }
            )
        return figures

    def _store(self, ratio: float, batch: int) -> dgl_mgpu.GlobalStore:
        options = self._options
        return dgl_mgpu.GlobalStore.from_dgl(
            self._graph,
            seed=1,
            span="job",
            replica_ratio=ratio,
            fanouts=options.fanouts,
            batch_size=batch,
            hotness=options.hotness,
        )

    def _batches(self, store: dgl_mgpu.GlobalStore, batch: int) -> Iterator[Any]:
        options = self._options
        draw = torch.Generator().manual_seed(self._everyone.rank)
        seeds = torch.randperm(options.nodes, generator=draw)[: options.steps * batch]
        sampler = dgl.dataloading.NeighborSampler(options.fanouts)
        store.graph.set_epoch(0)
        return iter(dgl.dataloading.DataLoader(store.graph, seeds, sampler, batch_size=batch))

    def _sum(self, counts: dict[str, int]) -> dict[str, int]:
        every = self._everyone.all_gather(counts)
        return {name: sum(each[name] for each in every) for name in counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--skew", type=float, default=3.0, help="the exponent of power_law")
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 100], help="seeds")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--steps", type=int, default=4, help="mini-batches of each machine")
    parser.add_argument("--hotness", default="degree")
    parser.add_argument("--replica-ratio", type=float, nargs="+", default=[0.1, 0.0, 0.05, 0.2])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    communicator._machine_id = lambda: str(rank)  # ranks of one host are machines here
    try:
        figures = Bench(options).run()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        for figure in figures:
            print(
                f"{figure['batch']} seeds, {figure['replica_ratio']:.2f} of the bytes replicated:"
                f" sent {figure['all_of_sampled']:.3f} of remote reads' bytes, of rows"
                f" {figure['rows_of_distinct']:.3f} of distinct ones',"
                f" {figure['collectives_a_batch']:.1f} collectives a batch"
            )
        keep(options, figures)


if __name__ == "__main__":
    main()
