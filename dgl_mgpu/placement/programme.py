"""Placement as a linear programme.

A *segment* is a run of a table's rows that are about equally hot.  The unknowns are the shares
of each segment that are kept after each candidate pattern; shares of a segment lie one after
another, so any shares can be realised exactly, and hotness keeps the number of tiers small: at
given prices the cheapest candidate changes only a few times from the hottest row to the
coldest.  The objective is the time of the slowest GPU (``cost.py``); budgets are constraints.

A machine's symmetries fold equal GPUs, links and candidates into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .candidates import FORBIDDEN, Candidates, Key
from .cost import Resources
from .patterns import orbits
from .table import TableSpec

#: Where a segment's rows may go.
FREE, GPU_ONLY, OFF_GPU = range(3)
#: Columns of an array of segments: table, breakpoints ``[first, last]``, where.
TABLE, FIRST, LAST, WHERE = range(4)

# Where time does not tell, the least memory: a byte costs this much of the time scale on a GPU,
# twice that in host memory (so that GPUs are filled first) and four times that on disk.
_STORAGE_COST = 1e-7
_STORAGE_WEIGHTS = (1.0, 2.0, 4.0)
# Rows that fit nowhere: more than any memory can cost.
_OVERFLOW_COST = 1e4
#: Relative distance from the lower bound at which a placement is good enough.
GAP = 3e-3


@dataclass(frozen=True, eq=False)
class Run:
    """Rows of one table kept after one pattern, as a range of its bytes.

    Attributes
    ----------
    table : int
    key : tuple of int or None
        Pattern, to the candidates; None for rows that fit nowhere.
    loads : ndarray
        What one access brings to each time row.
    begin, end : float
        Bytes of the table before the run and up to its end.
    """

    table: int
    key: Key | None
    loads: np.ndarray
    begin: float
    end: float


class Programme:
    """The linear programme of one machine, its tables and its budgets.

    Parameters
    ----------
    resources : Resources
    specs : sequence of TableSpec
    candidates : Candidates
    moves : ndarray, shape (k, n)
        Symmetries that the candidates are folded by.
    budgets : ndarray, shape (n + 2,)
        Bytes of each GPU, of host memory and of the disk.
    exact : bool
        Solve each linear programme to the end.  Else stop a little before: where GPUs are not
        all alike, the last steps gain next to nothing and take the longest.
    """

    def __init__(
        self,
        resources: Resources,
        specs: Sequence[TableSpec],
        candidates: Candidates,
        moves: np.ndarray,
        budgets: np.ndarray,
        exact: bool,
    ) -> None:
        self.gap = 0.0 if exact else GAP / 2
        n = self._num_gpus = resources.num_gpus
        self._candidates = candidates
        self._specs = specs
        self._curves = np.concatenate([[spec.nbytes, spec.accesses] for spec in specs], axis=1)
        self._curve_at = np.cumsum([0, *(len(spec.positions) for spec in specs[:-1])])
        self._byte_scale = max(sum(spec.total_bytes for spec in specs), 1.0)
        self._accesses = np.array([max(spec.total_accesses, 1e-300) for spec in specs])
        # Time is counted in what reading every row from the host takes.
        host = np.zeros((n, n + 2))
        host[:, n] = 1.0
        load = sum(resources.load(spec, host * spec.total_accesses) for spec in specs)
        self.time_scale = max(float(resources.gpu_seconds(np.asarray(load)).max()), 1e-300)
        self._fold_resources(resources, moves)
        self._fold_memory(n, moves, budgets)

    def _fold_resources(self, resources: Resources, moves: np.ndarray) -> None:
        """Time rows: one for each orbit of resources and of the GPUs that wait for it.

        Beside the shares, the unknowns are for each orbit of GPUs the time of GPU memories and
        of the host, and the time of the slowest GPU.
        """
        n = resources.num_gpus
        orbit = orbits(moves)
        self._num_orbits = q = int(orbit.max()) + 1
        # Resources that symmetries turn into each other have the same readers and memories up
        # to renumbering: a random mark for each read makes the smallest image a fingerprint.
        mark = np.random.default_rng(0).random((n, n + 2))
        images = [
            np.tensordot(resources.users, mark[np.ix_(move, [*move, n, n + 1])], 2)
            for move in moves
        ]
        fingerprint = np.round(np.min(images, 0), 9).tolist()
        groups: dict[tuple, list[int]] = {}
        for index, kind in enumerate(resources.link):
            key = (kind, resources.seconds_per_byte[index], fingerprint[index])
            groups.setdefault(key, []).append(index)
        weights, times = [], []
        for (kind, *_), group in groups.items():
            weight = np.zeros(len(resources.link))
            weight[group] = 1.0 / len(group)
            owners = np.unique(orbit[resources.owners[group].any(0)])
            for owner in owners if kind != "disk" else ():
                weights.append(weight)
                times.append(owner + (q if kind == "host" else 0))
        disk = np.array([kind == "disk" for kind in resources.link], float)
        count = len(weights)
        weights.extend([disk] * q)
        users = resources.users.reshape(len(resources.link), -1)
        #: [table, reader, memory, row]: what an access loads.
        self._loads = np.array([
            ((weights * resources.access_seconds(spec)) @ users / self.time_scale).T
            for spec in self._specs
        ]).reshape(len(self._specs), n, n + 2, -1)  # fmt: skip
        self.times = np.zeros((count + q, 2 * q + 1))
        self.times[np.arange(count), times] = -1.0
        for owner in range(q):
            self.times[count + owner, [owner, q + owner, 2 * q]] = 1.0, 1.0, -1.0

    def _fold_memory(self, n: int, moves: np.ndarray, budgets: np.ndarray) -> None:
        """Memory rows: the mean over each orbit of GPUs, the host, the disk."""
        orbit = orbits(moves)
        fold = np.zeros((n + 2, self._num_orbits + 2))
        fold[np.arange(n), orbit] = 1.0 / np.bincount(orbit)[orbit]
        fold[n, -2] = fold[n + 1, -1] = 1.0
        storage = self._candidates.storage
        self._storage = storage @ fold
        self._storage_cost = _STORAGE_COST * (storage @ np.repeat(_STORAGE_WEIGHTS, (n, 1, 1)))
        self.budget = np.minimum(budgets @ fold / self._byte_scale, 1.0)
        on_gpu = storage[:, :n].any(1)
        self._forbidden = np.zeros((3, len(storage)))
        self._forbidden[GPU_ONLY, ~on_gpu] = FORBIDDEN
        self._forbidden[OFF_GPU, on_gpu] = FORBIDDEN

    def segments(self, cuts: Sequence[int | None]) -> np.ndarray:
        """Whole tables as segments.

        Parameters
        ----------
        cuts : sequence, one a table
            None where rows may go anywhere; else the number of the breakpoint before which
            they must be on GPUs and after which they must not.
        """
        rows = []
        for table, (spec, cut) in enumerate(zip(self._specs, cuts, strict=True)):
            last = len(spec.positions) - 1
            if cut is None:
                rows.append((table, 0, last, FREE))
            else:
                rows.extend([(table, 0, cut, GPU_ONLY), (table, cut, last, OFF_GPU)])
        return np.array([row for row in rows if row[LAST] > row[FIRST]], np.int64).reshape(-1, 4)

    def seconds(self, runs: Sequence[Run]) -> float:
        """Time of the slowest GPU under runs as they lie, and the price of what overflows."""
        load, overflow = np.zeros(len(self.times)), 0.0
        for run in runs:
            spec = self._specs[run.table]
            accesses = float(
                np.diff(np.interp((run.begin, run.end), spec.nbytes, spec.accesses))[0]
            )
            load += accesses * run.loads
            if run.key is None:
                overflow += (run.end - run.begin) / self._byte_scale
                overflow += accesses / self._accesses[run.table]
        return float(self.waits(load)[-1]) + _OVERFLOW_COST * overflow

    def waits(self, load: np.ndarray) -> np.ndarray:
        """The times that a load of the time rows makes: by orbit for GPU memories and for the
        host, then that of the slowest GPU."""
        last = self.times.shape[1] - 1
        waits = np.zeros(last + 1)
        for index in range(last + 1):
            if index == last:  # which waits for the times before
                load = load + self.times[:, :last] @ waits[:last]
            waits[index] = max(load[self.times[:, index] < 0].max(initial=0.0), 0.0)
        return waits

    def cheapest_sums(
        self, coarse: np.ndarray, finest: np.ndarray, prices: np.ndarray
    ) -> np.ndarray:
        """For each coarse segment, what its finest pieces cost at given prices."""
        costs = self.cheapest(finest, prices)[1]
        at = self._curve_at[finest[:, TABLE]] + finest[:, FIRST]
        first = self._curve_at[coarse[:, TABLE]] + coarse[:, FIRST]
        return np.add.reduceat(costs, np.searchsorted(at, first))

    @property
    def breakpoints(self) -> int:
        """Of all tables' curves."""
        return len(self._curves[0])

    # --- what the master problem asks ----------------------------------------------------

    def byte_range(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of its table before each segment and up to its end."""
        at = self._curve_at[segments[:, TABLE]]
        nbytes = self._curves[0]
        return nbytes[at + segments[:, FIRST]], nbytes[at + segments[:, LAST]]

    def sizes(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes (in units of all tables' bytes) and accesses of segments."""
        at = self._curve_at[segments[:, TABLE]]
        size = self._curves[:, at + segments[:, LAST]] - self._curves[:, at + segments[:, FIRST]]
        return size[0] / self._byte_scale, size[1]

    def cheapest(
        self, segments: np.ndarray, prices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where segments go at given prices of the time and memory rows.

        Returns
        -------
        choice : ndarray of int
            Cheapest candidate of each segment; -1 for none.
        cost : ndarray
        read_prices : ndarray, shape (t, n, n + 2)
            For each table, what a GPU's read of each memory costs.
        """
        nbytes, accesses = self.sizes(segments)
        tables = segments[:, TABLE]
        read_prices = -(self._loads @ prices[: len(self.times)])
        access = self._candidates.access_costs(read_prices)
        memory = self._storage_cost - self._storage @ prices[len(self.times) :]
        floor = np.maximum(accesses, 1e-12 * self._accesses[tables])
        costs = floor[:, None] * access[tables] + nbytes[:, None] * memory
        costs += self._forbidden[segments[:, WHERE]]
        choice = costs.argmin(1)
        least = costs[np.arange(len(choice)), choice]
        nowhere = self.overflow_costs(segments)
        return np.where(least < nowhere, choice, -1), np.minimum(least, nowhere), read_prices

    def overflow_costs(self, segments: np.ndarray) -> np.ndarray:
        """Cost of segments that are kept nowhere."""
        nbytes, accesses = self.sizes(segments)
        return _OVERFLOW_COST * (nbytes + accesses / self._accesses[segments[:, TABLE]])

    def forms(
        self, segments: np.ndarray, choice: np.ndarray, read_prices: np.ndarray
    ) -> tuple[list[Key], np.ndarray]:
        """The cheapest forms of the candidates chosen for segments.

        Returns
        -------
        keys : list of tuple
        loads : ndarray, shape (k, number of time rows)
            What one access brings.
        """
        return self._candidates.forms(choice, segments[:, TABLE], read_prices, self._loads)

    def columns(
        self, segments: np.ndarray, keys: Sequence[Key], loads: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What segments kept after patterns take of each time and memory row; their costs."""
        nbytes, accesses = self.sizes(segments)
        index = np.array([key[0] for key in keys], int)
        taken = np.concatenate(
            [accesses[:, None] * loads, nbytes[:, None] * self._storage[index]], axis=1
        )
        return taken, nbytes * self._storage_cost[index]

    def off_gpu(
        self, segments: np.ndarray, candidate: int
    ) -> tuple[np.ndarray, list[Key], np.ndarray]:
        """Segments that may go to the host (-2) or the disk (-1), with pattern and loads."""
        which = (segments[:, WHERE] != GPU_ONLY).nonzero()[0]
        choice = np.full(len(which), len(self._storage) + candidate)
        free = np.zeros(self._loads.shape[:3])
        return which, *self.forms(segments[which], choice, free)

    def copies(self, key: Key | None) -> float:
        """Copies on GPUs of each row of a pattern."""
        return (
            0.0 if key is None else float(self._candidates.storage[key[0], : self._num_gpus].sum())
        )
