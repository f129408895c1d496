"""Imports between rooms go down only, in the order in which docs/architecture.md draws them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
#: Of modules at the top, which are drawn nowhere: what users import and run.
ENTRIES = {"dgl_mgpu", "dgl_mgpu.__main__", "dgl_mgpu.dgl.child.sitecustomize"}


def drawn(first: str) -> list[str]:
    """Rooms from the top down, as the page has them in the block that begins with one."""
    block = re.search(rf"```text\n({re.escape(first)} .*?)```", ARCHITECTURE, re.DOTALL)
    assert block
    return re.findall(r"^(\w+)(?:/|\.py) ", block[1], re.MULTILINE)


def modules() -> dict[str, Path]:
    """All of the package, by dotted name."""
    found = {}
    for path in (ROOT / "dgl_mgpu").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: set[str]) -> Iterator[str]:
    """Modules of the package that a module imports, also within its functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            origin = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield from {inner if inner in known else origin} & known


def test_imports_go_down():
    house = "dgl_mgpu"
    level = {room: number for number, room in enumerate(drawn("cli.py"))}
    known = modules()

    def room(name: str) -> str:
        return name.removeprefix(f"{house}.").partition(".")[0]

    within = {name for name in known if name.startswith(f"{house}.") and name not in ENTRIES}
    missing = {room(name) for name in within} - level.keys()
    assert not missing, f"draw {missing} in docs/architecture.md"
    assert not level.keys() - {room(name) for name in within}
    up = [
        f"{name} imports {other}"
        for name in sorted(within)
        for other in imported(name, known[name], set(known))
        if other == house or (other in within and level[room(other)] < level[room(name)])
    ]
    assert up == []
