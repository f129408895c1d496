"""Sums over in-edges in rounds: while one round's rows are added up, the next one's arrive.

MG-GCN, section 4.3.  A round has some of the source rows, and a *tile* of the rank's part: the
edges that come from these.  What a round's rows are is up to the kind of exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.ops import add_spmm, spmm

Arriving = Callable[[], torch.Tensor]


class Returning(NamedTuple):
    """Rows that go back to their owners.

    Attributes
    ----------
    wait : callable
        Waits until they have come; what was sent may then be freed.
    add : callable
        Adds what has come to this rank's own rows.
    """

    wait: Callable[[], object]
    add: Callable[[torch.Tensor], object]


def nothing(*_: torch.Tensor) -> None:
    """Neither waits nor adds."""


class Tile:
    """The edges that come from one round's rows.

    Parameters
    ----------
    relation : Relation
        From the round's rows to own rows.
    find_entries : callable, optional
        Finds their numbers in the part; none where they are all of the part's edges, in order.
    """

    def __init__(
        self, relation: Relation, find_entries: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self.relation = relation
        self._find_entries = find_entries

    @cached_property
    def entries(self) -> torch.Tensor | None:
        """Their numbers in the part, for weights; found when they are first asked for."""
        return None if self._find_entries is None else self._find_entries()

    def of(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """The edges' weights, from those of all of the part's."""
        if weights is None or self.entries is None:
            return weights
        return weights.index_select(0, self.entries)


class CommSchedule(ABC):
    """One strategy to exchange rows for sums over in-edges.

    All methods are collective: every rank of ``group`` calls them, in the same order.

    Parameters
    ----------
    part : Part
    group : torch.distributed.ProcessGroup or None
        None for a single rank.
    """

    #: The round of the rank's own rows.
    own_round = 0

    def __init__(self, part: Part, group: dist.ProcessGroup | None) -> None:
        self.part = part
        self.group = group

    @abstractmethod
    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Of each of the part's source rows, its round and its place there; and rounds' sizes."""

    @abstractmethod
    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        """Begin to exchange a round's rows, given own ``rows``; what waits for them."""

    @abstractmethod
    def start_return(self, number: int, rows: torch.Tensor) -> Returning:
        """Begin to take a round's rows back; those of the own round stay where they are."""

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """For each own destination, the sum of its in-edges' sources.

        Parameters
        ----------
        rows : Tensor, shape (num_own_src, \\*shape)
        weights : Tensor, shape (num_edges, \\*weight_shape), optional
            What rows are multiplied with.

        Returns
        -------
        Tensor, shape (num_own_dst, \\*shape)
        """
        tiles = self.tiles
        out: torch.Tensor | None = None
        arriving = self.start(0, rows)
        for number, tile in enumerate(tiles):
            following = self.start(number + 1, rows) if number + 1 < len(tiles) else arriving
            out = _summed(tile.relation, arriving(), tile.of(weights), out)
            arriving = following
        assert out is not None  # there is a round
        return out

    def transposed_sums(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The transpose of `sums`: from rows of own destinations to rows of own sources."""
        own: torch.Tensor | None = None
        adds = []
        wait: Callable[[], object] = nothing
        # While one round's rows are added up, those before them travel.
        for number, tile in reversed(list(enumerate(self.tiles))):
            back = _summed(tile.relation.reverse(), rows, tile.of(weights), None)
            if number == self.own_round:
                # A view would keep all of it.
                count = self.part.num_own_src
                own = back if len(back) == count else back[:count].clone()
            returning = self.start_return(number, back)
            del back
            wait()
            wait = returning.wait
            adds.append(returning.add)
        wait()
        assert own is not None  # there is a round of own rows
        for add in adds:
            add(own)
        return own

    @cached_property
    def tiles(self) -> list[Tile]:
        """The edges of each round."""
        indptr, indices, _ = self.part.relation.csc()
        rounds, places, sizes = self.columns()
        of_entries = rounds[indices.long()]
        tiles = []
        for number, size in enumerate(sizes):
            chosen = of_entries == number
            before = torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])
            grouped = Compressed(
                before[indptr.long()].to(indptr.dtype),
                places[indices[chosen].long()].to(indices.dtype),
                None,
            )
            relation = Relation(size, self.part.num_own_dst, csc=grouped, formats=("csr", "csc"))
            tiles.append(Tile(relation, partial(_entries_of, self.part, rounds, number)))
        return tiles


def _entries_of(part: Part, rounds: torch.Tensor, number: int) -> torch.Tensor:
    """Edges whose source has its row in a round, given that of each source."""
    indices = part.relation.csc().indices
    chosen = rounds[indices.long()] == number
    return chosen.nonzero().squeeze(1).to(indices.dtype)


def _summed(
    tile: Relation, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """A tile's sums, added to ``out`` where there is one."""
    indptr, indices, eids = tile.csc()
    shape = rows.shape[1:]
    if not shape:
        rows = rows.unsqueeze(1)
    op = "copy_lhs" if weights is None else "mul"
    if out is None:
        found = spmm(indptr, indices, eids, rows, weights, op, "sum")[0]
        return found if shape else found.squeeze(1)
    add_spmm(out if shape else out.unsqueeze(1), indptr, indices, eids, rows, weights, op)
    return out


class Sum(torch.autograd.Function):
    """`CommSchedule.sums`, or its transpose, differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        rounds: CommSchedule,
        transposed: bool,
        weights: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.transpose = rounds, not transposed
        ctx.save_for_backward(weights)  # so that a change in place until then is noticed
        found = (rounds.transposed_sums if transposed else rounds.sums)(rows, weights)
        # Of a view that is made here autograd allows no change in place.
        return found.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:  # type: ignore[override]
        (weights,) = ctx.saved_tensors
        return None, None, None, Sum.apply(*ctx.transpose, weights, gradient.contiguous())
