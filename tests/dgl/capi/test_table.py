"""The table of C functions against the installed wheel and against DGL's Python."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl._ffi.function import list_global_func_names
from dgl._ffi.runtime_ctypes import DGLContext
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.dgl.capi.table import (
    ENTRIES,
    GRAPHBOLT_ENTRIES,
    TAKE_HOST_GRAPHS,
    Implementation,
    coverage_report,
)
from dgl_mgpu.graph import creation
from dgl_mgpu.graph.index import TensorIndex

SERVED = {name: entry for name, entry in ENTRIES.items() if entry.by}


def implementation(by: str) -> Any:
    module, _, name = by.partition(":")
    return attrgetter(name)(importlib.import_module(f"dgl_mgpu.{module}"))


def test_the_table_has_the_functions_of_the_wheel_and_no_others():
    names = {name for name in list_global_func_names() if "._CAPI_" in name}
    assert names - ENTRIES.keys() == set()
    assert ENTRIES.keys() - names == set()


def test_the_table_has_the_functions_of_graphbolt():
    from dgl_mgpu.dgl.graphbolt.operators import OPERATORS

    operators = vars(OPERATORS)
    assert GRAPHBOLT_ENTRIES.keys() == operators.keys()
    for name, entry in GRAPHBOLT_ENTRIES.items():
        assert not entry.by or implementation(entry.by) is operators[name]
        assert f"graphbolt.{name} " in coverage_report()


def test_every_entry_says_by_what_or_why():
    for name, entry in (ENTRIES | GRAPHBOLT_ENTRIES).items():
        if entry.implementation in (Implementation.NATIVE, Implementation.TORCH):
            assert entry.by and not entry.reason, name
        else:
            assert entry.reason and not entry.by, name


@pytest.mark.parametrize("name", SERVED)
def test_what_an_entry_names_is_there(name):
    assert callable(implementation(SERVED[name].by))


def test_modules_that_take_host_graphs_are_in_the_table():
    assert {entry.by.partition(":")[0] for entry in SERVED.values()} >= TAKE_HOST_GRAPHS


def test_a_graph_in_host_memory_is_copied_to_a_gpu(monkeypatch):
    # There is none here: what stands for it is the CPU, with the graph made of tensors there too.
    cpu = torch.device("cpu")
    monkeypatch.setattr(creation.F, "to_backend_ctx", lambda context: cpu)
    g = dgl.graph(([0, 1, 1], [2, 2, 0]), num_nodes=4)
    copied = g._graph.copy_to(DGLContext(2, 0))
    assert isinstance(copied, TensorIndex)
    assert [each.tolist() for each in copied.edges(0)[:2]] == [[0, 1, 1], [2, 2, 0]]


def _namespaces(tree: ast.Module) -> list[str]:
    """Whose functions a module of DGL binds, by its calls of ``_init_api``."""
    return [
        node.args[0].value.removeprefix("dgl.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "_init_api"
        and isinstance(node.args[0], ast.Constant)
    ]


def _calls() -> Iterator[tuple[str, str, int]]:
    """Full name, file with line, and number of arguments of every call in DGL's Python."""
    root = Path(dgl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "_CAPI_" not in text:
            continue
        tree = ast.parse(text)
        namespaces = _namespaces(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            # Also `obj.__init_handle_by_constructor__(_CAPI_…, arguments)`.
            for place, part in enumerate((node.func, *node.args[:1])):
                name = getattr(part, "attr", getattr(part, "id", ""))
                arguments = node.args[place:]
                if not name.startswith("_CAPI_") or any(
                    isinstance(argument, ast.Starred) for argument in arguments
                ):
                    continue
                for namespace in namespaces:
                    if f"{namespace}.{name}" in ENTRIES:
                        where = f"{path.relative_to(root)}:{node.lineno}"
                        yield f"{namespace}.{name}", where, len(arguments)


CALLS = sorted({(name, count, where) for name, where, count in _calls() if name in SERVED})


def test_calls_of_most_served_functions_were_found():
    """Otherwise the next test checks nothing."""
    assert len({name for name, _, _ in CALLS}) > 0.9 * len(SERVED)


@pytest.mark.parametrize(("name", "count", "where"), CALLS)
def test_an_implementation_takes_what_dgl_passes(name, count, where):
    inspect.signature(implementation(SERVED[name].by)).bind(*range(count))


OVERRIDDEN = [
    name
    for name, member in vars(HeteroGraphIndex).items()
    if inspect.isfunction(member) and name in vars(TensorIndex) and not name.startswith("__")
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_of_tensor_index_has_the_parameters_of_dgls(name):
    ours, theirs = (
        list(inspect.signature(getattr(owner, name)).parameters.values())
        for owner in (TensorIndex, HeteroGraphIndex)
    )
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
