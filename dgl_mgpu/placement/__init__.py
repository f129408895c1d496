"""Where each row goes: hotness, partition, cost model and solver; plain arithmetic."""

from .hotness import RowOrder, expected_reads, load_accesses, order_by_hotness, save_accesses
from .partition import locate, part_sizes, position_of
from .plan import HOST, Load, Plan, TablePlan, Tier
from .reads import Degrees, Reads, minibatch_reads
from .solver import POLICIES, solve
from .table import TableSpec

__all__ = [
    "HOST",
    "POLICIES",
    "Degrees",
    "Load",
    "Plan",
    "Reads",
    "RowOrder",
    "TablePlan",
    "TableSpec",
    "Tier",
    "expected_reads",
    "load_accesses",
    "locate",
    "minibatch_reads",
    "order_by_hotness",
    "part_sizes",
    "position_of",
    "save_accesses",
    "solve",
]
