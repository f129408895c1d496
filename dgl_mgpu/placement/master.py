"""The linear programme over one set of segments, and how its columns are made on demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .candidates import Key
from .programme import Programme, Run
from .simplex import Columns, Simplex

# Shares below this are the simplex's rounding.
_NOTHING = 1e-9


class Master:
    """Solved on creation.

    Its rows are the model's time rows and memory rows, then one for each segment: its shares
    add up to 1.

    Parameters
    ----------
    model : Programme
    segments : ndarray, int64, shape (k, 4)
    start : sequence of Run
        A placement to begin from, at best the optimum for coarser segments.
    """

    def __init__(self, model: Programme, segments: np.ndarray, start: Sequence[Run]) -> None:
        self._model = model
        self._segments = segments
        self._loads: dict[tuple[int, Key | None], np.ndarray] = {}
        self._num_times = model.times.shape[0]
        self._top = self._num_times + len(model.budget)
        self._rhs = np.ones(self._top + len(segments))
        # Small and distinct right-hand sides keep the simplex from going round in circles.
        self._rhs[: self._num_times] = 1e-9 * np.arange(1, self._num_times + 1)
        self._rhs[self._num_times : self._top] = model.budget
        self._simplex = Simplex(self._rhs, *self._start(start), self._top)
        self._simplex.minimise(self._generate, model.gap)

    @property
    def objective(self) -> float:
        return self._simplex.objective

    @property
    def pivots(self) -> int:
        return self._simplex.pivots

    @property
    def row_prices(self) -> np.ndarray:
        """Prices of the time and memory rows."""
        return self._simplex.prices[: self._top]

    @property
    def segment_prices(self) -> np.ndarray:
        """What each segment costs at those prices."""
        return self._simplex.prices[self._top :]

    # --- columns -------------------------------------------------------------------------

    def _columns(self, which: np.ndarray, keys: Sequence[Key], loads: np.ndarray) -> Columns:
        """Segments ``which`` kept after patterns."""
        segments = self._segments[which]
        entries = np.zeros((len(which), len(self._rhs)))
        entries[:, : self._top], costs = self._model.columns(segments, keys, loads)
        entries[np.arange(len(which)), self._top + which] = 1.0
        for table, key, load in zip(segments[:, 0].tolist(), keys, loads, strict=True):
            self._loads[table, key] = load
        return Columns(entries, costs, list(zip(which.tolist(), keys, strict=True)))

    def _standing(self) -> Columns:
        """Columns that are always there: slacks, times, and each segment kept nowhere."""
        count, times = len(self._segments), self._model.times
        entries = np.zeros((self._top + times.shape[1] + count, len(self._rhs)))
        entries[: self._top, : self._top] = np.eye(self._top)
        entries[self._top : -count, : self._num_times] = times.T
        entries[-count:, self._top :] = np.eye(count)
        costs = np.zeros(len(entries))
        costs[-count - 1] = 1.0  # the slowest GPU's time
        costs[-count:] = self._model.overflow_costs(self._segments)
        tags = [None] * (len(entries) - count) + [(index, None) for index in range(count)]
        return Columns(entries, costs, tags)

    def _generate(self, prices: np.ndarray) -> tuple[Columns, float]:
        """For each segment its cheapest column; and what no placement can beat."""
        model, top = self._model, prices[: self._top]
        choice, cost, read_prices = model.cheapest(self._segments, top)
        which = ((cost < prices[self._top :]) & (choice >= 0)).nonzero()[0]
        keys, loads = model.forms(self._segments[which], choice[which], read_prices)
        bound = float(cost.sum() + top @ self._rhs[: self._top])
        return self._columns(which, keys, loads), bound

    # --- where to start ------------------------------------------------------------------

    def _start(self, runs: Sequence[Run]) -> tuple[Columns, list[int]]:
        """Every segment whole in one place: where it was before, else off the GPUs."""
        owner, keys, loads = self._options(runs)
        standing, options = self._standing(), self._columns(np.array(owner, int), keys, loads)
        pool = Columns(
            np.concatenate([standing.entries, options.entries]),
            np.concatenate([standing.costs, options.costs]),
            [*standing.tags, *options.tags],
        )
        count = len(self._segments)
        chosen = list(range(len(standing.tags) - count, len(standing.tags)))
        # Segments with the fewest options first: they lie in a run whose room is there.
        rarity = np.bincount(owner, minlength=count)
        used, memory = np.zeros(self._top), slice(self._num_times, self._top)
        for option in sorted(range(len(owner)), key=lambda option: rarity[owner[option]]):
            column = len(standing.tags) + option
            after = used + pool.entries[column, : self._top]
            if pool.tags[chosen[owner[option]]][1] is None and (
                (after <= self._rhs[: self._top])[memory].all()
            ):
                chosen[owner[option]], used = column, after
        return pool, [*self._top_basis(used), *chosen]

    def _options(self, runs: Sequence[Run]) -> tuple[list[int], list[Key], np.ndarray]:
        """Segment, pattern and loads: of the runs that each segment overlaps, those of many
        copies first; then the host and the disk."""
        table = self._segments[:, 0]
        begin, end = self._model.byte_range(self._segments)
        owner: list[int] = []
        keys: list[Key] = []
        brought: list[np.ndarray] = []
        for run in sorted(runs, key=lambda run: -self._model.copies(run.key)):
            slop = 1e-9 * run.end
            touched = (table == run.table) & (end > run.begin + slop) & (begin < run.end - slop)
            if run.key is not None:
                owner.extend(touched.nonzero()[0].tolist())
                keys.extend([run.key] * (len(owner) - len(keys)))
                brought.extend([run.loads] * (len(owner) - len(brought)))
        for candidate in (-2, -1):
            which, off_keys, loads = self._model.off_gpu(self._segments, candidate)
            owner.extend(which.tolist())
            keys.extend(off_keys)
            brought.extend(loads)
        return owner, keys, np.array(brought).reshape(-1, self._num_times)

    def _top_basis(self, used: np.ndarray) -> list[int]:
        """Slack for every time and memory row, but a time where a row decides it."""
        basis = list(range(self._top))
        rows = self._model.times
        over = used[: self._num_times] - self._rhs[: self._num_times]
        waits = self._model.waits(over)
        last = len(waits) - 1
        for index, wait in enumerate(waits.tolist()):
            if index == last:
                over = over + rows[:, :last] @ waits[:last]
            deciding = (rows[:, index] < 0).nonzero()[0]
            if wait > 0:
                basis[int(deciding[over[deciding].argmax()])] = self._top + index
        return basis

    # --- what was found ------------------------------------------------------------------

    def _shares(self) -> list[list[tuple[Key | None, float]]]:
        """For each segment the patterns it is kept after, and how much of it."""
        shares: list[list[tuple[Key | None, float]]] = [[] for _ in self._segments]
        for tag, value in self._simplex.solution():
            if isinstance(tag, tuple) and value > _NOTHING:
                shares[tag[0]].append((tag[1], value))
        return shares

    @property
    def mixed(self) -> np.ndarray:
        """Whether each segment is kept after more than one pattern."""
        return np.array([len(found) > 1 for found in self._shares()])

    def runs(self) -> list[Run]:
        """The optimum as runs of rows, each segment's shares one after another.

        Shares go beside equal neighbours, else from many copies to few.
        """
        shares = self._shares()
        begin, end = self._model.byte_range(self._segments)
        nothing = np.zeros(self._num_times)
        runs: list[Run] = []
        for index, (table, found) in enumerate(
            zip(self._segments[:, 0].tolist(), shares, strict=True)
        ):
            before = runs[-1].key if runs and runs[-1].table == table else None
            after = {key for key, _ in shares[index + 1]} if index + 1 < len(shares) else set()
            found.sort(key=lambda share: self._rank(share[0], before, after))
            total, done = sum(value for _, value in found), 0.0
            for key, value in found:
                first = begin[index] + (end[index] - begin[index]) * done / total
                done += value
                last = begin[index] + (end[index] - begin[index]) * done / total
                if runs and runs[-1].table == table and runs[-1].key == key:
                    first = runs.pop().begin
                loads = nothing if key is None else self._loads[table, key]
                runs.append(Run(table, key, loads, float(first), float(last)))
        return runs

    def _rank(
        self, key: Key | None, before: Key | None, after: set[Key | None]
    ) -> tuple[bool, bool, bool, float]:
        return (key is None, key != before, key in after, -self._model.copies(key))
