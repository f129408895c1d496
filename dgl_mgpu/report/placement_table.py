"""A plan as text: where each table's rows lie, what the marks mean, and how long reads take."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import RenderableType

from dgl_mgpu.placement import Plan
from dgl_mgpu.report.placement import noun, short_name, verdict
from dgl_mgpu.report.tables import joined, plan_table

#: Characters in a line of a table's name; longer ones are broken between their parts.
_NAME_WIDTH = 20


def placement_tables(
    plan: Plan, title: str, seeds: int, fanouts: Sequence[int]
) -> list[RenderableType]:
    """What ``dgl-mgpu plan`` prints of a plan.

    Parameters
    ----------
    plan : Plan
    title : str
    seeds : int
        Nodes that the mini-batch of the modelled time starts from.
    fanouts : sequence of int
        And how many neighbours its layers draw.
    """
    rows, before = [], ""
    for row in plan.summary():
        name = str(row["table"])
        memory = noun(plan) if row["memory"] == "gpu" else row["memory"]
        # A name is said once, which leaves room for what is beside it.
        shown = "" if name == before else _in_lines(short_name(name))
        rows.append({**row, "table": shown, "memory": memory})
        before = name
    table = plan_table(rows, title)
    for column in table.columns:
        if column.header == "table":
            column.no_wrap = True
        elif column.header == "accesses":
            column.header = "reads"
    table.title_justify = "left"
    each = joined([f"{seconds * 1e3:.3g}" for seconds in plan.seconds])
    of_each = f" (ms of each: {each})" if plan.num_gpus > 1 else ""
    return [
        table,
        *_legend(plan),
        f"{verdict(plan)}{of_each}",
        f"a step: a mini-batch of {seeds:,} seeds with fanouts {list(fanouts)}",
    ]


def _legend(plan: Plan) -> list[str]:
    """What the marks mean that the table has."""
    name, rows = noun(plan), plan.summary()
    marks = " ".join(str(row["where"]) for row in rows)
    memories = {row["memory"] for row in rows}
    lines = []
    if "gpu" in memories and name == "rank":
        lines.append("rank: shared memory of the machine, of which each rank has a part")
    if "+" in marks:
        lines.append(f"0+1: {name}s 0 and 1 have a copy of each of these rows")
    if "|" in marks:
        lines.append(f"0 | 1: {name}s 0 and 1 share these rows out, each row on one of them")
    if "+" in marks and "|" in marks:
        lines.append("0+1 | 2+3: both, a half of the rows on 0 and 1, the other on 2 and 3")
    if "(and host)" in marks:
        lines.append(f"(and host): host memory has a copy too, for {name}s that reach no other")
    if "patterns" in marks:
        lines.append("2 patterns: some of these rows lie in one such way, the others in another")
    if "gpu" in memories:
        lines.append(
            f"copies: on how many {name}s each row is; bytes: of one copy; reads: their share"
        )
    return lines


def _in_lines(name: str) -> str:
    """A long name with breaks between its parts."""
    lines = [""]
    for part in re.findall(r"[^/:]+[/:]?", name):
        if lines[-1] and len(lines[-1] + part) > _NAME_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
