"""Notebooks run from top to bottom, and print what is kept under their cells."""

from __future__ import annotations

import re

import dgl
import pytest
import torch

from tests.docs.notebooks import NOTEBOOKS, kept, read, run

#: Figures of training differ between processors and numbers of threads.
CLOSE = 0.1


def same(printed: str, expected: str) -> bool:
    """Whether two texts are the same but for fractions that are close."""
    number = r"\d+\.\d+"
    if re.split(number, printed) != re.split(number, expected):
        return False
    pairs = zip(re.findall(number, printed), re.findall(number, expected), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=CLOSE, abs=CLOSE) for a, b in pairs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        for cell, printed in run(path):
            assert same(printed, kept(cell)), f"{''.join(cell['source'])}\nprints\n{printed}"
    dgl.seed(0)
    assert list(tmp_path.iterdir()) == []


def test_there_are_notebooks_that_begin_with_a_title_and_print_something():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        first, *cells = read(path)["cells"]
        assert first["cell_type"] == "markdown" and first["source"][0].startswith("# ")
        assert any(kept(cell) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("accuracy 0.50", "accuracy 0.91"), ("3 rows", "4 rows"), ("a 0.91", "b 0.91"), ("", "1.0")],
)
def test_another_text_or_figure_is_noticed(printed, expected):
    assert not same(printed, expected)
