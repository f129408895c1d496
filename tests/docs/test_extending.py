"""docs/extending.md: its examples, done to a copy of the project, work."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import EXTENDING, ROOT, blocks
from tests.environment import search_path

_COPIED = ("dgl_mgpu", "configs", "kernels", "tests", "pyproject.toml")
#: A test in the copy, of the page's commands. Training itself would take a minute, which is mostly
#: Numba's: the model does a step instead.
_TRY = """
import dgl
import torch
from dgl_mgpu.cli import main
from dgl_mgpu.train.compose import compose
from dgl_mgpu.models.homogeneous import build_model

def test_commands():
    for command, *words in {commands}:
        if command == "plan":
            assert main([command, *words]) == 0
            continue
        model = build_model(compose(words).model, num_features=8, num_classes=3, num_layers=2)
        model(dgl.rand_graph(20, 90), {{"feat": torch.randn(20, 8)}}).sum().backward()
"""


def test_the_examples_work(tmp_path):
    """What the page tests is run in the copy, in one process, since most of it is to start one."""
    tests = extend(tmp_path)
    shell = [block.code for block in blocks(EXTENDING) if block.language == "bash"]
    commands = [shlex.split(line)[1:] for code in shell for line in code.splitlines()]
    assert tests and commands
    (tmp_path / "tests" / "test_commands.py").write_text(_TRY.format(commands=commands))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *tests, "tests/test_commands.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search_path(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def extend(copy: Path) -> list[str]:
    """Make a copy of the project with the page's files and changes; return the files of tests."""
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name)  # with what Numba has compiled
        else:
            shutil.copy(ROOT / name, copy / name)
    tests = []
    for block in blocks(EXTENDING):
        if block.language == "diff":
            done = subprocess.run(
                ["git", "apply", "-C1", "-"],
                input=block.code,
                text=True,
                cwd=copy,
                capture_output=True,
            )
            assert done.returncode == 0, f"{EXTENDING}:{block.line}: {done.stderr}"
        elif block.file:
            path = copy / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.code)
            tests += [block.file] if block.file.startswith("tests/") else []
    return tests
