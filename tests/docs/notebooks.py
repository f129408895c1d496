"""The notebooks of the docs: their cells run, and print what is kept under them.

``python -m tests.docs.notebooks`` runs all of them and keeps what they print.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    """A notebook as its JSON."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def kept(cell: dict[str, Any]) -> str:
    """What is kept as printed by a cell of code."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Run a notebook as one program in the current folder: each cell of code, and what it prints.

    Plain Python runs the cells: no magic, and nothing shown but what is printed.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(read(path)["cells"]):
        if cell["cell_type"] != "code":
            continue
        code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        yield cell, printed.getvalue()


def keep(path: Path) -> None:
    """Run a notebook and write what it prints into it."""
    notebook, printed = read(path), iter([text for _, text in run(path)])
    for number, cell in enumerate(notebook["cells"]):
        cell["id"] = f"cell-{number}"
        if cell["cell_type"] != "code":
            continue
        lines = next(printed).splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell |= {"execution_count": None, "outputs": [stream] if lines else []}
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            keep(notebook)
        print(f"wrote {os.path.relpath(notebook)}")
