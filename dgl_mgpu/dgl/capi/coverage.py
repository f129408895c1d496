"""The table of C functions for people: ``dgl-mgpu doctor --coverage``."""

from __future__ import annotations

from collections import Counter

from dgl_mgpu.dgl.capi.table import ENTRIES, Implementation


def coverage_report() -> str:
    """Where each of DGL's C functions runs for graphs on a GPU, one a line, and a summary."""
    names = sorted(ENTRIES)
    width = max(map(len, names))
    lines = []
    for name in names:
        entry = ENTRIES[name]
        where = f"dgl_mgpu.{entry.by}" if entry.by else entry.reason
        lines.append(f"{name:<{width}}  {entry.implementation.value:<14}  {where}")
    counts = Counter(entry.implementation for entry in ENTRIES.values())
    lines.append(", ".join(f"{counts[kind]} {kind.value}" for kind in Implementation))
    return "\n".join(lines)
