"""Placement as a linear programme.

A *piece* is a table's rows between two breakpoints, which are equally hot.  The unknowns are the
shares of each piece that are kept after each candidate pattern; shares of a piece lie one after
another, so any shares can be realised exactly, and hotness keeps the number of tiers small: at
given prices the cheapest candidate changes only a few times from the hottest row to the
coldest.  The objective is the time of the slowest GPU (``cost.py``); budgets are constraints.

A machine's symmetries fold equal GPUs, links and candidates into one.

All arithmetic is of single operations and of sums in one order, never a product of matrices: what
a library of linear algebra gives differs between processors, and plans must not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dgl_mgpu.placement.candidates import Candidates, Key
from dgl_mgpu.placement.cost import Resources
from dgl_mgpu.placement.patterns import orbits
from dgl_mgpu.placement.table_spec import TableSpec

# Where a piece's rows may go.
_FREE, _GPU_ONLY, _OFF_GPU = range(3)

# Where time does not tell, the least memory: a byte costs this much of the time scale on a GPU,
# twice that in host memory (so that GPUs are filled first) and four times that on disk; and where
# memory does not tell either, the first candidate.
_STORAGE_COST = 1e-7
_STORAGE_WEIGHTS = (1.0, 2.0, 4.0)
_ORDER_COST = 1e-9
# Rows that fit nowhere: more than any memory can cost.
_OVERFLOW_COST = 1e4
#: Number of a pattern that stands for no memory at all.
NOWHERE = -1


@dataclass(frozen=True)
class RowRange:
    """Rows of one table kept after one pattern, as a range of its bytes.

    Attributes
    ----------
    table : int
    pattern : int
        Number of the pattern in the programme; ``NOWHERE`` for rows that fit nowhere.
    begin, end : int
        Bytes of the table before the run and up to its end.
    """

    table: int
    pattern: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Proposal:
    """Where every piece goes at some prices.

    Attributes
    ----------
    patterns : ndarray of int, shape (pieces,)
        Number of the pattern of each piece.
    taken : ndarray, shape (pieces, time and memory rows)
        What each takes of the rows.
    costs : ndarray, shape (pieces,)
        What each costs by itself.
    least : float
        What all pieces cost, prices paid: no placement costs less.
    """

    patterns: np.ndarray
    taken: np.ndarray
    costs: np.ndarray
    least: float


class LinearProgram:
    """The linear programme of one machine, its tables and its budgets.

    Parameters
    ----------
    resources : Resources
    specs : sequence of TableSpec
    candidates : Candidates
    automorphisms : ndarray, shape (k, n)
        Symmetries that the candidates are folded by.
    budgets : ndarray, shape (n + 2,)
        Bytes of each GPU, of host memory and of the disk.
    cuts : sequence, one a table
        None where rows may go anywhere; else the number of the breakpoint before which they must
        be on GPUs and after which they must not.

    Attributes
    ----------
    times : ndarray, shape (time rows, waits)
        What the waits, the last of which is the slowest GPU's, give to each time row.
    budget : ndarray, shape (memory rows,)
    tables : ndarray of int, shape (pieces,)
    ranges : ndarray of int, shape (ranges + 1,)
        Pieces before each range of a table whose rows may go to the same memories.
    rows : ndarray of int, shape (pieces + 1,)
        Rows before each piece, those of tables before among them.
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
        self._candidates = candidates
        self._specs = specs
        self._byte_scale = max(sum(spec.total_bytes for spec in specs), 1.0)
        self._accesses = np.array([max(spec.total_accesses, 1e-300) for spec in specs])
        # Time is counted in what reading every row from the host takes.
        host = np.zeros((n, n + 2))
        host[:, n] = 1.0
        load = sum(resources.load(spec, host * spec.total_accesses) for spec in specs)
        self.time_scale = max(float(resources.gpu_seconds(np.asarray(load)).max()), 1e-300)
        self._fold_resources(resources, automorphisms)
        self._fold_memory(n, automorphisms, budgets)
        self._cut(cuts)
        #: Patterns that were proposed, by table: what a read of each loads, for the time rows.
        self._numbers: dict[tuple[int, Key], int] = {}
        self._keys: list[Key] = []
        self._brought: list[np.ndarray] = []

    def _fold_resources(self, resources: Resources, automorphisms: np.ndarray) -> None:
        """Time rows: one for each orbit of resources and of the GPUs that wait for it.

        Beside the shares, the unknowns are for each orbit of GPUs the time of GPU memories and
        of the host, and the time of the slowest GPU.
        """
        n = resources.num_gpus
        orbit = orbits(automorphisms)
        self._num_orbits = q = int(orbit.max()) + 1
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
            key = (kind, resources.seconds_per_byte[index], fingerprint[index])
            groups.setdefault(key, []).append(index)
        shares, first, times = [], [], []
        for (kind, *_), group in groups.items():
            share = resources.users[group].sum(0) / len(group)
            owners = np.unique(orbit[resources.owners[group].any(0)])
            for owner in owners if kind != "disk" else ():
                shares.append(share)
                first.append(group[0])
                times.append(owner + (q if kind == "host" else 0))
        count = len(shares)
        disk = [index for index, kind in enumerate(resources.link) if kind == "disk"]
        for index in disk:
            shares.extend([resources.users[index]] * q)
            first.extend([index] * q)
        if not disk:
            shares.extend([np.zeros((n, n + 2))] * q)
            first.extend([0] * q)
        by_read = np.array(shares).transpose(1, 2, 0)
        #: [table, reader, memory, row]: what an access loads.
        self._loads = np.array([
            by_read * (resources.access_seconds(spec)[first] / self.time_scale)
            for spec in self._specs
        ]).reshape(len(self._specs), n, n + 2, -1)  # fmt: skip
        self.times = np.zeros((count + q, 2 * q + 1))
        self.times[np.arange(count), times] = -1.0
        for owner in range(q):
            self.times[count + owner, [owner, q + owner, 2 * q]] = 1.0, 1.0, -1.0

    def _fold_memory(self, n: int, automorphisms: np.ndarray, budgets: np.ndarray) -> None:
        """Memory rows: the mean over each orbit of GPUs, the host, the disk."""
        orbit = orbits(automorphisms)
        members = [
            *((orbit == each).nonzero()[0] for each in range(self._num_orbits)),
            [n],
            [n + 1],
        ]
        storage = self._candidates.storage
        self._storage = np.array([storage[:, each].sum(1) / len(each) for each in members]).T
        count = len(storage)
        weights = np.repeat(_STORAGE_WEIGHTS, (n, 1, 1))
        self._storage_cost = _STORAGE_COST * (storage * weights).sum(1)
        self._storage_cost += _ORDER_COST * np.arange(count) / count
        held = np.array([budgets[each].sum() / len(each) for each in members])
        self.budget = np.minimum(held / self._byte_scale, 1.0)
        on_gpu = storage[:, :n].any(1)
        self._allowed = [
            np.arange(count), np.flatnonzero(on_gpu), np.flatnonzero(~on_gpu),
        ]  # fmt: skip

    def _cut(self, cuts: Sequence[int | None]) -> None:
        """Whole tables as pieces, in ranges of those that may go to the same memories."""
        tables, ranges, self._where = [], [0], []
        begin, end, accesses, rows = [], [], [], [np.zeros(1, np.int64)]
        for table, (spec, cut) in enumerate(zip(self._specs, cuts, strict=True)):
            last = len(spec.positions) - 1
            parts = [(last, _FREE)] if cut is None else [(cut, _GPU_ONLY), (last - cut, _OFF_GPU)]
            for count, where in parts:
                if count:
                    tables.extend([table] * count)
                    ranges.append(len(tables))
                    self._where.append(where)
            begin.append(spec.whole_bytes[:-1])
            end.append(spec.whole_bytes[1:])
            accesses.append(np.diff(spec.accesses))
            rows.append(np.diff(spec.positions))
        self.tables, self.ranges = np.array(tables, np.int64), np.array(ranges)
        self._begin, self._end = (
            np.concatenate([np.zeros(0, np.int64), *each]) for each in (begin, end)
        )
        self.rows = np.cumsum(np.concatenate(rows))
        self._bytes = (self._end - self._begin) / self._byte_scale
        self._reads = np.concatenate([np.zeros(0), *accesses])
        self._nowhere_costs = _OVERFLOW_COST * (
            self._bytes + self._reads / self._accesses[self.tables]
        )

    def key(self, pattern: int) -> Key:
        """What a pattern is to the candidates."""
        return self._keys[pattern]

    def copies(self, pattern: int) -> float:
        """Copies on GPUs of each row of a pattern."""
        if pattern == NOWHERE:
            return 0.0
        return float(self._candidates.storage[self._keys[pattern][0], : self._num_gpus].sum())

    # --- at given prices -----------------------------------------------------------------

    def cheapest(self, prices: np.ndarray) -> Proposal:
        """Each piece where it costs least, at given prices of the time and memory rows."""
        times = len(self.times)
        read_prices = -(self._loads * prices[:times]).sum(-1)
        access = self._candidates.access_costs(read_prices)
        memory = self._storage_cost - (self._storage * prices[times:]).sum(1)
        choice = np.empty(len(self.tables), np.int64)
        least = np.empty(len(self.tables))
        floor = np.maximum(self._reads, 1e-12 * self._accesses[self.tables])
        for first, last, where in zip(
            self.ranges[:-1].tolist(), self.ranges[1:].tolist(), self._where, strict=True
        ):
            piece = slice(first, last)
            front = _front(self._allowed[where], memory, access[self.tables[first]])
            costs = floor[piece, None] * access[self.tables[first], front]
            costs += self._bytes[piece, None] * memory[front]
            best = costs.argmin(1)
            choice[piece] = front[best]
            least[piece] = costs[np.arange(last - first), best]
        choice[least >= self._nowhere_costs] = NOWHERE
        total = float(np.minimum(least, self._nowhere_costs).sum())
        total += float((prices[times:] * self.budget).sum())
        return self._proposal(choice, read_prices, total)

    def off_gpu(self, candidate: int) -> Proposal:
        """Each piece in host memory (-2) or on disk (-1), but nowhere where it must be on GPUs."""
        choice = np.full(len(self.tables), len(self._storage) + candidate)
        for first, last, where in zip(
            self.ranges[:-1].tolist(), self.ranges[1:].tolist(), self._where, strict=True
        ):
            if where == _GPU_ONLY:
                choice[first:last] = NOWHERE
        return self._proposal(choice, np.zeros(self._loads.shape[:3]), -np.inf)

    def _proposal(self, choice: np.ndarray, read_prices: np.ndarray, least: float) -> Proposal:
        somewhere = choice != NOWHERE
        count = len(self._storage)
        kinds, which = np.unique(
            self.tables[somewhere] * count + choice[somewhere], return_inverse=True
        )
        tables, candidates = kinds // count, kinds % count
        keys, loads = self._candidates.forms(candidates, tables, read_prices, self._loads)
        numbers = []
        for tag, brought in zip(zip(tables.tolist(), keys, strict=True), loads, strict=True):
            number = self._numbers.setdefault(tag, len(self._keys))
            if number == len(self._keys):
                self._keys.append(tag[1])
                self._brought.append(brought)
            numbers.append(number)
        patterns = np.full(len(choice), NOWHERE)
        patterns[somewhere] = np.array(numbers, np.int64)[which]
        reads, nbytes = self._reads[somewhere, None], self._bytes[somewhere, None]
        taken = np.zeros((len(choice), self._loads.shape[-1] + len(self.budget)))
        taken[somewhere] = np.concatenate(
            [reads * loads[which], nbytes * self._storage[choice[somewhere]]], axis=1
        )
        costs = self._nowhere_costs.copy()
        costs[somewhere] = self._bytes[somewhere] * self._storage_cost[choice[somewhere]]
        return Proposal(patterns, taken, costs, least)

    @property
    def nowhere_costs(self) -> np.ndarray:
        """Cost of pieces that are kept nowhere."""
        return self._nowhere_costs

    # --- cells of pieces, their shares one after another ---------------------------------

    def columns(
        self, starts: np.ndarray, cells: np.ndarray, patterns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What cells kept after patterns take of each time and memory row; their costs.

        Parameters
        ----------
        starts : ndarray of int
            First piece of each cell.
        cells, patterns : ndarray of int, shape (k,)
        """
        reads = np.add.reduceat(self._reads, starts)[cells, None]
        nbytes = np.add.reduceat(self._bytes, starts)[cells, None]
        candidate = np.array([self._keys[pattern][0] for pattern in patterns.tolist()], np.int64)
        brought = np.zeros((len(patterns), self._loads.shape[-1]))
        for index, pattern in enumerate(patterns.tolist()):
            brought[index] = self._brought[pattern]
        taken = np.concatenate([reads * brought, nbytes * self._storage[candidate]], axis=1)
        return taken, nbytes[:, 0] * self._storage_cost[candidate]

    def row_ranges(self, starts: np.ndarray, shares: Sequence[Mapping[int, int]]) -> list[RowRange]:
        """Cells as runs of rows.

        Shares of a cell go beside equal neighbours, else from many copies to few.

        Parameters
        ----------
        starts : ndarray of int
            First piece of each cell.
        shares : sequence of dict of int to int
            Pattern → share of the cell, in any unit.
        """
        lasts = [*(starts[1:] - 1).tolist(), len(self.tables) - 1]
        row_ranges: list[RowRange] = []
        for index, (first, last) in enumerate(zip(starts.tolist(), lasts, strict=True)):
            table = int(self.tables[first])
            before = (
                row_ranges[-1].pattern if row_ranges and row_ranges[-1].table == table else None
            )
            after = shares[index + 1] if index + 1 < len(shares) else {}
            found = sorted(shares[index].items(), key=lambda s: self._rank(s[0], before, after))
            total, done = sum(shares[index].values()), 0
            begin, size = int(self._begin[first]), int(self._end[last] - self._begin[first])
            for pattern, value in found:
                start = begin + _share(size, done, total)
                done += value
                if (
                    row_ranges
                    and row_ranges[-1].table == table
                    and row_ranges[-1].pattern == pattern
                ):
                    start = row_ranges.pop().begin
                row_ranges.append(
                    RowRange(table, pattern, start, begin + _share(size, done, total))
                )
        return row_ranges

    def _rank(
        self, pattern: int, before: int | None, after: Collection[int]
    ) -> tuple[bool, bool, bool, float, int]:
        nowhere = pattern == NOWHERE
        return nowhere, pattern != before, pattern in after, -self.copies(pattern), pattern

    def seconds(self, row_ranges: Sequence[RowRange]) -> float:
        """Time of the slowest GPU under runs as they lie, and the price of what overflows."""
        load, overflow = np.zeros(len(self.times)), 0.0
        for table, spec in enumerate(self._specs):
            here = [row_range for row_range in row_ranges if row_range.table == table]
            for row_range, accesses in zip(here, range_accesses(spec, here), strict=True):
                if row_range.pattern == NOWHERE:
                    overflow += (row_range.end - row_range.begin) / self._byte_scale
                    overflow += accesses / self._accesses[table]
                else:
                    load += accesses * self._brought[row_range.pattern]
        return float(self._slowest(load)) + _OVERFLOW_COST * overflow

    def _slowest(self, load: np.ndarray) -> float:
        """The slowest GPU's time that a load of the time rows makes."""
        last = self.times.shape[1] - 1
        waits = [max(load[self.times[:, index] < 0].max(initial=0.0), 0.0) for index in range(last)]
        load = load + (self.times[:, :last] * waits).sum(1)
        return max(float(load[self.times[:, last] < 0].max(initial=0.0)), 0.0)


def range_accesses(spec: TableSpec, row_ranges: Sequence[RowRange]) -> list[float]:
    """Expected accesses of each of a table's runs."""
    begin = np.array([row_range.begin for row_range in row_ranges])
    end = np.array([row_range.end for row_range in row_ranges])
    return (spec.accesses_before_bytes(end) - spec.accesses_before_bytes(begin)).tolist()


def _share(size: int, part: int, whole: int) -> int:
    """A part of a size, to the nearest."""
    return (2 * size * part + whole) // (2 * whole)


def _front(allowed: np.ndarray, memory: np.ndarray, access: np.ndarray) -> np.ndarray:
    """Of some candidates those than which none is cheaper in memory and in accesses."""
    order = allowed[np.lexsort((access[allowed], memory[allowed]))]
    least = np.minimum.accumulate(access[order])
    better = np.ones(len(order), bool)
    better[1:] = least[1:] < least[:-1]
    return order[better]
