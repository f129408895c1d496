"""Names of torch, Numba, CuPy and Hydra in the package's code that are not public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("torch", "numba", "cupy", "hydra", "argparse")
#: Without an underscore, but not public.
INTERNAL = ("numba.core",)


def private_names(folder: Path) -> dict[str, set[str]]:
    """Each name with the files that have it, relative to the folder."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for name in _names(ast.parse(path.read_text())):
            found.setdefault(name, set()).add(str(path.relative_to(folder)))
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    nodes = list(_walk(tree))
    parts = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        dotted = []
        if isinstance(node, ast.ImportFrom) and node.module:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in parts:
            dotted = [ast.unparse(node)]
        yield from filter(_is_private, dotted)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it that is executed."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _walk(child)


def _is_private(name: str) -> bool:
    library, *rest = name.split(".")
    if library not in LIBRARIES or not name.replace(".", "").isidentifier():
        return False
    return name.startswith(INTERNAL) or any(
        part.startswith("_") and not part.startswith("__") for part in rest
    )
