"""Static buffers for mini-batches, so that one CUDA graph can compute them all.

The kernels of a CUDA graph have fixed addresses and sizes.  So batches are copied into larger
blocks, whose padding does not change the batch's results: padding edges go from the last source of
their type to padding destinations, evenly distributed, and nothing reads what comes out there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from dgl.base import EID, NID
from dgl.frame import Column, Frame, Scheme
from dgl.heterograph import DGLBlock

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.ops import EtypeBlock
from dgl_mgpu.sampling.loader_batches import FeatureSource, FrameKey

#: Spare capacity beside the largest batch so far, as a share of it and in rows: batches of random
#: seeds differ by less.
_SHARE, _ROWS = 1 / 64, 32

#: Names of the features that hold ids in the whole graph.
_IDS = {"src": NID, "dst": NID, "edge": EID}

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Types:
    """Node and edge types of a batch, in the graph's order.

    Attributes
    ----------
    nodes : tuple of str
    edges : tuple of (str, str, str)
    """

    nodes: tuple[str, ...]
    edges: tuple[tuple[str, str, str], ...]

    @cached_property
    def frames(self) -> list[FrameKey]:
        """The frames of a block, in its order."""
        ends = [FrameKey(side, ntype) for side in ("src", "dst") for ntype in self.nodes]
        return [*ends, *(FrameKey("edge", etype) for etype in self.edges)]

    def are_of(self, hops: Sequence[EtypeBlock]) -> bool:
        """Whether hops have these types; they lack node types without edges."""
        return all(
            hop.num_dst.keys() == set(self.nodes) and hop.edges.keys() == set(self.edges)
            for hop in hops
        )


@dataclass(frozen=True)
class Sizes:
    """Numbers of nodes and edges in the blocks of a mini-batch.

    Attributes
    ----------
    nodes : tuple of tuple of int
        Of each node type, the sources of each block and, last, the destinations of the last one.
    edges : tuple of tuple of int
        Of each block and edge type.
    """

    nodes: Counts
    edges: Counts

    @classmethod
    def of(cls, blocks: Sequence[DGLBlock]) -> Sizes:
        """The sizes of a batch.

        Raises
        ------
        InvalidInputError
            If the destinations of a block are not the sources of the next one.
        """
        sources = [tuple(map(block.num_src_nodes, block.srctypes)) for block in blocks]
        targets = [tuple(map(block.num_dst_nodes, block.dsttypes)) for block in blocks]
        for number, (ends, begins) in enumerate(zip(targets, sources[1:], strict=False)):
            if ends != begins:
                raise InvalidInputError(
                    "copy a mini-batch into static buffers",
                    f"block {number} has {', '.join(map(str, ends))} destinations, "
                    f"but the next has {', '.join(map(str, begins))} sources",
                    "pass the blocks of one mini-batch, the one nearest the input first",
                )
        edges = (tuple(map(block.num_edges, block.canonical_etypes)) for block in blocks)
        return cls((*sources, targets[-1]), tuple(edges))

    @classmethod
    def of_hops(cls, hops: Sequence[EtypeBlock], types: Types) -> Sizes:
        """The sizes of sampled hops that have nodes of all types."""
        sources = [tuple(len(hop.src_nodes[ntype]) for ntype in types.nodes) for hop in hops]
        seeds = tuple(hops[-1].num_dst[ntype] for ntype in types.nodes)
        edges = (tuple(len(hop.edges[etype].src) for etype in types.edges) for hop in hops)
        return cls((*sources, seeds), tuple(edges))

    @property
    def shape(self) -> Hashable:
        """What batches must share to use the same buffers: numbers of seeds, blocks and types."""
        return self.nodes[-1], tuple(map(len, self.edges))

    def joined(self, other: Sizes) -> Sizes:
        """The elementwise maximum of two sizes."""
        return Sizes(
            *(
                tuple(tuple(map(max, *pair)) for pair in zip(mine, its, strict=True))
                for mine, its in ((self.nodes, other.nodes), (self.edges, other.edges))
            )
        )

    def with_spare(self) -> Sizes:
        """A capacity for batches of as many seeds that are otherwise somewhat larger."""
        *nodes, seeds = self.nodes
        return Sizes(
            # One more node, for the ends of padding edges.
            (*(tuple(map(_more, counts)) for counts in nodes), tuple(n + 1 for n in seeds)),
            tuple(tuple(_more(count) if count else 0 for count in counts) for counts in self.edges),
        )

    def hold(self, batch: Sizes) -> bool:
        """Whether a batch fits this capacity."""
        *nodes, seeds = batch.nodes
        return (
            tuple(n + 1 for n in seeds) == self.nodes[-1]
            and all(n < most for n, most in _pairs(nodes, self.nodes[:-1]))
            and all(n <= most for n, most in _pairs(batch.edges, self.edges))
        )


def _more(count: int) -> int:
    return count + int(_SHARE * count) + _ROWS


def _pairs(some: Sequence[Sequence[int]], others: Counts) -> Iterator[tuple[int, int]]:
    for pair in zip(some, others, strict=True):
        yield from zip(*pair, strict=True)


class _Contents(Protocol):
    """One block of a batch to be copied into static buffers."""

    def edges(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The indptr and the sources of each edge type."""

    def rows(self, frame: int, name: str, out: torch.Tensor) -> torch.Tensor | None:
        """A feature of a frame, by number (:attr:`Types.frames`); None if it was written to out."""


class _Block:
    """A DGL block and its features."""

    def __init__(self, block: DGLBlock) -> None:
        self._relations = block._graph.relations
        self._frames = (*block._node_frames, *block._edge_frames)

    def edges(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for relation in self._relations:
            found = relation.csc()
            if found.eids is not None:
                raise InvalidInputError(
                    "copy a mini-batch into static buffers",
                    "the edges of a block are not in the order of their destinations",
                    "use blocks as DGL's neighbour samplers make them",
                )
            yield found.indptr, found.indices

    def rows(self, frame: int, name: str, out: torch.Tensor) -> torch.Tensor:
        return _read(self._frames[frame], name)


class _Hop:
    """A sampled hop and the features to fetch for it."""

    def __init__(self, hop: EtypeBlock, types: Types, features: FeatureSource) -> None:
        self._hop, self._types, self._features = hop, types, features

    def edges(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for etype in self._types.edges:
            yield self._hop.edges[etype][:2]

    def rows(self, frame: int, name: str, out: torch.Tensor) -> torch.Tensor | None:
        hop, of = self._hop, self._types.frames[frame]
        if of.side == "edge":
            ids = hop.edges[of.type].eids
        else:
            ids = hop.src_nodes[of.type]
            if of.side == "dst":
                ids = ids[: hop.num_dst[of.type]]
        if name == _IDS[of.side]:
            return ids
        self._features.fetch(of, name, ids, out[: len(ids)])
        return None


class StaticBuffers:
    """Memory for a mini-batch at fixed addresses, and blocks in it.

    Parameters
    ----------
    batch : list of DGLBlock
        The first batch, which is loaded.
    sizes : Sizes
        The capacity.

    Attributes
    ----------
    sizes : Sizes
    types : Types
        Of the nodes and edges.
    """

    def __init__(self, batch: Sequence[DGLBlock], sizes: Sizes) -> None:
        self.sizes = sizes
        self.types = Types(tuple(batch[0].srctypes), tuple(batch[0].canonical_etypes))
        self._parts = [
            _BlockBuffers(block, (*sources, *targets), edges)
            for block, sources, targets, edges in zip(
                batch, sizes.nodes, sizes.nodes[1:], sizes.edges, strict=False
            )
        ]
        self.load(batch)

    def load(self, batch: Sequence[DGLBlock]) -> None:
        """Load a batch that fits."""
        self._load([_Block(block) for block in batch])

    def load_hops(self, hops: Sequence[EtypeBlock], features: FeatureSource) -> None:
        """Load sampled hops, and fetch the features that the model reads."""
        self._load([_Hop(hop, self.types, features) for hop in hops])

    def takes(self, batch: Sequence[DGLBlock]) -> bool:
        """Whether the features of a batch have the shapes and dtypes of the buffers."""
        return all(
            (column.shape[1:], column.dtype) == tuple(found._columns[name].scheme)
            for part, block in zip(self._parts, batch, strict=True)
            for buffers, found in zip(
                part.frames, (*block._node_frames, *block._edge_frames), strict=True
            )
            for name, column in buffers.columns.items()
            if name in found._columns
        )

    def is_served_by(self, features: FeatureSource) -> bool:
        """Whether a source has all features that the model reads, apart from ids."""
        last = len(self._parts) - 1
        return all(
            name == _IDS[of.side] or features.serves(number == 0, number == last, of, name, column)
            for number, part in enumerate(self._parts)
            for of, frame in zip(self.types.frames, part.frames, strict=True)
            for name, column in frame.columns.items()
        )

    def _load(self, batch: Sequence[_Contents]) -> None:
        into: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        for part, contents in zip(self._parts, batch, strict=True):
            for here, there in part.load(contents):
                into.append(here)
                what.append(there)
        torch._foreach_copy_(into, what)

    def blocks(self, sizes: Sizes | None = None) -> list[DGLBlock]:
        """Blocks of the loaded batch with padding; without it if the batch's sizes are given.

        Buffers for features are allocated when the model first reads them.
        """
        nodes, edges = (sizes or self.sizes).nodes, (sizes or self.sizes).edges
        return [
            part.block((*sources, *targets), counts)
            for part, sources, targets, counts in zip(
                self._parts, nodes, nodes[1:], edges, strict=False
            )
        ]

    def forget(self) -> None:
        """Release the first batch, once the model has read all features that it reads."""
        for part in self._parts:
            part.forget()


class _BlockBuffers:
    """Static buffers of one block; ``nodes`` counts its sources, then its destinations."""

    def __init__(self, block: DGLBlock, nodes: Sequence[int], edges: Sequence[int]) -> None:
        index: TensorIndex = block._graph
        self._schema: GraphSchema = index.schema
        kept = {"_graph", "_node_frames", "_edge_frames"}
        self._attributes = {name: it for name, it in vars(block).items() if name not in kept}
        ids = torch.empty(0, dtype=index.idtype, device=index.device)
        ends = self._schema.ends
        self._indptrs = [ids.new_zeros(nodes[dst] + 1) for _, dst in ends]
        self._sources = [ids.new_zeros(count) for count in edges]
        #: Of both, what is beyond a batch; but edges begin where its own end at the earliest.
        #: Sources of the batch's would have other out-degrees.
        self._tails = [
            (_even_starts(indptr, len(sources)), torch.full_like(sources, nodes[src] - 1))
            for (src, _), indptr, sources in zip(ends, self._indptrs, self._sources, strict=True)
        ]
        frames = (*block._node_frames, *block._edge_frames)
        self.frames = [*map(_FrameBuffers, frames, (*nodes, *edges))]

    def load(self, contents: _Contents) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a destination and the tensor to copy there."""
        parts = zip(contents.edges(), self._indptrs, self._sources, self._tails, strict=True)
        for (starts, indices), indptr, sources, (no_starts, no_indices) in parts:
            rows, edges = len(starts), len(indices)
            yield indptr[:rows], starts
            torch.clamp(no_starts[rows:], min=edges, out=indptr[rows:])
            yield sources[:edges], indices
            yield sources[edges:], no_indices[edges:]
        for number, frame in enumerate(self.frames):
            for name, column in frame.columns.items():
                data = contents.rows(number, name, column)
                if data is not None:
                    yield column[: len(data)], data

    def block(self, nodes: Sequence[int], edges: Sequence[int]) -> DGLBlock:
        """A block of the first ``nodes``, sources before destinations, and ``edges``."""
        relations = [
            Relation(
                nodes[src],
                nodes[dst],
                csc=Compressed(indptr[: nodes[dst] + 1], sources[:count], None),
            )
            for (src, dst), indptr, sources, count in zip(
                self._schema.ends, self._indptrs, self._sources, edges, strict=True
            )
        ]
        frames = [
            buffers.frame(rows) for buffers, rows in zip(self.frames, (*nodes, *edges), strict=True)
        ]
        block = DGLBlock.__new__(DGLBlock)
        block.__dict__ = {
            **self._attributes,
            "_graph": TensorIndex(self._schema, nodes, relations),
            "_node_frames": frames[: len(nodes)],
            "_edge_frames": frames[len(nodes) :],
        }
        return block

    def forget(self) -> None:
        for buffers in self.frames:
            buffers.forget()


def _even_starts(indptr: torch.Tensor, edges: int) -> torch.Tensor:
    """An indptr, counted from its end, that distributes edges evenly over destinations.

    If one destination had all padding edges, atomic additions would serialise there.
    """
    last = len(indptr) - 1
    places = torch.arange(-last, 1, dtype=indptr.dtype, device=indptr.device)
    return edges + -(-edges // last) * places


class _FrameBuffers:
    """Static buffers for the features of a frame."""

    def __init__(self, frame: Frame, rows: int) -> None:
        self.rows = rows
        self._first: Frame | None = frame
        self._schemes = {name: column.scheme for name, column in frame._columns.items()}
        #: Those that the model has read.
        self.columns: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        self._first = None

    def frame(self, rows: int) -> Frame:
        columns = {name: _BufferColumn(self, rows, name, it) for name, it in self._schemes.items()}
        return Frame(columns, num_rows=rows)

    def column(self, name: str) -> torch.Tensor:
        """The buffer of a feature, allocated at the first call."""
        found = self.columns.get(name)
        if found is None:
            if self._first is None:
                raise InvalidInputError(
                    f"read feature '{name}' of a mini-batch",
                    "the forward pass did not read it for the first mini-batch",
                    "read the same features for every mini-batch",
                )
            data = _read(self._first, name)
            # Padding rows get numbers that can be divided by, and classes and ids that exist.
            fill = data.new_ones if data.is_floating_point() else data.new_zeros
            found = fill((self.rows, *data.shape[1:]))
            found[: len(data)].copy_(data)
            self.columns[name] = found
        return found


def _read(frame: Frame, name: str) -> torch.Tensor:
    data = frame[name]
    if data.requires_grad:
        raise InvalidInputError(
            "copy a mini-batch into static buffers",
            f"feature '{name}' requires a gradient, which would not reach what it was computed "
            "from",
            "compute it in the forward pass, from parameters of the model",
        )
    return data


class _BufferColumn(Column):
    """A column whose buffer is allocated when it is first read."""

    def __init__(self, buffers: _FrameBuffers, rows: int, name: str, scheme: Scheme) -> None:
        self._buffers, self._rows, self._name = buffers, rows, name
        super().__init__(None, scheme)

    @property
    def storage(self) -> torch.Tensor:
        return self._buffers.column(self._name)[: self._rows] if self._own is None else self._own

    @storage.setter
    def storage(self, data: torch.Tensor | None) -> None:
        self._own = data

    def __len__(self) -> int:
        return self._rows

    def clone(self) -> Column:
        """A column of the same buffer; does not read it."""
        twin = _BufferColumn(self._buffers, self._rows, self._name, self.scheme)
        twin._own, twin.deferred_dtype = self._own, self.deferred_dtype
        return twin
