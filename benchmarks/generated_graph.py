"""Large generated graphs with features, made on a GPU and kept in a store.

Nothing of a graph is on a disk: rows are made when they are asked for, the same on every rank, and
edges are picked out on the GPU that has made them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip

from benchmarks.fullgraph import random_rows
from benchmarks.gpu import PowerLaw, built_store, why_not_possible
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data.generate import GraphSpec
from dgl_mgpu.graph.relation import ranges
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.store.graph_structure import node_table, topology_table
from dgl_mgpu.store.memory import FeatureSource, TopologySource
from dgl_mgpu.store.memory.format import Source

_CHUNK = 1 << 26
_NTYPE = "_N"
_ETYPE = (_NTYPE, "_E", _NTYPE)


class Data:
    """A power-law graph and its nodes' features, the same on every rank.

    Edges are made where ``device`` is, and rows when they are asked for.

    Attributes
    ----------
    indptr, indices : Tensor
        Int64 and int32; until :meth:`forget_edges`.
    num_edges : int
    stored : torch.dtype
        Type in which a store keeps the features.
    """

    def __init__(
        self, spec: GraphSpec, device: torch.device, stored: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.device, self.stored = spec, device, stored
        law = PowerLaw(spec.num_nodes, spec.num_edges, in_step=True)
        self.indptr, self.indices = law.csc(device, torch.int32)
        self.num_edges = len(self.indices)
        self.idtype = torch.int32 if self.num_edges <= 2**31 else torch.int64
        #: How often a node is another's neighbour.
        self.reads = torch.zeros_like(self.indptr[:-1])
        for some in self.indices.split(_CHUNK):
            self.reads += torch.bincount(some, minlength=spec.num_nodes)
        degrees = torch.stack([self.reads, self.indptr.diff()], 1)
        self._inv_sqrt_degrees = 1 / degrees.clamp(min=1).float().sqrt()

    def rows(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """What gives nodes' rows of each feature, as a store does."""
        return {
            "feat": self._features,
            "label": self._labels,
            INV_SQRT_DEGREES: self._inv_sqrt_degrees.__getitem__,
        }

    def _features(self, ids: torch.Tensor) -> torch.Tensor:
        return random_rows(ids, self.spec.num_features).to(self.stored).float()

    def _labels(self, ids: torch.Tensor) -> torch.Tensor:
        return (random_rows(ids, 1)[:, 0] * self.spec.num_classes).long()

    @property
    def node_bytes(self) -> int:
        """Of all that :meth:`rows` gives of a node."""
        return self.stored.itemsize * self.spec.num_features + 8 + 8

    @property
    def nbytes(self) -> int:
        """Of all in a store, without an order."""
        return (self.node_bytes + 16) * self.spec.num_nodes + self.idtype.itemsize * self.num_edges

    def in_edges(self, nodes: torch.Tensor) -> torch.Tensor:
        """Places of all in-edges of nodes, one node's after the other's."""
        first = self.indptr[nodes]
        return ranges(first, self.indptr[nodes + 1] - first)

    def forget_edges(self) -> None:
        """Give their memory back."""
        self.indptr = self.indices = torch.empty(0)


class MadeRows:
    """Rows for a store that a function makes of their ids, where ``device`` is."""

    def __init__(
        self, num_rows: int, make: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self._make, self._device = make, device
        row = make(torch.zeros(1, dtype=torch.int64, device=device)).cpu().numpy()
        self.shape, self.dtype, self.ndim = (num_rows, *row.shape[1:]), row.dtype, row.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return on_host(self._make(torch.from_numpy(ids).to(self._device)))


class MadeIndices:
    """All edges' sources, as much of an array as a store's source needs."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.indices)

    def min(self) -> int:
        return int(self.data.indices.min())

    def max(self) -> int:
        return int(self.data.indices.max())

    def __getitem__(self, places: torch.Tensor) -> np.ndarray:
        return on_host(self.data.indices[places])


class MadeTopology(TopologySource):
    """A graph for a store whose edges are picked out where they were made."""

    def edge_positions(self, first: np.ndarray, counts: np.ndarray) -> Any:
        where = self.indices.data.device
        return ranges(torch.from_numpy(first).to(where), torch.from_numpy(counts).to(where))


def on_host(rows: torch.Tensor) -> np.ndarray:
    """A tensor as an array, by way of pinned memory."""
    if rows.device.type == "cpu":
        return rows.numpy()
    return torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows).numpy()


@contextlib.contextmanager
def stored(
    data: Data, ranks: Communicator, options: Mapping[str, Any], *, by_hotness: bool = False
) -> Iterator[StoreGraph]:
    """The graph in a store; collective.

    If ``by_hotness``, its rows are ordered by how often a node is another's neighbour.
    """
    given = _sources(data, by_hotness) if ranks.rank == 0 else (None, {})
    if data.device.type == "cuda":
        torch.cuda.empty_cache()  # which making the graph has left, and the store needs
    with built_store(*given, ranks, options, calibrated=True) as store:
        yield StoreGraph(store, {_NTYPE: data.spec.num_nodes}, [_ETYPE], seed=0)


def why_not_stored(data: Data, ranks: Communicator, options: Mapping[str, Any]) -> str:
    """Why :func:`stored` could not place it by hotness; nothing, if it could.  Collective."""
    given = _sources(data, by_hotness=True) if ranks.rank == 0 else (None, {})
    return why_not_possible(*given, ranks, options)


def _sources(data: Data, by_hotness: bool) -> tuple[dict[str, Source], dict[str, np.ndarray]]:
    num_nodes, order = data.spec.num_nodes, "nodes" if by_hotness else ""
    indptr = data.indptr.cpu().numpy()
    sources: dict[str, Source] = {
        topology_table(_ETYPE): MadeTopology(
            indptr, MadeIndices(data), None, num_nodes, data.idtype, order
        )
    }
    for name, make in data.rows().items():
        rows = MadeRows(num_nodes, make, data.device)
        stored = data.stored if name == "feat" else None
        sources[node_table(_NTYPE, name)] = FeatureSource(rows, order, stored)
    return sources, {order: data.reads.cpu().numpy()} if by_hotness else {}


def all_in_gpu_memory(data: Data, ranks: Communicator) -> dict[str, Any]:
    """Options of a store that is dealt out over the GPUs."""
    memory = int(1.05 * data.nbytes / ranks.size) + (64 << 20)
    return {"policy": "partitioned", "gpu_memory": memory}


def require_edges(what: str, data: Data, blocks: Iterable[dgl.DGLGraph]) -> None:
    """Raise ValueError unless all edges of blocks are edges of the graph."""
    for number, block in enumerate(blocks):
        src, dst = (each.long() for each in block.edges())
        sources, targets = block.srcdata[dgl.NID].long(), block.dstdata[dgl.NID].long()
        rows = torch.arange(len(targets), device=data.device)
        degrees = data.indptr[targets + 1] - data.indptr[targets]
        neighbors = data.indices[data.in_edges(targets)].long()
        there = torch.repeat_interleave(rows, degrees) * data.spec.num_nodes + neighbors
        if not torch.isin(dst * data.spec.num_nodes + sources[src], there).all():
            raise ValueError(f"{what}: block {number} has an edge that is not in the graph")


def require_rows(what: str, data: Data, blocks: Sequence[dgl.DGLGraph]) -> None:
    """Raise ValueError unless a batch's features and labels are those of its nodes."""
    given = {**blocks[0].srcdata, "label": blocks[-1].dstdata["label"]}
    nodes = given.pop(dgl.NID).long()
    for name, rows in given.items():
        those = nodes[: len(rows)]
        wrong = (rows != data.rows()[name](those)).reshape(len(rows), -1).any(1)
        if wrong.any():
            raise ValueError(f"{what}: wrong '{name}', the first of node {int(those[wrong][0])}")


def seeds_of(data: Data, count: int) -> torch.Tensor:
    """Distinct nodes, the same on every rank."""
    draw = torch.Generator(data.device).manual_seed(1)
    nodes = torch.randperm(data.spec.num_nodes, generator=draw, device=data.device)
    return nodes[:count].to(data.idtype)
