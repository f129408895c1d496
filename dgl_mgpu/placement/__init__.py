"""Where each row goes: hotness, partition, cost model and solver; plain arithmetic."""

from dgl_mgpu.placement.hotness import (
    Degrees,
    Reads,
    RowOrder,
    expected_reads,
    load_accesses,
    minibatch_reads,
    order_by_hotness,
    save_accesses,
)
from dgl_mgpu.placement.plan import (
    HOST,
    Load,
    MachineShare,
    Plan,
    TablePlan,
    Tier,
    locate,
    part_sizes,
    position_of,
)
from dgl_mgpu.placement.solver import POLICIES, solve
from dgl_mgpu.placement.table_spec import TableSpec

__all__ = [
    "HOST",
    "POLICIES",
    "Degrees",
    "Load",
    "MachineShare",
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
