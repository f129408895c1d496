"""The examples in the documentation of `dgl.sparse` print what they say."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
from typing import Any

import dgl
import dgl.sparse as dglsp
import pytest
import torch

#: Where DGL's text is no Python, or not what DGL does: what stands there, and what is meant.
MISTAKES = {
    "SparseMatrix.compact": [
        ("[[0, 2],\n" + 36 * " " + "[1, 2]]", "[[0, 2], [1, 2]]"),
        ("torch.Tensor([", "tensor(["),
        ("[0., 1., 0.],])", "[0., 1., 0.]])"),
    ],
    "SparseMatrix.float": [("len(row)", "indices.shape[1]")],
    "SparseMatrix.index_select": [("[0, 1, 1, 2, 3, 4]", "[[0, 1, 1, 2, 3, 4]")],
    "SparseMatrix.range_select": [("[0, 1, 1, 2, 3, 4]", "[[0, 1, 1, 2, 3, 4]")],
    "SparseMatrix.inv": [("[1., 2., 3.]", "[1.0000, 0.5000, 0.3333]")],
    "inv": [("[1., 2., 3.]", "[1.0000, 0.5000, 0.3333]")],
    "bspmm": [("len(row)", "indices.shape[1]")],
    "spspmm": [("len(row1)", "indices1.shape[1]"), ("len(row2)", "indices2.shape[1]")],
}
RANDOM = {"SparseMatrix.sample", "sddmm"}
ON_A_GPU = {"SparseMatrix.cpu", "SparseMatrix.cuda", "SparseMatrix.to"}


def documented() -> dict[str, Any]:
    functions = {
        name: function
        for name, function in vars(dglsp).items()
        if inspect.isfunction(function) and function.__module__.startswith("dgl.sparse")
    }
    methods = vars(dglsp.SparseMatrix).items()
    functions.update({f"SparseMatrix.{n}": f for n, f in methods if inspect.isfunction(f)})
    return {name: f for name, f in functions.items() if ">>>" in (f.__doc__ or "")}


def run(source: str, names: dict[str, Any]) -> str:
    """What an interpreter prints; for an assignment, what is assigned, as DGL's texts have it."""
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        try:
            value = eval(source, names)
        except SyntaxError:
            exec(source, names)
            value = names.get(source.partition(" = ")[0])
    return printed.getvalue() or repr(value)


def without_space(text: str) -> str:
    return "".join(text.split())


def test_all_functions_are_among_the_documented():
    assert len(documented()) > 60


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", sorted(documented()))
def test_examples(name):
    if name in RANDOM:
        pytest.skip("prints random numbers")
    if name in ON_A_GPU and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    text = documented()[name].__doc__
    for mistake, meant in MISTAKES.get(name, []):
        assert mistake in text
        text = text.replace(mistake, meant)
    names = {"torch": torch, "dglsp": dglsp, "dgl": dgl}
    for example in doctest.DocTestParser().get_examples(text):
        out = run(example.source, names)
        if example.want:
            assert without_space(out) == without_space(example.want), example.source
