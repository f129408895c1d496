"""Rows and neighbours that other machines keep, asked of them in rounds of all ranks.

In a round each rank sends the ids that it misses, distinct and in ascending order, so by owner, to
the rank at its own place of each machine; it answers what it is asked, and puts the answers where
they belong.  Every rank takes part in every round and asks for the same table: one that misses
nothing, or has no seeds at all, asks for no ids.  A rank that cannot ask says why in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, NoReturn

import torch

from dgl_mgpu.comm.communicator import Communicator, error_text, rank_failed
from dgl_mgpu.errors import DGLMGPUError, InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import (
    GraphView,
    RowView,
    SampledNeighbors,
    SampleKey,
    gather_rows,
    sample_neighbors,
)
from dgl_mgpu.ops.check import check_ids, raise_at_id_outside
from dgl_mgpu.utils.rows import as_bytes
from dgl_mgpu.utils.types import CanonicalEtype


@dataclass(frozen=True)
class _Missing:
    """Which of some ids are kept here, and the others as they are asked for.

    ``here`` and ``there`` are places among the ids; those ``there`` are ``ids[inverse]``, where
    ``ids`` are distinct and by machine, ``counts`` of each.
    """

    here: torch.Tensor
    there: torch.Tensor
    ids: torch.Tensor
    inverse: torch.Tensor
    counts: list[int]


@dataclass(frozen=True)
class _Round:
    """What is asked in a round: by this rank, and by each machine of this rank."""

    missing: _Missing
    asked: torch.Tensor
    counts: list[int]
    parameters: list[Any]
    #: Whether any rank asks for anything.
    is_needed: bool


@dataclass(frozen=True)
class RemoteTable:
    """A feature of nodes, of which ``others`` have rows as well."""

    others: OtherMachines
    name: str
    ntype: str

    def gather(
        self, view: RowView, ids: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As :meth:`OtherMachines.gather`."""
        return self.others.gather(self.name, self.ntype, view, ids, dtype, out)


class OtherMachines:
    """The machines that have a store together, as one rank of one of them reads the others.

    ``machines`` are the ranks at this one's place of each, and ``bounds`` the first node of each
    machine, by node type (:mod:`dgl_mgpu.store.span`).
    """

    def __init__(
        self, machines: Communicator, bounds: Mapping[str, list[int]], device: torch.device
    ) -> None:
        self._machines = machines
        self._bounds = {
            ntype: torch.tensor(firsts, device=device) for ntype, firsts in bounds.items()
        }

    def __reduce__(self) -> NoReturn:
        raise UnsupportedByStoreError(
            "read a store of several machines in another process",
            "the ranks of the job alone take part in what machines send each other",
            "use num_workers=0",
        )

    def table(self, name: str, ntype: str) -> RemoteTable:
        """A feature of nodes of a type."""
        return RemoteTable(self, name, ntype)

    def gather(
        self,
        name: str,
        ntype: str,
        view: RowView,
        ids: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Rows of nodes, wherever they are; collective.

        ``view`` are those that this machine has; other parameters are those of
        :func:`dgl_mgpu.ops.gather_rows`, and the feature's name and its node type.

        Returns
        -------
        rows : Tensor, ``dtype``, shape (n, *row_shape)
        here : Tensor, shape (m,)
            The ids of those that this machine keeps.
        num_received : int
            Rows that other machines sent.
        """
        asked = self._ask(f"gather rows of '{name}'", view, ntype, ids)
        missing = asked.missing
        here = ids[missing.here]
        if not asked.is_needed:
            return gather_rows(view, ids, out=out, dtype=dtype), here, 0
        answer = gather_rows(view, asked.asked, dtype=view.dtype)
        received = self._machines.all_to_all(answer, asked.counts, missing.counts)
        if out is None:
            out = torch.empty(len(ids), *view.row_shape, dtype=dtype, device=ids.device)
        # As bytes, since torch does not index all types.
        into = as_bytes(out)
        into[missing.here] = as_bytes(gather_rows(view, here, dtype=dtype))
        into[missing.there] = as_bytes(received.to(dtype))[missing.inverse]
        return out, here, len(received)

    def sample_etype_neighbors(
        self,
        views: Mapping[CanonicalEtype, GraphView],
        seeds: Mapping[CanonicalEtype, torch.Tensor],
        fanouts: Mapping[CanonicalEtype, int],
        key: SampleKey,
        *,
        replace: bool,
        weights: Mapping[CanonicalEtype, RowView],
    ) -> dict[CanonicalEtype, SampledNeighbors]:
        """As :func:`dgl_mgpu.ops.sample_etype_neighbors` of the whole graph; collective."""
        assert not weights  # GraphFeatures.weights has raised
        return {
            etype: self._sample(
                view, etype, seeds[etype], fanouts[etype], with_fields(key, etype=number), replace
            )
            for number, (etype, view) in enumerate(views.items())
            if etype in seeds
        }

    def _sample(
        self,
        view: GraphView,
        etype: CanonicalEtype,
        seeds: torch.Tensor,
        fanout: int,
        key: SampleKey,
        replace: bool,
    ) -> SampledNeighbors:
        # The key is that of whoever asks: a sample depends on it and on the node.
        parameters = fanout, replace, list(vars(key).values())
        asked = self._ask(f"sample edges of type {etype}", view, etype[2], seeds, parameters)
        missing = asked.missing
        if not asked.is_needed:
            return sample_neighbors(view, seeds, fanout, key, replace=replace)
        answers = [
            sample_neighbors(view, nodes, their_fanout, SampleKey(*fields), replace=their_replace)
            for nodes, (their_fanout, their_replace, fields) in zip(
                asked.asked.split(asked.counts), asked.parameters, strict=True
            )
        ]
        sent = [len(answer.eids) for answer in answers]
        degrees = torch.cat([answer.indptr.diff() for answer in answers])
        degrees = self._machines.all_to_all(degrees, asked.counts, missing.counts)
        edges = torch.cat([torch.stack(answer[1:], 1) for answer in answers])
        received = [int(part.sum()) for part in degrees.split(missing.counts)]
        edges = self._machines.all_to_all(edges, sent, received)
        mine = sample_neighbors(view, seeds[missing.here], fanout, key, replace=replace)
        # A run of edges for each seed, of those sampled here and then of those received.
        runs = torch.cat([mine.indptr[:-1], len(mine.eids) + degrees.cumsum(0) - degrees])
        run_of = torch.empty_like(seeds, dtype=torch.int64)
        num_here = len(missing.here)
        run_of[missing.here] = torch.arange(num_here, device=seeds.device)
        run_of[missing.there] = num_here + missing.inverse
        lengths = torch.cat([mine.indptr.diff(), degrees])[run_of]
        indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = (runs[run_of] - indptr[:-1]).repeat_interleave(lengths)
        edges = torch.cat([torch.stack(mine[1:], 1), edges])
        edges = edges[torch.arange(len(shift), device=seeds.device) + shift]
        return SampledNeighbors(indptr, edges[:, 0].contiguous(), edges[:, 1].contiguous())

    def _ask(
        self,
        what: str,
        view: RowView | GraphView,
        ntype: str,
        ids: torch.Tensor,
        parameters: Any = None,
    ) -> _Round:
        """Tell all machines what this rank misses, and learn what they ask for."""
        machines = self._machines
        try:
            ids = check_ids(ids, what, view.tiers.device)
            raise_at_id_outside(ids, view.num_rows, what)
            missing = self._missing(view.position, ntype, ids)
        except DGLMGPUError as error:
            machines.all_gather((what, error_text(error), [], None))
            raise
        every = machines.all_gather((what, "", missing.counts, parameters))
        for rank, (other, reason, _, _) in enumerate(every):
            if reason:
                raise rank_failed(other, rank, reason)
            if other != what:
                raise InvalidInputError(
                    f"{what}, which other machines keep as well",
                    f"a rank of machine {rank} is to {other} meanwhile",
                    "have all ranks of the job sample and read the same in the same order",
                )
        counts = [of_each[machines.rank] for _, _, of_each, _ in every]
        is_needed = any(sum(of_each) for _, _, of_each, _ in every)
        asked = missing.ids
        if is_needed:
            asked = machines.all_to_all(missing.ids, missing.counts, counts)
        return _Round(missing, asked, counts, [each[3] for each in every], is_needed)

    def _missing(self, position: torch.Tensor, ntype: str, ids: torch.Tensor) -> _Missing:
        # Of rows that are all here there may be no positions.
        is_here = (
            position[ids.long()] >= 0 if len(position) else torch.ones_like(ids, dtype=torch.bool)
        )
        there = (~is_here).nonzero()[:, 0]
        distinct, inverse = torch.unique(ids[there].long(), return_inverse=True)
        ends = torch.searchsorted(distinct, self._bounds[ntype])
        return _Missing(is_here.nonzero()[:, 0], there, distinct, inverse, ends.diff().tolist())
