"""Numbers of nodes and edges in mini-batches, and the capacity of static buffers for them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dgl.heterograph import DGLBlock, DGLGraph

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import EtypeBlock
from dgl_mgpu.sampling.loader_batches import FrameKey

#: Spare capacity beside the largest batch so far, as a share of it and in rows: batches of random
#: seeds differ by less.
_SHARE, _ROWS = 1 / 64, 32

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Types:
    """Node and edge types of a batch, in the graph's order."""

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
    """Numbers of nodes and edges in the graphs of a mini-batch.

    Attributes
    ----------
    nodes : tuple of tuple of int
        By node type: the sources of each block and, last, the destinations of the last one.
    edges : tuple of tuple of int
        By edge type: the edges of each block.
    pairs : tuple of tuple of int
        By edge type: the edges of each graph of node pairs, whose nodes are the seeds.
    """

    nodes: Counts
    edges: Counts
    pairs: Counts = ()

    @classmethod
    def of(cls, blocks: Sequence[DGLBlock], pair_graphs: Sequence[DGLGraph] = ()) -> Sizes:
        """The sizes of a batch.

        Raises
        ------
        InvalidInputError
            If the destinations of a block are not the sources of the next one, or the nodes of a
            pair graph are not the destinations of the last block.
        """
        sources, targets = [], []
        for block in blocks:
            nodes = block._graph._num_nodes
            num_sources = len(block.srctypes)
            sources.append(tuple(nodes[:num_sources]))
            targets.append(tuple(nodes[num_sources:]))
        for number, (ends, begins) in enumerate(zip(targets, sources[1:], strict=False)):
            if ends != begins:
                raise InvalidInputError(
                    "copy a mini-batch into static buffers",
                    f"block {number} has {', '.join(map(str, ends))} destinations, "
                    f"but the next has {', '.join(map(str, begins))} sources",
                    "pass the blocks of one mini-batch, the one nearest the input first",
                )
        for graph in pair_graphs:
            nodes = tuple(graph._graph._num_nodes)
            if nodes != targets[-1] or graph.ntypes != blocks[-1].dsttypes:
                raise InvalidInputError(
                    "copy a mini-batch into static buffers",
                    f"a graph has {_counts(nodes, graph.ntypes)} nodes, but the last block has "
                    f"{_counts(targets[-1], blocks[-1].dsttypes)} destinations",
                    "pass pair graphs of the seeds, as DGL's edge samplers make them",
                )
        return cls(
            (*sources, targets[-1]),
            tuple(_num_edges(block) for block in blocks),
            tuple(_num_edges(graph) for graph in pair_graphs),
        )

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

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """All numbers in one tuple: nodes, edges, pairs."""
        return tuple(
            count for counts in (*self.nodes, *self.edges, *self.pairs) for count in counts
        )

    def joined(self, other: Sizes) -> Sizes:
        """The elementwise maximum of two sizes."""
        return self._with(max, other)

    def common(self, other: Sizes) -> Sizes:
        """The elementwise minimum of two sizes."""
        return self._with(min, other)

    def _with(self, choose: Callable[..., int], other: Sizes) -> Sizes:
        return Sizes(
            *(
                tuple(tuple(map(choose, *pair)) for pair in zip(mine, its, strict=True))
                for mine, its in (
                    (self.nodes, other.nodes),
                    (self.edges, other.edges),
                    (self.pairs, other.pairs),
                )
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
        """Whether a batch of as many seeds fits this capacity."""
        *nodes, seeds = batch.nodes
        return (
            tuple(n + 1 for n in seeds) == self.nodes[-1]
            and all(n < most for n, most in _pairs(nodes, self.nodes[:-1]))
            and all(n <= most for n, most in _pairs(batch.edges, self.edges))
        )

    def capacity(self, smallest: Sizes, dst_types: Sequence[int]) -> Sizes:
        """A capacity for batches of any number of seeds up to this, the largest one so far.

        There are enough edges for each padding node to have one (:meth:`hold_padded`), in batches
        that are no smaller than ``smallest`` or have edges in proportion to their nodes.
        ``dst_types`` has the number of the destination type of each edge type.
        """
        # Spare seeds, too: the sums of padding edges stay as large as others.
        nodes = tuple(tuple(map(_more, counts)) for counts in self.nodes)
        edges = tuple(
            tuple(
                _more(count) + nodes[layer + 1][dst] - smallest.nodes[layer + 1][dst]
                for count, dst in zip(counts, dst_types, strict=True)
            )
            for layer, counts in enumerate(self.edges)
        )
        return Sizes(nodes, edges, tuple(tuple(map(_more, counts)) for counts in self.pairs))

    def hold_padded(self, batch: Sizes, dst_types: Sequence[int]) -> bool:
        """Whether a batch fits, with a padding node of each type, and an edge for each of them."""
        return self.padded_limits(dst_types).hold(batch.flat)

    def padded_limits(self, dst_types: Sequence[int]) -> PaddedLimits:
        """What :meth:`hold_padded` compares with, to be kept for many batches."""
        return PaddedLimits(self, dst_types)


class PaddedLimits:
    """How large batches may be for a capacity; see :meth:`Sizes.hold_padded`."""

    def __init__(self, capacity: Sizes, dst_types: Sequence[int]) -> None:
        self._capacity = capacity.flat
        self._num_nodes = sum(map(len, capacity.nodes))
        self._num_edges = sum(map(len, capacity.edges))
        begins = [*itertools.accumulate(map(len, capacity.nodes), initial=0)]
        #: By edge type of each block: where `flat` has the number of its destinations.
        self._dst = [
            begins[layer + 1] + dst
            for layer, counts in enumerate(capacity.edges)
            for _, dst in zip(counts, dst_types, strict=True)
        ]
        self._spare = [
            most - self._capacity[dst]
            for most, dst in zip(self._capacity[self._num_nodes :], self._dst, strict=False)
        ]

    def hold(self, flat: tuple[int, ...]) -> bool:
        """Whether a batch of these sizes fits."""
        begin, end = self._num_nodes, self._num_nodes + self._num_edges
        more = map(operator.sub, flat[begin:end], map(flat.__getitem__, self._dst))
        return (
            all(map(operator.lt, flat[:begin], self._capacity))
            and all(map(operator.lt, flat[end:], self._capacity[end:]))
            and all(map(operator.le, more, self._spare))
        )


def _num_edges(graph: DGLGraph) -> tuple[int, ...]:
    return tuple(relation.num_edges for relation in graph._graph.relations)


def _more(count: int) -> int:
    return count + int(_SHARE * count) + _ROWS


def _pairs(some: Sequence[Sequence[int]], others: Counts) -> Iterator[tuple[int, int]]:
    for pair in zip(some, others, strict=True):
        yield from zip(*pair, strict=True)


def _counts(counts: Sequence[int], types: Sequence[str]) -> str:
    return ", ".join(f"{count} '{kind}'" for count, kind in zip(counts, types, strict=True))
