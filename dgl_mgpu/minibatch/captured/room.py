"""Mini-batches in memory that stays where it is, so that one CUDA graph serves them all.

A graph's kernels have fixed addresses and sizes.  So blocks are copied into larger ones, in which
rows and edges beyond a batch's own harm nothing: the edges that are left over go from the last
source of their type to the last destination, which are none of the batch's, and nothing looks at
what comes out there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from dgl.frame import Column, Frame, Scheme
from dgl.heterograph import DGLBlock

from dgl_mgpu.backend.structure.index import TensorIndex
from dgl_mgpu.backend.structure.relation import Compressed, Relation
from dgl_mgpu.errors import InvalidInputError

#: Share of the largest batch so far that there is room for beside it, and rows: batches of random
#: seeds differ by less.
_SHARE, _ROWS = 1 / 64, 32

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Of a mini-batch's blocks.

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
        """Those of a batch.

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
                    "keep a mini-batch in place",
                    f"{ends} destinations of block {number}, and {begins} sources of the next",
                    "pass the blocks of one mini-batch, the one nearest the input first",
                )
        edges = (tuple(map(block.num_edges, block.canonical_etypes)) for block in blocks)
        return cls((*sources, targets[-1]), tuple(edges))

    @property
    def kind(self) -> Hashable:
        """What batches must have in common for one room: numbers of seeds, blocks and types."""
        return self.nodes[-1], tuple(map(len, self.edges))

    def joined(self, other: Sizes) -> Sizes:
        """The larger counts of two."""
        return Sizes(
            *(
                tuple(tuple(map(max, *pair)) for pair in zip(mine, its, strict=True))
                for mine, its in ((self.nodes, other.nodes), (self.edges, other.edges))
            )
        )

    def with_spare(self) -> Sizes:
        """Room for batches of as many seeds, which may be somewhat larger otherwise."""
        *nodes, seeds = self.nodes
        return Sizes(
            # Also for a node that the edges left over can begin or end at.
            (*(tuple(map(_more, counts)) for counts in nodes), tuple(n + 1 for n in seeds)),
            tuple(tuple(_more(count) if count else 0 for count in counts) for counts in self.edges),
        )

    def hold(self, batch: Sizes) -> bool:
        """Whether this is room for a batch."""
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


class Room:
    """Memory for mini-batches, and blocks that are in it.

    Parameters
    ----------
    batch : list of DGLBlock
        The first of them, which is put here.
    sizes : Sizes
        Of the room.
    """

    def __init__(self, batch: Sequence[DGLBlock], sizes: Sizes) -> None:
        self.sizes = sizes
        self._parts = [
            _BlockRoom(block, (*sources, *targets), edges)
            for block, sources, targets, edges in zip(
                batch, sizes.nodes, sizes.nodes[1:], sizes.edges, strict=False
            )
        ]
        self.load(batch)

    def load(self, batch: Sequence[DGLBlock]) -> None:
        """Put a batch here, for which there is room."""
        into: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        for part, block in zip(self._parts, batch, strict=True):
            for here, there in part.load(block):
                into.append(here)
                what.append(there)
        torch._foreach_copy_(into, what)

    def blocks(self) -> list[DGLBlock]:
        """The batch that is here, with nothing computed of it yet.

        Of the features of nodes and edges there is room for those that are read the first time.
        """
        return [part.block() for part in self._parts]

    def forget(self) -> None:
        """Hold on to the first batch no longer: all features that are read have been."""
        for part in self._parts:
            part.forget()


class _BlockRoom:
    """Memory for one block of a mini-batch: its numbers of nodes, sources first, and of edges."""

    def __init__(self, block: DGLBlock, nodes: Sequence[int], edges: Sequence[int]) -> None:
        self._nodes = nodes
        index: TensorIndex = block._graph
        self._schema = index.schema
        kept = {"_graph", "_node_frames", "_edge_frames"}
        self._attributes = {name: it for name, it in vars(block).items() if name not in kept}
        ids = torch.empty(0, dtype=index.idtype, device=index.device)
        ends = self._schema.ends
        self._indptrs = [ids.new_zeros(nodes[dst] + 1) for _, dst in ends]
        self._sources = [ids.new_zeros(count) for count in edges]
        self._node_frames = [*map(_FrameRoom, block._node_frames, nodes)]
        self._edge_frames = [*map(_FrameRoom, block._edge_frames, edges)]

    def load(self, block: DGLBlock) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is to be copied, and to where."""
        relations, ends = block._graph.relations, self._schema.ends
        rooms = zip(relations, ends, self._indptrs, self._sources, strict=True)
        for relation, (src, _), indptr, sources in rooms:
            found = relation.csc()
            if found.eids is not None:
                raise InvalidInputError(
                    "keep a mini-batch in place",
                    "a block whose edges are not in the order of their destinations",
                    "use blocks as DGL's neighbour samplers make them",
                )
            rows, edges = len(found.indptr), len(found.indices)
            yield indptr[:rows], found.indptr
            yield sources[:edges], found.indices
            # Of the batch's own nodes, they would add to the out-degrees.
            sources[edges:].fill_(self._nodes[src] - 1)
            indptr[rows:-1].fill_(edges)
            indptr[-1:].fill_(len(sources))
        frames = (*block._node_frames, *block._edge_frames)
        for room, frame in zip((*self._node_frames, *self._edge_frames), frames, strict=True):
            yield from room.load(frame)

    def block(self) -> DGLBlock:
        relations = [
            Relation(self._nodes[src], self._nodes[dst], csc=Compressed(indptr, sources, None))
            for (src, dst), indptr, sources in zip(
                self._schema.ends, self._indptrs, self._sources, strict=True
            )
        ]
        block = DGLBlock.__new__(DGLBlock)
        block.__dict__ = {
            **self._attributes,
            "_graph": TensorIndex(self._schema, self._nodes, relations),
            "_node_frames": [room.frame() for room in self._node_frames],
            "_edge_frames": [room.frame() for room in self._edge_frames],
        }
        return block

    def forget(self) -> None:
        for room in (*self._node_frames, *self._edge_frames):
            room.forget()


class _FrameRoom:
    """Memory for the features of some nodes or edges, first for those of a frame."""

    def __init__(self, frame: Frame, rows: int) -> None:
        self.rows = rows
        self._first: Frame | None = frame
        self._schemes = {name: column.scheme for name, column in frame._columns.items()}
        #: Those that have been read.
        self._columns: dict[str, torch.Tensor] = {}

    def load(self, frame: Frame) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, column in self._columns.items():
            data = _read(frame, name)
            yield column[: len(data)], data

    def forget(self) -> None:
        self._first = None

    def frame(self) -> Frame:
        columns = {name: _RoomColumn(self, name, it) for name, it in self._schemes.items()}
        return Frame(columns, num_rows=self.rows)

    def column(self, name: str) -> torch.Tensor:
        """Memory for a feature, which is found if there is none yet."""
        found = self._columns.get(name)
        if found is None:
            if self._first is None:
                raise InvalidInputError(
                    f"read feature '{name}' of a mini-batch",
                    "a forward pass that did not read it the first time",
                    "read the same features for every mini-batch",
                )
            data = _read(self._first, name)
            # Beyond a batch's rows, numbers that may be divided by, classes and ids there are.
            fill = data.new_ones if data.is_floating_point() else data.new_zeros
            found = fill((self.rows, *data.shape[1:]))
            found[: len(data)].copy_(data)
            self._columns[name] = found
        return found


def _read(frame: Frame, name: str) -> torch.Tensor:
    data = frame[name]
    if data.requires_grad:
        raise InvalidInputError(
            "keep a mini-batch in place",
            f"feature '{name}', which requires gradients that would end here",
            "compute it in the forward pass, of parameters of the model",
        )
    return data


class _RoomColumn(Column):
    """A column whose memory is found when it is first read."""

    def __init__(self, room: _FrameRoom, name: str, scheme: Scheme) -> None:
        self._room, self._name = room, name
        super().__init__(None, scheme)

    @property
    def storage(self) -> torch.Tensor:
        return self._room.column(self._name) if self._own is None else self._own

    @storage.setter
    def storage(self, data: torch.Tensor | None) -> None:
        self._own = data

    def __len__(self) -> int:
        return self._room.rows

    def clone(self) -> Column:
        """Another one of the same memory, which is not read for that."""
        twin = _RoomColumn(self._room, self._name, self.scheme)
        twin._own, twin.deferred_dtype = self._own, self.deferred_dtype
        return twin
