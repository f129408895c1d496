"""Random walks and PinSAGE's neighbour selection on CUDA; see ``kernels/walk.cu``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.walk import op  # noqa: F401  (defines the schemas)

_THREADS = 128


def _launch(kernel: Kernel, items: int, *arguments: object, where: torch.device) -> None:
    """Launch with a thread an item."""
    blocks = blocks_within(kernel, _THREADS, -(-items // _THREADS), where) if items else 0
    kernel(blocks, _THREADS, *arguments, device=where)


class Walks:
    """What all walks of a call go along, on the device.

    Parameters are those of the operators.
    """

    def __init__(
        self,
        where: torch.device,
        tiers: Sequence[torch.Tensor],
        pointers: Sequence[torch.Tensor],
        positions: Sequence[torch.Tensor],
        num_rows: Sequence[int],
        idtype: torch.dtype,
        stops: Sequence[int],
    ) -> None:
        words = list(stops)
        for view_tiers, view_pointers, position in zip(tiers, pointers, positions, strict=True):
            words += [
                view_tiers.data_ptr(),
                len(view_tiers),
                view_pointers.data_ptr(),
                position.data_ptr(),
                position.element_size(),
            ]
        host_table = device.driver.host_buffer(len(words)).copy_(torch.tensor(words))
        self._table = host_table.to(where, non_blocking=True)
        self.steps, self.views = len(stops), len(tiers)
        self.where, self.num_rows, self.idtype = where, num_rows[0], idtype

    def trace(
        self,
        starts: torch.Tensor,
        count: int,
        exact: torch.Tensor | None,
        numbers: torch.Tensor | None,
        each: int,
        key: int,
        edges: torch.Tensor | None,
        bad: torch.Tensor,
    ) -> torch.Tensor:
        """Launch ``each`` walks from the first starts: ``count`` of them at most, and ``exact``,
        where that is a number on the device."""
        shape = count * each, self.steps + 1
        traces = torch.empty(shape, dtype=torch.int64, device=self.where)
        _launch(
            Kernel("walk.cu", f"dgl_mgpu::walk<{c_type(starts.dtype)}, {c_type(self.idtype)}>"),
            len(traces),
            *(starts, count, exact, numbers, each, self._table, self.steps),
            *(self._table[self.steps :], self.views, self.num_rows, key, traces, edges, bad),
            where=self.where,
        )
        return traces


class Visited:
    """The nodes that walks from seeds visit, counted on the device.

    Parameters
    ----------
    count, exact
        Of ``seeds``, as of the starts of :meth:`Walks.trace`.
    bad : Tensor, int64, shape (1,)
        -1; gets the place of the first seed that is no node.

    Attributes
    ----------
    indptr : Tensor, int64, shape (count + 1,)
        Where the neighbors of each seed begin; beyond the last seed, where all end.
    """

    def __init__(
        self,
        walks: Walks,
        seeds: torch.Tensor,
        count: int,
        exact: torch.Tensor | None,
        num_walks: int,
        num_neighbors: int,
        key: int,
        bad: torch.Tensor,
    ) -> None:
        traces = walks.trace(seeds, count, exact, None, num_walks, key, None, bad)
        self._walks = walks
        self._traces = traces, count, exact, num_walks, walks.steps + 1, walks.views
        self._visits = count * num_walks * (walks.steps // walks.views)
        self._counts = torch.empty(self._visits, dtype=torch.int32, device=walks.where)
        distinct = torch.zeros(count, dtype=torch.int64, device=walks.where)
        _launch(
            Kernel("walk.cu", "dgl_mgpu::count_visits"),
            self._visits,
            *self._traces,
            self._counts,
            distinct,
            where=walks.where,
        )
        self.indptr = torch.zeros(count + 1, dtype=torch.int64, device=walks.where)
        torch.cumsum(distinct.clamp_(max=num_neighbors), dim=0, out=self.indptr[1:])

    def select(self, neighbors: torch.Tensor, counts: torch.Tensor) -> None:
        """Write the neighbors of the seeds, and how often each is visited."""
        _launch(
            Kernel("walk.cu", f"dgl_mgpu::select_visited<{c_type(self._walks.idtype)}>"),
            self._visits,
            *self._traces,
            self._counts,
            self.indptr,
            neighbors,
            counts,
            where=self._walks.where,
        )


@torch.library.impl(library, "random_walk", "CUDA")
def _random_walk(
    starts: torch.Tensor,
    walks: torch.Tensor,
    tiers: list[torch.Tensor],
    pointers: list[torch.Tensor],
    positions: list[torch.Tensor],
    num_rows: list[int],
    idtype: torch.dtype,
    stops: list[int],
    key: int,
    edges: torch.Tensor | None = None,
) -> torch.Tensor:
    where = starts.device
    device.raise_faults(where, wait=False)
    bad = torch.full((1,), -1, dtype=torch.int64, device=where)
    all_walks = Walks(where, tiers, pointers, positions, num_rows, idtype, stops)
    traces = all_walks.trace(starts, len(starts), None, walks, 1, key, edges, bad)
    report = device.driver.host_buffer(1).copy_(bad, non_blocking=True)
    device.driver.synchronize(where)
    raise_at_bad_id(report.tolist(), starts, num_rows[0], "walk")
    return traces


@torch.library.impl(library, "pinsage_neighbors", "CUDA")
def _pinsage_neighbors(
    seeds: torch.Tensor,
    tiers: list[torch.Tensor],
    pointers: list[torch.Tensor],
    positions: list[torch.Tensor],
    num_rows: list[int],
    idtype: torch.dtype,
    stops: list[int],
    num_walks: int,
    num_neighbors: int,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where = seeds.device
    device.raise_faults(where, wait=False)
    bad = torch.full((1,), -1, dtype=torch.int64, device=where)
    walks = Walks(where, tiers, pointers, positions, num_rows, idtype, stops)
    visited = Visited(walks, seeds, len(seeds), None, num_walks, num_neighbors, key, bad)
    report = device.driver.host_buffer(2)
    report[:1].copy_(bad, non_blocking=True)
    report[1:].copy_(visited.indptr[-1:], non_blocking=True)
    device.driver.synchronize(where)
    bad_place, total = report.tolist()
    raise_at_bad_id([bad_place], seeds, num_rows[0], "walk")
    neighbors = torch.empty(total, dtype=idtype, device=where)
    counts = torch.empty(total, dtype=torch.int64, device=where)
    visited.select(neighbors, counts)
    return visited.indptr, neighbors, counts
