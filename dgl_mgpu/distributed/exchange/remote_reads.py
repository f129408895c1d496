"""Remote reads: a kernel reads other ranks' rows where they are, while it adds up its own.

MGG, section 3.  Nothing is sent for sums: each rank puts its rows where all can read them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import cached_property, partial

import torch

from dgl_mgpu.distributed.exchange.schedule import (
    Arriving,
    CommSchedule,
    Returning,
    Tile,
    edges_from,
)
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.ops.spmm_remote import Entries, Pairs, Pipeline, Sources, pair_up, spmm_remote
from dgl_mgpu.utils.stages import stage


class RemoteReads(CommSchedule):
    """One kernel reads the rank's own rows and the halo's at the same time, and keeps none.

    Sums back to the sources, and those with weights that are not of whole columns, are no matter of
    reading rows: there rows are exchanged as the ``halo`` in chunks.  The pipeline may be changed
    at any time: sums differ in the order of additions.
    """

    def __init__(
        self, halo: CommSchedule, window: Window, pipeline: Pipeline | None = None
    ) -> None:
        super().__init__(halo.part, halo.group)
        self.pipeline = Pipeline() if pipeline is None else pipeline
        self._halo = halo
        self._window = window
        self._known_pairs: Pairs | None = None

    @property
    def tiles(self) -> list[Tile]:
        return self._halo.tiles

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        return self._halo.columns()

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        return self._halo.start(number, rows)

    def start_return(
        self, number: int, rows: torch.Tensor, *, own: torch.Tensor | None = None
    ) -> Returning:
        return self._halo.start_return(number, rows, own=own)

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        shape = rows.shape[1:]
        width = math.prod(shape)
        num_weights = 1 if weights is None else _whole_columns(weights.shape[1:], shape)
        if width == 0 or num_weights is None or self.part.num_ranks == 1:
            return super().sums(rows, weights)
        local, remote = (Entries(*tile.relation.csc()[:2]) for tile in self._virtual)
        if weights is not None:
            flat_weights = weights.reshape(len(weights), num_weights)
            of_local, of_remote = (tile.of(flat_weights) for tile in self._virtual)
            local, remote = local._replace(weights=of_local), remote._replace(weights=of_remote)
        own = rows.reshape(len(rows), width).contiguous()
        total = spmm_remote(
            local,
            remote,
            Sources(own, self._shared_rows(own), self._starts),
            pairs=self._pairs(),
            pipeline=self.pipeline,
        )
        return total.view(self.part.num_own_dst, *shape)

    def _shared_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Addresses of all ranks' rows, once all have put theirs into their windows.

        Nothing hides that; what the kernel then reads of other GPUs cannot be told from its sums.
        """
        part = self.part
        row_bytes = rows.shape[1] * rows.element_size()
        most_rows = max(part.src.count(rank) for rank in range(part.num_ranks))
        memory = self._window.turn(max(1, most_rows * row_bytes))
        mine = memory[part.rank][: len(rows) * row_bytes]
        with stage("exchange"), stage("waiting"):
            mine.view(rows.dtype).view(rows.shape).copy_(rows)
            self._window.wait_for_all()
        return _on_device(tuple(window.data_ptr() for window in memory), rows.device)

    @cached_property
    def _virtual(self) -> tuple[Tile, Tile]:
        """The part's local and remote virtual graph; sources of the latter are positions."""
        part, indices = self.part, self.part.relation.csc().indices
        own = part.num_own_src
        is_own = indices < own
        remote = part.halo[indices[~is_own].long() - own]
        local_graph = edges_from(part, is_own, indices[is_own], own)
        remote_graph = edges_from(part, ~is_own, remote, part.src.num_nodes)
        return (
            Tile(local_graph, partial(_where, part, lambda columns: columns < own)),
            Tile(remote_graph, partial(_where, part, lambda columns: columns >= own)),
        )

    @cached_property
    def _starts(self) -> torch.Tensor:
        return torch.tensor(self.part.src.bounds[:-1], device=self.part.halo.device)

    def _pairs(self) -> Pairs:
        ps = self.pipeline.ps
        if self._known_pairs is None or self._known_pairs.ps != ps:
            local, remote = (tile.relation.csc().indptr for tile in self._virtual)
            self._known_pairs = pair_up(local, remote, ps)
        return self._known_pairs


def _where(part: Part, is_chosen: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The numbers of a part's edges whose sources are chosen."""
    columns = part.relation.csc().indices
    return is_chosen(columns).nonzero().squeeze(1).to(columns.dtype)


@functools.lru_cache(maxsize=64)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The few addresses that there are, copied once: the host would wait for each copy."""
    return torch.tensor(addresses, device=device)


def _whole_columns(weight_shape: torch.Size, shape: torch.Size) -> int | None:
    """How many weights there are, if each is one for as many columns that lie side by side."""
    padded = (1,) * (len(shape) - len(weight_shape)) + tuple(weight_shape)
    for place in range(len(shape) + 1):
        if padded[:place] == shape[:place] and math.prod(padded[place:]) == 1:
            return math.prod(shape[:place])
    return None
