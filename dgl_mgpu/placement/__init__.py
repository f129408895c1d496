"""Where each row goes: hotness, partition, cost model and solver; plain arithmetic."""

from .hotness import RowOrder, expected_reads, load_accesses, order_by_hotness, save_accesses
from .partition import locate, part_sizes, position_of
from .plan import HOST, Load, Plan, TablePlan, Tier
from .solver import POLICIES, solve
from .table import TableSpec

__all__ = [
    "HOST",
    "POLICIES",
    "Load",
    "Plan",
    "RowOrder",
    "TablePlan",
    "TableSpec",
    "Tier",
    "expected_reads",
    "load_accesses",
    "locate",
    "order_by_hotness",
    "part_sizes",
    "position_of",
    "save_accesses",
    "solve",
]
