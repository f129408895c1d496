"""Code on the pages runs, and commands there name what there is.

A page's Python blocks run in order, as one program, in a folder of their own, but for those after
a comment ``<!-- not run: WHY -->``, ``<!-- needs a GPU -->`` or, where it is not installed,
``<!-- needs PACKAGE -->``, which must compile. A block of text
that is the next one after Python is what that prints. Diffs must apply to a block whose first line
is a file's name: ``# script.py``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import subprocess

import dgl
import pytest
import torch
import yaml

from dgl_mgpu.__main__ import take_options
from dgl_mgpu.utils.extras import is_installed
from tests.docs.commands import check_command
from tests.docs.pages import EXTENDING, PAGES, ROOT, Block, blocks

RUN = [
    pytest.param(page, id=str(page.relative_to(ROOT)))
    for page in PAGES
    if page != EXTENDING and any(block.language == "python" for block in blocks(page))
]


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """A folder of its own to work in, and torch's generators as they were, afterwards."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield tmp_path
    dgl.seed(0)


def is_run(block: Block) -> bool:
    """Whether this environment has all that a block needs."""
    if block.package is not None:
        return is_installed(block.package)
    return not block.not_run


@pytest.mark.parametrize("page", RUN)
def test_python_runs(page, in_a_folder):
    names: dict = {"__name__": "__main__"}
    every = blocks(page)
    code = [block for block in every if block.language == "python"]
    for block, following in itertools.zip_longest(every, every[1:]):
        if block.language != "python":
            continue
        program = compile("\n" * block.line + block.code, str(page), "exec")
        if not is_run(block):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        if following and following.language == "text":
            assert printed.getvalue() == following.code, f"{page}:{following.line}"
    if not any(map(is_run, code)):
        pytest.skip("; ".join(dict.fromkeys(block.not_run for block in code)))


@pytest.mark.parametrize("page", RUN)
def test_diffs_apply(page, in_a_folder):
    if not any(block.language == "diff" for block in blocks(page)):
        return
    for block in blocks(page):
        if block.language == "python" and block.file:
            (in_a_folder / block.file).write_text(block.code)
        elif block.language == "diff":
            apply = ["git", "apply", "-p0", "--unidiff-zero", "-"]
            done = subprocess.run(apply, input=block.code, text=True, capture_output=True)
            assert not done.stderr, f"{page}:{block.line}"
    for script in in_a_folder.glob("*.py"):
        compile(script.read_text(), str(script), "exec")


def commands(block: Block) -> list[str]:
    """The lines of a block of a shell, those that go on joined."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip()]


SHELL = [
    pytest.param(line, id=f"{page.relative_to(ROOT)}: {line.strip()[:60]}")
    for page in PAGES
    for block in blocks(page)
    if page != EXTENDING and block.language in ("bash", "console", "sh")
    for line in commands(block)
]


@pytest.mark.parametrize("line", SHELL)
def test_commands_are_there(line, in_a_folder):
    check_command(line, in_a_folder)


@pytest.mark.parametrize(
    "line",
    [
        "dgl-mgpu trian",
        "dgl-mgpu train trainer.epcohs=3",
        "dgl-mgpu plan topology=dgx1 modle=gcn",
        "dgl-mgpu topology dgx9",
        "dgl-mgpu doctor --all",
        "make tea",
        "X=1 python -m dgl_mgpu --store.gpu-memroy=1GiB script.py",
        "python -m dgl_mgpu --store=on",
        "python -m benchmarks.nothing",
    ],
)
def test_wrong_commands_are_found(line, in_a_folder):
    with pytest.raises((AssertionError, ValueError)):
        check_command(line, in_a_folder)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}")
        for page in PAGES
        for block in blocks(page)
        if page != EXTENDING and block.language == "yaml"
    ],
)
def test_yaml_is_a_configuration(block, in_a_folder):
    content = yaml.safe_load(block.code)
    if "store" in content:
        (in_a_folder / "config.yaml").write_text(block.code)
        options, _ = take_options(["--config", "config.yaml", "script.py"])
        assert options.store
