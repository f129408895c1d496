"""Static buffers for mini-batches, so that one CUDA graph can compute them all.

The kernels of a CUDA graph have fixed addresses and sizes.  So batches are copied into larger
blocks, whose padding does not change the batch's results: padding edges go from the last source of
their type to padding destinations, evenly distributed, and nothing reads what comes out there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from dgl.base import EID, NID
from dgl.frame import Column, Frame, Scheme
from dgl.heterograph import DGLBlock, DGLGraph

from dgl_mgpu.capture.copy_list import CopyList
from dgl_mgpu.capture.sizes import Sizes, Types
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import Compressed, Coo, Relation, compress
from dgl_mgpu.ops import EtypeBlock
from dgl_mgpu.sampling.loader_batches import FeatureSource

#: Names of the features that hold ids in the whole graph.
_IDS = {"src": NID, "dst": NID, "edge": EID}


class _Contents(Protocol):
    """One block of a batch to be copied into static buffers."""

    def edges(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The indptr and the sources of each edge type."""

    def rows(self, frame: int, name: str, out: RowBuffer) -> torch.Tensor | None:
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
            yield found[:2]

    def rows(self, frame: int, name: str, out: RowBuffer) -> torch.Tensor:
        return _read(self._frames[frame], name)


class _Hop:
    """A sampled hop and the features to fetch for it."""

    def __init__(self, hop: EtypeBlock, types: Types, features: FeatureSource) -> None:
        self._hop, self._types, self._features = hop, types, features

    def edges(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for etype in self._types.edges:
            yield self._hop.edges[etype][:2]

    def rows(self, frame: int, name: str, out: RowBuffer) -> torch.Tensor | None:
        hop, of = self._hop, self._types.frames[frame]
        if of.side == "edge":
            ids = hop.edges[of.type].eids
        else:
            ids = hop.src_nodes[of.type]
            if of.side == "dst":
                ids = ids[: hop.num_dst[of.type]]
        if name == _IDS[of.side]:
            return ids
        out.shrink(len(ids))
        self._features.fetch(of, name, ids, out.data[: len(ids)])
        return None


class RowBuffer:
    """A static buffer for rows of a feature, more than any batch has.

    Padding rows hold ones, which other numbers can be divided by, or, if they are integers, zeros
    or what a batch before had there: classes and ids that exist.
    """

    def __init__(self, data: torch.Tensor, rows: int) -> None:
        fill = data.new_ones if data.is_floating_point() else data.new_zeros
        self.data = fill((rows, *data.shape[1:]))
        self.data[: len(data)].copy_(data)
        self._num_loaded = len(data)
        #: In a list of copies.
        self._number: int | None = None

    def load(self, data: torch.Tensor, copies: CopyList) -> None:
        """Have a batch's rows copied here."""
        if self._number is None:
            self._number = copies.add_rows(self.data)
        copies.rows(self._number, data, self._padded(data.shape[0]))

    def shrink(self, rows: int) -> None:
        """Make what is beyond the next batch's rows padding."""
        padded = self._padded(rows)
        if rows < padded:
            self.data[rows:padded].fill_(1)

    def _padded(self, rows: int) -> int:
        """How many rows are the next batch's or have to be made padding."""
        loaded, self._num_loaded = self._num_loaded, rows
        return max(loaded, rows) if self.data.is_floating_point() else rows


class StaticBuffers:
    """Memory for a mini-batch at fixed addresses, and graphs in it.

    Parameters
    ----------
    batch : list of DGLBlock
        The first batch, which is loaded.
    sizes : Sizes
        The capacity.
    pair_graphs : list of DGLGraph
        Graphs of node pairs among the seeds, as DGL's edge samplers make them.
    """

    def __init__(
        self, batch: Sequence[DGLBlock], sizes: Sizes, pair_graphs: Sequence[DGLGraph] = ()
    ) -> None:
        self.sizes = sizes
        self.types = Types(tuple(batch[0].srctypes), tuple(batch[0].canonical_etypes))
        self._copies = CopyList(torch.empty(0, dtype=batch[0].idtype, device=batch[0].device))
        self._parts = [
            _BlockBuffers(block, (*sources, *targets), edges, self._copies)
            for block, sources, targets, edges in zip(
                batch, sizes.nodes, sizes.nodes[1:], sizes.edges, strict=False
            )
        ]
        self._pair_parts = [
            _PairBuffers(graph, sizes.nodes[-1], edges, self._copies)
            for graph, edges in zip(pair_graphs, sizes.pairs, strict=True)
        ]
        #: The features that the model reads: graph, frame, name, shape and dtype of a row.
        self._features: list[tuple[int, int, str, tuple[torch.Size, torch.dtype]]] = []
        self.load(batch, pair_graphs)

    def load(
        self,
        batch: Sequence[DGLBlock],
        pair_graphs: Sequence[DGLGraph] = (),
        others: Sequence[tuple[RowBuffer, torch.Tensor]] = (),
    ) -> None:
        """Load a batch that fits, and rows for other buffers with the same copy."""
        self._load([_Block(block) for block in batch], pair_graphs, others)

    def load_hops(self, hops: Sequence[EtypeBlock], features: FeatureSource) -> None:
        """Load sampled hops, and fetch the features that the model reads."""
        self._load([_Hop(hop, self.types, features) for hop in hops])

    def takes(self, batch: Sequence[DGLBlock], pair_graphs: Sequence[DGLGraph] = ()) -> bool:
        """Whether a batch has the features that the model reads, of these shapes and dtypes."""
        graphs = (*batch, *pair_graphs) if self._features else ()
        for number, frame_number, name, scheme in self._features:
            graph = graphs[number]
            frame = (*graph._node_frames, *graph._edge_frames)[frame_number]
            if name not in frame._columns or tuple(frame._columns[name].scheme) != scheme:
                return False
        return True

    def columns(self) -> list[RowBuffer]:
        """The buffers of all features that the model reads."""
        parts = (*self._parts, *self._pair_parts)
        return [it for part in parts for frame in part.frames for it in frame.columns.values()]

    def is_served_by(self, features: FeatureSource) -> bool:
        """Whether a source has all features that the model reads, apart from ids."""
        last = len(self._parts) - 1
        return all(
            name == _IDS[of.side]
            or features.serves(number == 0, number == last, of, name, column.data)
            for number, part in enumerate(self._parts)
            for of, frame in zip(self.types.frames, part.frames, strict=True)
            for name, column in frame.columns.items()
        )

    def _load(
        self,
        batch: Sequence[_Contents],
        pair_graphs: Sequence[DGLGraph] = (),
        others: Sequence[tuple[RowBuffer, torch.Tensor]] = (),
    ) -> None:
        for part, contents in zip(self._parts, batch, strict=True):
            part.load(contents, self._copies)
        for pair_part, graph in zip(self._pair_parts, pair_graphs, strict=True):
            pair_part.load(graph, self._copies)
        for buffer, data in others:
            buffer.load(data, self._copies)
        self._copies.run()

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

    def pair_graphs(self) -> list[DGLGraph]:
        """The loaded graphs of node pairs, with padding."""
        return [part.graph() for part in self._pair_parts]

    def forget(self) -> None:
        """Release the first batch, once the model has read all features that it reads."""
        self._features = [
            (graph, frame, name, (column.data.shape[1:], column.data.dtype))
            for graph, part in enumerate((*self._parts, *self._pair_parts))
            for frame, buffers in enumerate(part.frames)
            for name, column in buffers.columns.items()
        ]
        for part in (*self._parts, *self._pair_parts):
            for buffers in part.frames:
                buffers.forget()


class _GraphBuffers:
    """Static buffers of one graph's features, and what else a copy of the graph has."""

    def __init__(self, graph: DGLGraph, nodes: Sequence[int], edges: Sequence[int]) -> None:
        self._type: Any = type(graph)
        self._schema: GraphSchema = graph._graph.schema
        own = {"_graph", "_node_frames", "_edge_frames"}
        self._attributes = {name: it for name, it in vars(graph).items() if name not in own}
        frames = (*graph._node_frames, *graph._edge_frames)
        self.frames = [*map(_FrameBuffers, frames, (*nodes, *edges))]

    def _graph(self, index: TensorIndex, nodes: Sequence[int], edges: Sequence[int]) -> DGLGraph:
        """A graph of these buffers' first rows."""
        frames = [
            buffers.frame(rows) for buffers, rows in zip(self.frames, (*nodes, *edges), strict=True)
        ]
        graph = self._type.__new__(self._type)
        graph.__dict__ = {
            **self._attributes,
            "_graph": index,
            "_node_frames": frames[: len(nodes)],
            "_edge_frames": frames[len(nodes) :],
        }
        return graph


class _BlockBuffers(_GraphBuffers):
    """Static buffers of one block; ``nodes`` counts its sources, then its destinations."""

    def __init__(
        self, block: DGLBlock, nodes: Sequence[int], edges: Sequence[int], copies: CopyList
    ) -> None:
        super().__init__(block, nodes, edges)
        index: TensorIndex = block._graph
        ids = torch.empty(0, dtype=index.idtype, device=index.device)
        ends = self._schema.ends
        self._indptrs = [ids.new_zeros(nodes[dst] + 1) for _, dst in ends]
        self._sources = [ids.new_zeros(count) for count in edges]
        #: Of each edge type: its indptr and its sources in the list of copies.
        self._numbers = [
            # Padding edges start at the last source: others would have other out-degrees.
            (copies.add_starts(indptr, len(sources)), copies.add_ids(sources, nodes[src] - 1))
            for (src, _), indptr, sources in zip(ends, self._indptrs, self._sources, strict=True)
        ]

    def load(self, contents: _Contents, copies: CopyList) -> None:
        """Have a block copied here."""
        for (indptr, sources), numbers in zip(contents.edges(), self._numbers, strict=True):
            copies.starts(numbers[0], indptr, sources.shape[0])
            copies.ids(numbers[1], sources)
        for number, frame in enumerate(self.frames):
            for name, column in frame.columns.items():
                data = contents.rows(number, name, column)
                if data is not None:
                    column.load(data, copies)

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
        return self._graph(TensorIndex(self._schema, nodes, relations), nodes, edges)


class _PairBuffers(_GraphBuffers):
    """Static buffers of a graph of node pairs, whose padding edges join the last nodes."""

    def __init__(
        self, graph: DGLGraph, nodes: Sequence[int], edges: Sequence[int], copies: CopyList
    ) -> None:
        super().__init__(graph, nodes, edges)
        self._nodes, self._edges = nodes, edges
        ids = torch.empty(0, dtype=graph.idtype, device=graph.device)
        #: Of each edge type: sources and destinations.
        self._ends = [tuple(ids.new_zeros(count) for _ in range(2)) for count in edges]
        #: These in the list of copies.
        self._numbers = [
            [copies.add_ids(buffer, nodes[end] - 1) for buffer, end in zip(both, ends, strict=True)]
            for both, ends in zip(self._ends, self._schema.ends, strict=True)
        ]

    def load(self, graph: DGLGraph, copies: CopyList) -> None:
        """Have a graph copied here."""
        for relation, numbers in zip(graph._graph.relations, self._numbers, strict=True):
            for data, number in zip(relation.coo(), numbers, strict=True):
                copies.ids(number, data)
        frames = (*graph._node_frames, *graph._edge_frames)
        for buffers, frame in zip(self.frames, frames, strict=True):
            for name, column in buffers.columns.items():
                column.load(_read(frame, name), copies)

    def graph(self) -> DGLGraph:
        """The loaded graph with padding, in all formats.

        Made of each other when a model asks for one, the host would wait: to see if edges are in
        order already.
        """
        relations = []
        for (src, dst), (row, col) in zip(self._schema.ends, self._ends, strict=True):
            num_src, num_dst = self._nodes[src], self._nodes[dst]
            csr = compress(row, col, num_src, may_be_sorted=False)
            csc = compress(col, row, num_dst, may_be_sorted=False)
            relations.append(Relation(num_src, num_dst, coo=Coo(row, col), csr=csr, csc=csc))
        index = TensorIndex(self._schema, self._nodes, relations)
        return self._graph(index, self._nodes, self._edges)


class _FrameBuffers:
    """Static buffers for the features of a frame."""

    def __init__(self, frame: Frame, rows: int) -> None:
        self.rows = rows
        self._first: Frame | None = frame
        self._schemes = {name: column.scheme for name, column in frame._columns.items()}
        #: Those that the model has read.
        self.columns: dict[str, RowBuffer] = {}

    def forget(self) -> None:
        self._first = None

    def frame(self, rows: int) -> Frame:
        columns = {name: _BufferColumn(self, rows, name, it) for name, it in self._schemes.items()}
        return Frame(columns, num_rows=rows)

    def column(self, name: str) -> torch.Tensor:
        """The buffer of a feature, allocated at the first call."""
        buffer = self.columns.get(name)
        if buffer is None:
            if self._first is None:
                raise InvalidInputError(
                    f"read feature '{name}' of a mini-batch",
                    "the forward pass did not read it for the first mini-batch",
                    "read the same features for every mini-batch",
                )
            buffer = self.columns[name] = RowBuffer(_read(self._first, name), self.rows)
        return buffer.data


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
