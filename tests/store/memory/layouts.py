"""Plans written by hand, so that the store is tested apart from the solver."""

from __future__ import annotations

from dgl_mgpu.placement import HOST, Plan, TablePlan, Tier


def partitioned(start: int, stop: int, num_ranks: int) -> Tier:
    """Each rank holds one partition."""
    return Tier(
        start, stop, "gpu", num_ranks,
        tuple((rank,) for rank in range(num_ranks)),
        tuple(tuple(range(num_ranks)) for _ in range(num_ranks)),
    )  # fmt: skip


def replicated(start: int, stop: int, num_ranks: int) -> Tier:
    """Each rank holds everything."""
    every = tuple(range(num_ranks))
    return Tier(start, stop, "gpu", 1, (every,), tuple((rank,) for rank in every))


def single(start: int, stop: int, memory: str, num_ranks: int) -> Tier:
    """Host memory or disk."""
    return Tier(start, stop, memory, 1, ((),), tuple((HOST,) for _ in range(num_ranks)))  # type: ignore[arg-type]


def plan_of(num_ranks: int, tables: dict[str, list[Tier]]) -> Plan:
    """A plan of the given tiers, without budgets."""
    return Plan(
        topology="by hand",
        num_gpus=num_ranks,
        policy="by hand",
        tables={name: TablePlan(name, tuple(tiers)) for name, tiers in tables.items()},
        gpu_budget=(0,) * num_ranks,
        host_budget=0,
        disk_budget=0,
        gpu_bytes=(0,) * num_ranks,
        host_bytes=0,
        disk_bytes=0,
        seconds=(0.0,) * num_ranks,
        hit_rates={},
    )


def four_tiers(num_rows: int, num_ranks: int) -> list[Tier]:
    """Replicated, partitioned, host and disk, in uneven shares."""
    a, b, c = num_rows // 7, num_rows // 2, num_rows - num_rows // 5
    tiers = [
        replicated(0, a, num_ranks),
        partitioned(a, b, num_ranks),
        single(b, c, "host", num_ranks),
        single(c, num_rows, "disk", num_ranks),
    ]
    return [tier for tier in tiers if tier.start < tier.stop]
