"""Claim: with a graph dealt out over machines, a training step takes at most 1.25 times as long.

Each rank stands in for a machine with one GPU, and has a store of its own part.  Ranks reach each
other by NCCL, whose messages take the network's way also between GPUs of one host, unless
``--links=any`` lets them take NVLink's.  With ``--links=mapped`` they map each other's memory, as
machines do that NVLink joins, but by file descriptors in place of fabric handles.  Ranks may share
a GPU: then times compare with each other alone.

Rows: distinct ids whose rows the other machine has, gathered through the store, beside the
all-to-all of NCCL's own of as many bytes, and beside pylibwholegraph's gather from memory of its
type 'distributed', in the fastest of some ways, where it is installed.  Steps: GraphSAGE on
mini-batches from a store over all machines, beside those from a store with a copy on each; samples
and features of both are compared first, bit for bit.  Beside the times is what came over the
network, in how many collectives, how many of torch's operators a mini-batch took and for how many
results of a GPU the host waits then.

    torchrun --nproc-per-node=2 -m benchmarks.span_gpu --out span_2.json

Without GPUs it runs over gloo, on a small graph, to see that it works:

    torchrun --nproc-per-node=2 -m benchmarks.span_gpu --nodes 4000 --edges 40000 --rows 500 \\
        --batch 64 --steps 4 --repeats 2 --hidden 16
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.figures import Figure, Report
from benchmarks.peers.wholegraph import Gather, WholeGraph, connect
from benchmarks.ranks_as_machines import DescriptorMemory, be_machine
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator

#: Of the bytes in a second of NCCL's own all-to-all.
OF_ALL_TO_ALL = 0.85
#: Of those that the peer gathers.
TIMES_PEER = 1.3
#: How long a step may take, in steps with a copy on each machine.
TIMES_A_COPY = 1.25
_COLLECTIVES = "all_to_all_single", "all_gather", "broadcast", "all_reduce"
#: Operators whose results' sizes, or results themselves, the host waits for on a GPU.
_WAITS = (
    "_local_scalar_dense", "nonzero", "unique", "_unique2", "unique_consecutive", "masked_select",
    "append_unique", "sample_neighbors", "sample_neighbors_weighted", "sample_hops",
)  # fmt: skip
#: Elements of a row of 512 bytes.
_WIDTH = 128
_CLASSES = 16


def power_law(num_nodes: int, num_edges: int, skew: float = 4.0) -> dgl.DGLGraph:
    """A graph some of whose nodes, anywhere among the ids, are the sources of most edges.

    The ``n``-th of them is the source of a share of edges in proportion to ``n ** (1 / skew - 1)``.
    """
    draw = torch.Generator().manual_seed(0)
    hot = (num_nodes * torch.rand(num_edges, generator=draw, dtype=torch.float64) ** skew).long()
    sources = torch.randperm(num_nodes, generator=draw)[hot]
    destinations = torch.randint(num_nodes, (num_edges,), generator=draw)
    g = dgl.graph((sources, destinations), num_nodes=num_nodes)
    g.ndata["feat"] = torch.randn(num_nodes, _WIDTH, generator=draw)
    g.ndata["label"] = torch.randint(_CLASSES, (num_nodes,), generator=draw)
    return g


class GraphSAGE(nn.Module):
    """As many layers as there are fanouts."""

    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        widths = [_WIDTH, *[hidden] * (num_layers - 1), _CLASSES]
        self.layers = nn.ModuleList(
            dgl.nn.SAGEConv(before, after, "mean") for before, after in itertools.pairwise(widths)
        )

    def forward(self, blocks: Any, h: torch.Tensor) -> torch.Tensor:
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, h if number == 0 else h.relu())
        return h


class Bench:
    """Rows and steps, on one rank."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._everyone = Communicator.of_all_machines()
        about = {key: str(value) for key, value in vars(options).items()}
        about["backend"] = dist.get_backend()
        self._report = Report(self._everyone, options.out, options=about)
        self._graph = power_law(options.nodes, options.edges)

    def run(self) -> None:
        peer = connect(self._everyone, not self._options.no_peer)
        with self._store("job", 0.0) as store:
            self._rows(store, peer)
        if peer is not None:
            peer.close()
        if not self._options.replica_ratio:
            return
        with self._store("machine") as copy:
            for ratio in self._options.replica_ratio:
                with self._store("job", ratio) as store:
                    self._steps(store, copy, ratio)

    def _store(self, span: str, ratio: float | str = "auto") -> dgl_mgpu.GlobalStore:
        fanouts, batch = self._options.fanouts, self._options.batch
        return dgl_mgpu.GlobalStore.from_dgl(
            self._graph, seed=1, span=span, replica_ratio=ratio, fanouts=fanouts, batch_size=batch
        )

    # -- rows -----------------------------------------------------------------------------

    def _rows(self, store: dgl_mgpu.GlobalStore, peer: WholeGraph | None) -> None:
        """Ids of the other machine's half, which is about where its nodes begin."""
        count, num_nodes = self._options.rows, self._options.nodes
        ranks, rank = self._everyone.size, self._everyone.rank
        there = (rank + 1) % ranks
        first = num_nodes * (2 * there + 1) // (2 * ranks) - count // 2
        draw = torch.Generator().manual_seed(rank)
        ids = (first + torch.randperm(count, generator=draw)).to(store.device)
        store.graph.traffic.take()
        found = store.gather("feat", ids)
        if not torch.equal(found.cpu(), self._graph.ndata["feat"][ids.cpu()]):
            raise ValueError("other rows were gathered than the nodes have")
        memory = "peer" if self._options.links == "mapped" else "remote"
        nbytes = store.graph.traffic.take().nbytes["feat", memory]
        if nbytes != found.nbytes:
            raise ValueError(f"{nbytes} bytes of {found.nbytes} were another machine's")
        sends = [count if other == (rank - 1) % ranks else 0 for other in range(ranks)]
        receives = [count if other == there else 0 for other in range(ranks)]
        rows, room = torch.zeros_like(found), torch.empty_like(found)

        def all_to_all() -> None:
            dist.all_to_all_single(room, rows, receives, sends)

        cases = {"ours": lambda: store.gather("feat", ids), "NCCL": all_to_all}
        with contextlib.ExitStack() as using:
            if peer is not None:
                cases |= self._peers_ways(using.enter_context(self._peers_rows(peer)), ids, found)
            seconds = self._in_turns(cases)
        rates = {name: nbytes / self._over_ranks(each) / 1e9 for name, each in seconds.items()}
        is_mapped = self._options.links == "mapped"  # then NCCL sends none of them
        peers = {name: rate for name, rate in rates.items() if name.startswith("peer")}
        self._report.add(
            Figure(
                f"{count} rows of {found[0].nbytes} B",
                "GB/s",
                rates["ours"],
                peer=max(peers.values(), default=None),
                ceiling=None if is_mapped else rates["NCCL"],
                times_peer=TIMES_PEER if peers else None,
                of_ceiling=None if is_mapped else OF_ALL_TO_ALL,
                more={"gb_per_second": rates, "seconds": seconds},
            )
        )

    def _peers_rows(self, peer: WholeGraph) -> contextlib.AbstractContextManager[Gather]:
        """The gather of the peer, which deals rows out by ranges of ids, too."""
        rows = self._graph.ndata["feat"]

        def make(ids: torch.Tensor) -> torch.Tensor:
            return rows[ids.cpu()].to(ids.device)

        return peer.table("cuda", *rows.shape, make, kind="distributed")

    @staticmethod
    def _peers_ways(
        gather: Gather, ids: torch.Tensor, expected: torch.Tensor
    ) -> dict[str, Callable[[], torch.Tensor]]:
        """Also with ids of half the bytes, and in their order."""
        order = ids.argsort()
        ways = {}
        for name, of, rows in (
            ("peer", ids, expected),
            ("peer, ids of 32 bits", ids.int(), expected),
            ("peer, ids in order", ids[order], expected[order]),
            ("peer, ids of 32 bits in order", ids[order].int(), expected[order]),
        ):
            if not torch.equal(gather(of), rows):
                raise ValueError(f"{name}: other rows were gathered than the nodes have")
            ways[name] = partial(gather, of)
        return ways

    # -- steps ----------------------------------------------------------------------------

    def _steps(
        self, store: dgl_mgpu.GlobalStore, copy: dgl_mgpu.GlobalStore, ratio: float | str
    ) -> None:
        self._require_same_batches(store, copy)
        model = nn.parallel.DistributedDataParallel(
            GraphSAGE(self._options.hidden, len(self._options.fanouts)).to(self._device)
        )
        optimizer = torch.optim.Adam(model.parameters(), fused=self._device.type == "cuda")

        def train(of: dgl_mgpu.GlobalStore) -> None:
            for _, _, blocks in self._batches(of):
                outputs = model(blocks, blocks[0].srcdata["feat"])
                loss = nn.functional.cross_entropy(outputs, blocks[-1].dstdata["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        seconds = self._in_turns({"job": lambda: train(store), "copy": lambda: train(copy)})
        steps = self._options.steps
        ours, peer = (self._over_ranks(seconds[name]) / steps for name in ("job", "copy"))
        more = {"seconds": seconds, **self._network(store)}
        self._report.add(
            Figure(
                f"step, {ratio} of the bytes replicated",
                "ms",
                1e3 * ours,
                peer=1e3 * peer,
                times_peer=1 / TIMES_A_COPY,
                more=more,
            )
        )

    def _batches(self, store: dgl_mgpu.GlobalStore) -> Iterator[Any]:
        options = self._options
        draw = torch.Generator().manual_seed(self._everyone.rank)
        count = options.steps * options.batch
        seeds = torch.randperm(options.nodes, generator=draw)[:count].to(self._device)
        sampler = dgl.dataloading.NeighborSampler(
            options.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        store.graph.set_epoch(0)
        return iter(
            dgl.dataloading.DataLoader(
                store.graph, seeds, sampler, batch_size=options.batch, device=store.device
            )
        )

    def _require_same_batches(
        self, store: dgl_mgpu.GlobalStore, copy: dgl_mgpu.GlobalStore
    ) -> None:
        for (_, _, found), (_, _, expected) in zip(
            self._batches(store), self._batches(copy), strict=True
        ):
            for block, other in zip(found, expected, strict=True):
                ends = zip(block.edges(), other.edges(), strict=True)
                pairs = [*ends, (block.edata[dgl.EID], other.edata[dgl.EID])]
                pairs.append((block.srcdata[dgl.NID], other.srcdata[dgl.NID]))
                if not all(torch.equal(*pair) for pair in pairs):
                    raise ValueError("the samples of one copy over machines are others")
            pairs = [(batch[0].srcdata["feat"], batch[-1].dstdata["label"])
                     for batch in (found, expected)]  # fmt: skip
            if not all(torch.equal(*pair) for pair in zip(*pairs, strict=True)):
                raise ValueError("the features of one copy over machines are others")

    def _network(self, store: dgl_mgpu.GlobalStore) -> dict[str, Any]:
        """What comes to this rank over the network in a pass, and in how many collectives."""
        store.graph.traffic.take()
        num_nodes = 0
        with counted_collectives() as counts, counted_calls() as calls:
            for inputs, _, _ in self._batches(store):
                num_nodes += len(inputs)
        traffic = store.graph.traffic.take()
        row_bytes = _WIDTH * self._graph.ndata["feat"].element_size()
        of_feat = {memory: n for (table, memory), n in traffic.nbytes.items() if table == "feat"}
        steps = self._options.steps
        return {
            "collectives_a_batch": {name: n / steps for name, n in counts.items()},
            "calls_a_batch": {name: n / steps for name, n in calls.items()},
            "input_nodes_a_batch": num_nodes / steps,
            "bytes_of_rows_a_batch": {memory: n / steps for memory, n in of_feat.items()},
            "remote_share_of_rows": of_feat.get("remote", 0) / (num_nodes * row_bytes),
        }

    # -- times ----------------------------------------------------------------------------

    def _in_turns(self, cases: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Seconds of each case, all ranks at once, after a turn that does not count."""
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(1 + self._options.repeats):
            for name, case in cases.items():
                self._synchronize()
                begin = time.perf_counter()
                case()
                self._synchronize()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
        return seconds

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()

    def _over_ranks(self, seconds: list[float]) -> float:
        """The mean over ranks of their medians."""
        medians = self._everyone.all_gather(statistics.median(seconds))
        return statistics.fmean(medians)


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the collectives that this rank takes part in."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return originals[name](*arguments, **options)

        return call

    for name in _COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class _Calls(TorchDispatchMode):
    """Counts operators, and those that a host waits for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._counts["operators"] += 1
        # An index of booleans is made into one of places.
        name, is_index = func.overloadpacket.__name__, func.overloadpacket.__name__ == "index"
        by_mask = is_index and any(it is not None and it.dtype == torch.bool for it in args[1])
        before = self._counts["waits"]
        result = func(*args, **(kwargs or {}))
        # Not what an operator does on the CPU.
        self._counts["waits"] = before + (name in _WAITS or by_mask)
        return result


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count torch's operators, and how often a host waits for one on a GPU."""
    counts: Counter[str] = Counter()
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        counts["waits"] += 1
        return tolist(tensor)

    torch.Tensor.tolist = counted  # type: ignore[method-assign]
    try:
        with _Calls(counts):
            yield counts
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--edges", type=int, default=40_000_000)
    parser.add_argument("--rows", type=int, default=250_000, help="that are gathered at once")
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50, help="of a pass that is timed")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns")
    parser.add_argument(
        "--replica-ratio", type=float, nargs="*", default=[0.1, 0.5, 0.0],
        help="of the bytes; steps are left out where none is named",
    )  # fmt: skip
    parser.add_argument("--no-peer", action="store_true", help="leave pylibwholegraph out")
    parser.add_argument("--links", choices=("network", "any", "mapped"), default="network")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    if options.links == "network":
        os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    if options.links == "mapped":
        cuda_runtime.FabricMemory = DescriptorMemory  # type: ignore[misc]
    device = be_machine(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        Bench(options, device).run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
