"""Placement as a linear program.

A *piece* is a table's rows between two breakpoints, which are equally hot.  The unknowns are the
shares of each piece that are kept by each candidate pattern.  Shares of a piece lie one after
another, so any shares can be realised exactly.  Hotness keeps the number of tiers small: at
given prices the cheapest candidate changes only a few times from the hottest row to the
coldest.  The objective is the time of the slowest GPU (``cost.py``); budgets are constraints.
A machine's symmetries fold equal GPUs, links and candidates into one.

Plans must not differ between processors, so that nothing here is a product of matrices, whose
rounding depends on the BLAS: all arithmetic is single operations and sums in one order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dgl_mgpu.placement.candidates import Candidates, Key
from dgl_mgpu.placement.cost import Resources
from dgl_mgpu.placement.table_spec import TableSpec

# Where a piece's rows may go.
_FREE, _GPU_ONLY, _OFF_GPU = range(3)

# Among equally fast placements the one of the least memory: a byte costs this much of the time
# scale on a GPU, twice that in host memory (so that GPUs are filled first), four times on disk.
# Among those the first candidate.
_STORAGE_COST = 1e-7
_STORAGE_WEIGHTS = (1.0, 2.0, 4.0)
_ORDER_COST = 1e-9
# Of rows that fit nowhere: more than any memory can cost.
_OVERFLOW_COST = 1e4
#: Pattern number of rows that fit nowhere.
NOWHERE = -1


@dataclass(frozen=True)
class RowRange:
    """Rows of one table kept by one pattern, as the range [begin, end) of the table's bytes."""

    table: int
    pattern: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Proposal:
    """Where every piece goes at given prices."""

    patterns: np.ndarray  # number of each piece's pattern, shape (pieces,)
    usage: np.ndarray  # of time and memory rows, shape (pieces, rows)
    costs: np.ndarray  # of each piece by itself, shape (pieces,)
    lower_bound: float  # cost of all pieces, prices paid: no placement costs less


class LinearProgram:
    """The linear program of one machine, its tables and its budgets.

    ``automorphisms``, shape (k, n), are the symmetries that the candidates are folded by, and
    ``budgets``, shape (n + 2,), bytes of each GPU, of host memory and of the disk.  ``cuts`` has
    for each table None where rows may go anywhere; else the number of the breakpoint before which
    they must be on GPUs and after which they must not.
    """

    def __init__(
        self,
        resources: Resources,
        specs: Sequence[TableSpec],
        candidates: Candidates,
        automorphisms: np.ndarray,
        budgets: np.ndarray,
        cuts: Sequence[int | None],
    ) -> None:
        n = self._num_gpus = resources.num_gpus
        self.candidates = candidates
        self._specs = specs
        self._byte_scale = max(sum(spec.total_bytes for spec in specs), 1.0)
        # Of a table that is never read any number: none of its memories is to be out of reach.
        self._accesses = np.array([spec.total_accesses or 1.0 for spec in specs])
        # Time is counted in what reading every row from the host takes.
        host = np.zeros((n, n + 2))
        host[:, n] = 1.0
        load = sum(resources.load(spec, host * spec.total_accesses) for spec in specs)
        slowest = float(resources.gpu_seconds(np.asarray(load)).max())
        self.time_scale = slowest if slowest > 0 else 1.0  # any, where nothing is read
        self._fold_resources(resources, automorphisms)
        self._fold_memory(n, budgets)
        self._cut(cuts)
        # Patterns that were proposed: numbers by table and key, keys by number, and the load of
        # each on the time rows.
        self._numbers: dict[tuple[int, Key], int] = {}
        self.keys: list[Key] = []
        self._pattern_loads: list[np.ndarray] = []

    def _fold_resources(self, resources: Resources, automorphisms: np.ndarray) -> None:
        """Time rows: one for each orbit of resources and of the GPUs that wait for it.

        Beside the shares, the unknowns are for each orbit of GPUs the time of GPU memories and
        of the host, and the time of the slowest GPU.
        """
        n = resources.num_gpus
        # Of each GPU under the symmetries, shape (n,).
        orbit = np.unique(automorphisms.min(0), return_inverse=True)[1]
        self._orbit, q = orbit, int(orbit.max()) + 1
        # Resources that symmetries turn into each other have the same readers and memories up
        # to renumbering: a random mark for each read makes the smallest image a fingerprint.
        mark = np.random.default_rng(0).integers(1 << 40, size=(n, n + 2))
        users = resources.users.astype(np.int64)
        images = [
            (users * mark[np.ix_(automorphism, [*automorphism, n, n + 1])]).sum((1, 2))
            for automorphism in automorphisms
        ]
        fingerprint = np.min(images, 0).tolist()
        groups: dict[tuple, list[int]] = {}
        for index, kind in enumerate(resources.link):
            if kind != "disk":
                key = (kind, resources.seconds_per_byte[index], fingerprint[index])
                groups.setdefault(key, []).append(index)
        shares, first, times = [], [], []
        for (kind, *_), group in groups.items():
            share = resources.users[group].sum(0) / len(group)
            for owner in np.unique(orbit[resources.owners[group].any(0)]):
                shares.append(share)
                first.append(group[0])
                times.append(owner + (q if kind == "host" else 0))
        count = len(shares)
        disk = resources.link.index("disk") if "disk" in resources.link else None
        shares.extend([np.zeros((n, n + 2)) if disk is None else resources.users[disk]] * q)
        first.extend([disk or 0] * q)
        by_read = np.array(shares).transpose(1, 2, 0)
        # [table, reader, memory, row]: what an access loads.
        self._loads = np.array([
            by_read * (resources.access_seconds(spec)[first] / self.time_scale)
            for spec in self._specs
        ]).reshape(len(self._specs), n, n + 2, -1)  # fmt: skip
        # [time row, wait]; the last wait is the slowest GPU's.
        self.times = np.zeros((count + q, 2 * q + 1))
        self.times[np.arange(count), times] = -1.0
        for owner in range(q):
            self.times[count + owner, [owner, q + owner, 2 * q]] = 1.0, 1.0, -1.0

    def _fold_memory(self, n: int, budgets: np.ndarray) -> None:
        """Memory rows: the mean over each orbit of GPUs, the host, the disk."""
        members = [*((self._orbit == i).nonzero()[0] for i in np.unique(self._orbit)), [n], [n + 1]]
        storage = self.candidates.storage
        self._storage = np.array([storage[:, index].sum(1) / len(index) for index in members]).T
        count = len(storage)
        weights = np.repeat(_STORAGE_WEIGHTS, (n, 1, 1))
        self._storage_cost = _STORAGE_COST * (storage * weights).sum(1)
        self._storage_cost += _ORDER_COST * np.arange(count) / count
        means = np.array([budgets[index].sum() / len(index) for index in members])
        self.budget = np.minimum(means / self._byte_scale, 1.0)
        on_gpu = storage[:, :n].any(1)
        self._allowed = [np.arange(count), np.flatnonzero(on_gpu), np.flatnonzero(~on_gpu)]

    def _cut(self, cuts: Sequence[int | None]) -> None:
        """Whole tables as pieces, in ranges of those that may go to the same memories."""
        tables, ranges, self._where = [], [0], []
        for table, (spec, cut) in enumerate(zip(self._specs, cuts, strict=True)):
            last = len(spec.positions) - 1
            parts = [(last, _FREE)] if cut is None else [(cut, _GPU_ONLY), (last - cut, _OFF_GPU)]
            for count, where in parts:
                if count:
                    tables.extend([table] * count)
                    ranges.append(len(tables))
                    self._where.append(where)
        self.tables = np.array(tables, np.int64)
        self.ranges = np.array(ranges)  # pieces before each range
        self._begin = np.concatenate([spec.whole_bytes[:-1] for spec in self._specs])
        self._end = np.concatenate([spec.whole_bytes[1:] for spec in self._specs])
        self._reads = np.concatenate([np.diff(spec.accesses) for spec in self._specs])
        # Rows before each piece, and at last all.
        self.rows = np.cumsum(np.concatenate([[0], *(np.diff(s.positions) for s in self._specs)]))
        self._bytes = (self._end - self._begin) / self._byte_scale
        self.nowhere_costs = _OVERFLOW_COST * (
            self._bytes + self._reads / self._accesses[self.tables]
        )

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """First piece and end of each range, and where its rows may go."""
        for (first, last), where in zip(pairwise(self.ranges.tolist()), self._where, strict=True):
            yield first, last, where

    # --- at given prices -----------------------------------------------------------------

    def cheapest(self, prices: np.ndarray) -> Proposal:
        """Each piece where it costs least, at given prices of the time and memory rows."""
        times = len(self.times)
        read_prices = -(self._loads * prices[:times]).sum(-1)
        access = self.candidates.access_costs(read_prices)
        memory = self._storage_cost - (self._storage * prices[times:]).sum(1)
        choice = np.empty(len(self.tables), np.int64)
        least = np.empty(len(self.tables))
        floor = np.maximum(self._reads, 1e-12 * self._accesses[self.tables])
        for first, last, where in self._ranges():
            piece = slice(first, last)
            front = _front(self._allowed[where], memory, access[self.tables[first]])
            costs = floor[piece, None] * access[self.tables[first], front]
            costs += self._bytes[piece, None] * memory[front]
            best = costs.argmin(1)
            choice[piece] = front[best]
            least[piece] = costs[np.arange(last - first), best]
        choice[least >= self.nowhere_costs] = NOWHERE
        total = float(np.minimum(least, self.nowhere_costs).sum())
        total += float((prices[times:] * self.budget).sum())
        return self._proposal(choice, read_prices, total)

    def off_gpu(self, candidate: int) -> Proposal:
        """Each piece in host memory (-2) or on disk (-1), but nowhere where it must be on GPUs."""
        choice = np.full(len(self.tables), len(self._storage) + candidate)
        for first, last, where in self._ranges():
            if where == _GPU_ONLY:
                choice[first:last] = NOWHERE
        return self._proposal(choice, np.zeros(self._loads.shape[:3]), -np.inf)

    def _proposal(
        self, choice: np.ndarray, read_prices: np.ndarray, lower_bound: float
    ) -> Proposal:
        somewhere = choice != NOWHERE
        count = len(self._storage)
        kinds, which = np.unique(
            self.tables[somewhere] * count + choice[somewhere], return_inverse=True
        )
        tables, candidates = kinds // count, kinds % count
        keys, loads = self.candidates.forms(candidates, tables, read_prices, self._loads)
        numbers = []
        for table, key, load in zip(tables.tolist(), keys, loads, strict=True):
            number = self._numbers.setdefault((table, key), len(self.keys))
            if number == len(self.keys):
                self.keys.append(key)
                self._pattern_loads.append(load)
            numbers.append(number)
        patterns = np.full(len(choice), NOWHERE)
        patterns[somewhere] = np.array(numbers, np.int64)[which]
        reads, nbytes = self._reads[somewhere, None], self._bytes[somewhere, None]
        usage = np.zeros((len(choice), self._loads.shape[-1] + len(self.budget)))
        usage[somewhere] = np.concatenate(
            [reads * loads[which], nbytes * self._storage[choice[somewhere]]], axis=1
        )
        costs = self.nowhere_costs.copy()
        costs[somewhere] = self._bytes[somewhere] * self._storage_cost[choice[somewhere]]
        return Proposal(patterns, usage, costs, lower_bound)

    # --- cells of pieces, their shares one after another ---------------------------------

    def columns(
        self, starts: np.ndarray, cells: np.ndarray, patterns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Usage of each time and memory row by cells kept by patterns, and its costs.

        ``starts`` is the first piece of each cell; ``cells`` and ``patterns`` have shape (k,).
        """
        reads = np.add.reduceat(self._reads, starts)[cells, None]
        nbytes = np.add.reduceat(self._bytes, starts)[cells, None]
        candidate = np.array([self.keys[pattern][0] for pattern in patterns.tolist()], np.int64)
        loads = np.array([self._pattern_loads[pattern] for pattern in patterns.tolist()])
        loads = loads.reshape(len(patterns), self._loads.shape[-1])
        usage = np.concatenate([reads * loads, nbytes * self._storage[candidate]], axis=1)
        return usage, nbytes[:, 0] * self._storage_cost[candidate]

    def row_ranges(self, starts: np.ndarray, shares: Sequence[Mapping[int, int]]) -> list[RowRange]:
        """Cells as ranges of rows, of each cell's first piece and its shares by pattern (any unit).

        Shares of a cell go beside equal neighbours, else from many copies to few.
        """
        ends = [*starts[1:].tolist(), len(self.tables)]
        row_ranges: list[RowRange] = []
        for index, (first, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            table = int(self.tables[first])
            previous = row_ranges[-1] if row_ranges and row_ranges[-1].table == table else None
            before = previous.pattern if previous else None
            after = shares[index + 1] if index + 1 < len(shares) else {}
            order = sorted(shares[index], key=lambda pattern: self._rank(pattern, before, after))
            total, done = sum(shares[index].values()), 0
            begin, size = int(self._begin[first]), int(self._end[end - 1] - self._begin[first])
            for pattern in order:
                start = begin + _share(size, done, total)
                done += shares[index][pattern]
                if pattern == before and pattern == order[0]:
                    start = row_ranges.pop().begin
                stop = begin + _share(size, done, total)
                row_ranges.append(RowRange(table, pattern, start, stop))
        return row_ranges

    def _rank(
        self, pattern: int, before: int | None, after: Collection[int]
    ) -> tuple[bool, bool, bool, float, int]:
        if pattern == NOWHERE:
            return True, pattern != before, pattern in after, 0.0, pattern
        storage = self.candidates.storage[self.keys[pattern][0]]
        copies = float(storage[: self._num_gpus].sum())
        return False, pattern != before, pattern in after, -copies, pattern

    def seconds(self, row_ranges: Sequence[RowRange]) -> float:
        """Time of the slowest GPU under these ranges, and the price of what overflows."""
        load, overflow = np.zeros(len(self.times)), 0.0
        for table, spec in enumerate(self._specs):
            here = [row_range for row_range in row_ranges if row_range.table == table]
            for row_range, accesses in zip(here, range_accesses(spec, here), strict=True):
                if row_range.pattern == NOWHERE:
                    overflow += (row_range.end - row_range.begin) / self._byte_scale
                    overflow += accesses / self._accesses[table]
                else:
                    load += accesses * self._pattern_loads[row_range.pattern]
        return float(self._slowest(load)) + _OVERFLOW_COST * overflow

    def _slowest(self, load: np.ndarray) -> float:
        """The slowest GPU's time that a load of the time rows makes."""
        last = self.times.shape[1] - 1
        waits = [max(load[self.times[:, index] < 0].max(initial=0.0), 0.0) for index in range(last)]
        load = load + (self.times[:, :last] * waits).sum(1)
        return max(float(load[self.times[:, last] < 0].max(initial=0.0)), 0.0)


def range_accesses(spec: TableSpec, row_ranges: Sequence[RowRange]) -> list[float]:
    """Expected accesses of each of a table's ranges."""
    begin = np.array([row_range.begin for row_range in row_ranges])
    end = np.array([row_range.end for row_range in row_ranges])
    return (spec.accesses_before_bytes(end) - spec.accesses_before_bytes(begin)).tolist()


def _share(size: int, part: int, whole: int) -> int:
    """``size * part / whole``, rounded to the nearest."""
    return (2 * size * part + whole) // (2 * whole)


def _front(allowed: np.ndarray, memory: np.ndarray, access: np.ndarray) -> np.ndarray:
    """The Pareto front of the allowed candidates in the costs of memory and of accesses."""
    order = allowed[np.lexsort((access[allowed], memory[allowed]))]
    least = np.minimum.accumulate(access[order])
    better = np.ones(len(order), bool)
    better[1:] = least[1:] < least[:-1]
    return order[better]
