"""From tables, a machine and budgets to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dgl_mgpu.errors import ConfigError, InvalidInputError, PlanDoesNotFitError, nearest
from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.candidates import (
    AllSets,
    Candidates,
    FixedPatterns,
    find_automorphisms,
)
from dgl_mgpu.placement.column_generation import Solution, best_placement
from dgl_mgpu.placement.cost import Resources, estimate, table_load
from dgl_mgpu.placement.linear_program import LinearProgram
from dgl_mgpu.placement.plan import Plan, TablePlan, Tier
from dgl_mgpu.placement.policies import POLICIES, patterns_of
from dgl_mgpu.placement.rounding import excess_bytes, fit, simplify, whole_rows
from dgl_mgpu.placement.table_spec import TableSpec

Ratio = float | Literal["auto"] | None

# Share of all bytes that may stay unplaced: the linear program's rounding.
_NOTHING = 1e-7
# Rows reserved of each memory for rounding to whole rows, where that is next to nothing.
_ROUNDED_ROWS = 16
# Rows that are dealt out together, at least; and what to try where rounding spoilt a plan, which
# takes more than _ROUNDED_BADLY times the lower bound.
_CELL_ROWS = 8
_OTHER_CELL_ROWS = (1, 4, 16, 64)
_SIMPLER = ("xgnn", "clique_opt", "replicated", "host")
_ROUNDED_BADLY = 1.01
# Time over the lower bound that a readable plan may take in place of a patchwork.
_SIMPLE = 1.004


def solve(
    topology: Topology,
    tables: Sequence[TableSpec],
    policy: str = "auto",
    *,
    gpu_budget_bytes: int | Sequence[int] | None = None,
    graph_ratio: Ratio = None,
    feature_ratio: Ratio = None,
    host_budget: int | None = None,
    allow_disk: bool = False,
) -> Plan:
    """Decide where every row of every table lies and from which copy each GPU reads it.

    Parameters
    ----------
    topology : Topology
    tables : sequence of TableSpec
    policy : str
        One of :data:`~dgl_mgpu.placement.POLICIES`.
    gpu_budget_bytes : int or sequence of int, optional
        Bytes that the tables may take on each GPU; all of its memory by default.
    graph_ratio, feature_ratio : float in [0, 1], 'auto' or None
        Share of the rows (hottest first) of topology and feature tables to keep on GPUs, the
        others then being off them; ``'auto'`` or None leaves it to the solver.
    host_budget : int, optional
        Bytes of host memory; all of it by default.
    allow_disk : bool
        Whether rows may go to disk when host memory is full.

    Returns
    -------
    Plan

    Raises
    ------
    ConfigError
        If the policy is unknown or a ratio or budget out of range, or if rows must be on GPUs by
        the ratios and off them by the policy.
    UnreachableError
        If the policy needs links that the machine lacks.
    PlanDoesNotFitError
        If the rows, or as many as the ratios demand on GPUs, do not fit.
    """
    require_policy(policy)
    names = [table.name for table in tables]
    if not names or len(set(names)) != len(names):
        raise InvalidInputError(
            "solve a placement", f"the tables are {names}", "pass one table or more, each name once"
        )
    budgets = _budgets(topology, gpu_budget_bytes, host_budget, allow_disk)
    ratios = {
        "topology": read_ratio("graph_ratio", graph_ratio),
        "features": read_ratio("feature_ratio", feature_ratio),
    }
    if policy == "partitioned":
        ratios = {"topology": 1.0, "features": 1.0}
    if policy == "host" and any(ratios.values()):
        raise ConfigError(
            "keep rows on GPUs by the placement policy 'host'",
            f"graph_ratio is {graph_ratio} and feature_ratio {feature_ratio}",
            "leave the ratios out, or use the policy 'auto'",
        )
    plan, bound = _Problem(topology, tables, policy, budgets, ratios).plan()
    limit = _ROUNDED_BADLY * bound
    # With few rows, or one row that is much of the whole, dealing them out is far from what the
    # linear program assumes: another granularity or a simpler policy may be better.
    others = [(policy, rows, limit) for rows in _OTHER_CELL_ROWS]
    if policy == "auto":
        others += [(name, _CELL_ROWS, np.inf) for name in _SIMPLER]
    for name, rows, good_seconds in others:
        if plan.step_seconds <= limit:
            break
        other = _Problem(topology, tables, name, budgets, ratios, rows, good_seconds)
        if other.fits():
            plan = min(plan, other.plan()[0], key=lambda plan: plan.step_seconds)
    return replace(plan, policy=policy)


@dataclass
class _Problem:
    """One call of :func:`solve`, its arguments checked.

    More room than rounding needs is tried until a plan takes at most ``good_seconds``.
    """

    topology: Topology
    tables: Sequence[TableSpec]
    policy: str
    budgets: np.ndarray
    ratios: Mapping[str, float | None]
    cell_rows: int = _CELL_ROWS
    good_seconds: float = np.inf

    def __post_init__(self) -> None:
        self._resources = Resources.of(self.topology)
        n = self.topology.num_gpus
        self._candidates: Candidates
        if self.policy == "auto":
            self._automorphisms = find_automorphisms(self.topology, self.budgets[:n].tolist())
            self._candidates = AllSets(self.topology, self._automorphisms)
        else:
            self._automorphisms = np.arange(n)[None]
            self._candidates = FixedPatterns(patterns_of(self.policy, self.topology), n)

    def plan(self) -> tuple[Plan, float]:
        """The plan, in whole rows, and the seconds that no plan by these candidates beats."""
        specs, tiers, solution = self._placed
        if tiers is None:
            raise self._does_not_fit(solution.overflow)
        tiers = self._simplify(specs, tiers, _SIMPLE * solution.lower_bound)
        tables = {name: TablePlan(name, tuple(table)) for name, table in tiers.items()}
        n = self.topology.num_gpus
        gpu_budget, (host_budget, disk_budget) = self.budgets[:n], self.budgets[n:]
        plan = Plan(
            topology=self.topology.name,
            num_gpus=n,
            policy=self.policy,
            tables=tables,
            gpu_budget=tuple(int(budget) for budget in gpu_budget),
            host_budget=int(host_budget),
            disk_budget=int(disk_budget),
            **vars(estimate(self._resources, specs, tables)),
        )
        return plan, solution.lower_bound

    def fits(self) -> bool:
        """Whether everything fits."""
        return self._placed[1] is not None

    @cached_property
    def _placed(self) -> tuple[list[TableSpec], dict[str, list[Tier]] | None, Solution]:
        return self._place(self.budgets, self.ratios)

    def _seconds(self, specs: list[TableSpec], tiers: Mapping[str, list[Tier]]) -> float:
        """Time of the slowest GPU."""
        loads = [table_load(self._resources, spec, tiers[spec.name]) for spec in specs]
        return float(self._resources.gpu_seconds(np.sum(loads, axis=0)).max())

    def _simplify(
        self, specs: list[TableSpec], tiers: dict[str, list[Tier]], limit: float
    ) -> dict[str, list[Tier]]:
        """The tiers in a readable form, table by table where that keeps the time below a limit."""
        for spec in specs:
            simple = {**tiers, spec.name: simplify(spec, tiers[spec.name])}
            if (
                len(simple[spec.name]) < len(tiers[spec.name])
                and self._seconds(specs, simple) <= limit
                and (excess_bytes(self.budgets, specs, simple) <= 0).all()
            ):
                tiers = simple
        return tiers

    def _place(
        self, budgets: np.ndarray, ratios: Mapping[str, float | None]
    ) -> tuple[list[TableSpec], dict[str, list[Tier]] | None, Solution]:
        """Tables, their tiers if everything fits, and the solution that these realize."""
        row_bytes = sum(table.total_bytes / max(table.num_rows, 1) for table in self.tables)
        reserve = _ROUNDED_ROWS * row_bytes
        next_to_nothing = np.where(reserve < 1e-3 * budgets, reserve, 0.0)
        best, seconds = None, np.inf
        for keep in (next_to_nothing, 0.0, reserve, 8 * reserve, 64 * reserve, 512 * reserve):
            specs, program, solution = self._solve(np.maximum(budgets - keep, 0.0), ratios)
            if solution.overflow <= _NOTHING * sum(spec.total_bytes for spec in specs):
                may_leave = [ratios[spec.kind] is None for spec in specs]
                for more_copies in (False, True):
                    tiers = whole_rows(specs, program, solution.row_ranges, more_copies)
                    if not fit(specs, tiers, budgets, may_leave):
                        continue
                    if (time := self._seconds(specs, tiers)) < seconds:
                        best, seconds = (specs, tiers, solution), time
                if best and seconds <= max(self.good_seconds, solution.lower_bound):
                    break
            elif np.all(keep == 0.0):  # less room will not help
                break
        return best or (specs, None, solution)

    def _solve(
        self, budgets: np.ndarray, ratios: Mapping[str, float | None]
    ) -> tuple[list[TableSpec], LinearProgram, Solution]:
        specs: list[TableSpec] = []
        cuts: list[int | None] = []
        for table in self.tables:
            ratio, cut = ratios[table.kind], None
            if ratio is not None:
                position = round(ratio * table.num_rows)
                table = table.with_breakpoint(position)
                cut = int(np.searchsorted(table.positions, position))
            specs.append(table)
            cuts.append(cut)
        program = LinearProgram(
            self._resources, specs, self._candidates, self._automorphisms, budgets, cuts
        )
        exact = self.policy != "auto" or len(self._automorphisms) == self.topology.num_gpus
        return specs, program, best_placement(program, exact, self.cell_rows)

    # --- when it does not fit ------------------------------------------------------------

    def _does_not_fit(self, overflow: float) -> PlanDoesNotFitError:
        n = self.topology.num_gpus
        total = math.ceil(sum(table.total_bytes for table in self.tables))
        missing = f"{max(math.ceil(overflow), 1):,} bytes"
        action = f"place {total:,} bytes on '{self.topology.name}' by the policy '{self.policy}'"
        fixed = {kind: ratio for kind, ratio in self.ratios.items() if ratio is not None}
        if not fixed:
            return PlanDoesNotFitError(
                action, f"{missing} do not fit into all memories together",
                f"raise host_budget by {missing} or allow the disk",
                total, total - math.ceil(overflow),
            )  # fmt: skip
        scale, _ = _bisect(lambda share: self._fits(
            self.budgets, {kind: ratio and ratio * share for kind, ratio in self.ratios.items()}
        ))  # fmt: skip
        on_gpus = np.arange(n + 2) < n
        _, more = _bisect(lambda share: not self._fits(
            self.budgets + on_gpus * share * total, self.ratios
        ))  # fmt: skip
        budget = int(self.budgets[:n].min())
        needed = budget + math.ceil(more * total)
        names = {"topology": "graph_ratio", "features": "feature_ratio"}
        shares = ", ".join(
            f"{names[kind]}={math.floor(ratio * scale * 1e3) / 1e3}"
            for kind, ratio in fixed.items()
        )
        instead = "the policy 'auto'" if self.policy == "partitioned" else shares
        return PlanDoesNotFitError(
            action, f"{missing} do not fit: each GPU has {budget:,} bytes and needs {needed:,}",
            f"give {needed - budget:,} bytes more on each GPU, or use {instead}", needed, budget,
        )  # fmt: skip

    def _fits(self, budgets: np.ndarray, ratios: Mapping[str, float | None]) -> bool:
        return self._place(budgets, ratios)[1] is not None


def _bisect(holds: Callable[[float], bool]) -> tuple[float, float]:
    """Two shares in [0, 1], 1/1024 apart: ``holds`` is true up to the first, not at the second."""
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def require_policy(policy: str) -> None:
    """Raise ConfigError for a policy that is not known."""
    if policy not in POLICIES:
        raise ConfigError(
            f"use the placement policy '{policy}'",
            "there is no policy of this name",
            nearest(policy, POLICIES),
        )


def read_ratio(name: str, ratio: Ratio) -> float | None:
    """A share, None for 'auto', or ConfigError."""
    if ratio is None or ratio == "auto":
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ConfigError(
            f"use {name}={ratio!r}", "it is not in [0, 1]", "use a share in [0, 1], or 'auto'"
        )
    return float(ratio)


def _budgets(
    topology: Topology,
    gpu_budget: int | Sequence[int] | None,
    host_budget: int | None,
    allow_disk: bool,
) -> np.ndarray:
    """Bytes of each GPU, the host and the disk.  Shape (n + 2,)."""
    gpus = topology.gpu_memory if gpu_budget is None else np.asarray(gpu_budget)
    host = topology.host_memory if host_budget is None else host_budget
    disk = topology.disk_memory if allow_disk and topology.disk_bandwidth else 0
    if gpus.shape not in ((), (topology.num_gpus,)) or gpus.dtype.kind not in "iu":
        raise ConfigError(
            f"use gpu_budget_bytes={gpu_budget!r}",
            "it is neither a number of bytes nor one number for each GPU",
            f"pass one number of bytes, or {topology.num_gpus} of them",
        )
    budgets = np.array([*np.broadcast_to(gpus, topology.num_gpus), host, disk], np.float64)
    if (budgets < 0).any():
        raise ConfigError(
            "use budgets of GPU memory, host memory and disk",
            f"the budgets are {budgets.tolist()} bytes",
            "pass numbers >= 0",
        )
    if allow_disk and not topology.disk_bandwidth:
        raise ConfigError(
            "place rows on disk",
            f"the machine '{topology.name}' has no disk",
            "pass a topology with a disk_bandwidth",
        )
    return budgets
