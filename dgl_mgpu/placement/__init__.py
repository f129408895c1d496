"""Where each row goes: hotness, partition, cost model and solver; plain arithmetic."""

from .hotness import RowOrder, count_accesses, order_by_hotness
from .partition import locate, part_sizes, position_of
from .plan import HOST, Plan, TablePlan, Tier
from .solver import POLICIES, solve
from .table import TableSpec

__all__ = [
    "HOST",
    "POLICIES",
    "Plan",
    "RowOrder",
    "TablePlan",
    "TableSpec",
    "Tier",
    "count_accesses",
    "locate",
    "order_by_hotness",
    "part_sizes",
    "position_of",
    "solve",
]
