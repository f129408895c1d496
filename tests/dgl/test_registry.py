"""Every entry of the registry is in force, and fits what it replaces."""

from __future__ import annotations

import importlib
import inspect
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import pytest
import torch

from dgl_mgpu.dgl import importer, registry
from dgl_mgpu.dgl.environment import VersionRange
from dgl_mgpu.dgl.importer import implementation
from dgl_mgpu.dgl.patches.backend.pytorch import sparse as autocast
from dgl_mgpu.dgl.registry import REPLACEMENTS, SURROUNDINGS, Replacement, applies
from dgl_mgpu.graph.originals import originals
from dgl_mgpu.utils.late_imports import LateName

#: How many arguments there are where the original does not tell: the other two of `where` make it
#: another function, and `from_numpy`, `ones` and `range` are C functions of torch.
ARGUMENTS = {"where": 1, "from_numpy": 1, "ones": 2, "range": 4}

#: Parts of ogb that import packages which neither DGL nor this package needs.
NEEDS_MORE = ("_pyg", "lsc.")


#: Implementations that several modules share stand in the nearest package that has them all.
SHARED = {"sampling:backend_for_samplers", "data:backend_for_files", "ogb:torch_for_ogb"}


def import_target(entry: Replacement) -> ModuleType:
    try:
        return importlib.import_module(entry.module)
    except ImportError as error:
        if any(mark in entry.module for mark in NEEDS_MORE):
            pytest.skip(f"{entry.module}: {error}")
        raise


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter; annotations may differ."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize("entry", REPLACEMENTS, ids=lambda e: e.target)
def test_replacement_is_in_force_with_the_signature_of_what_it_replaces(entry):
    if not applies(entry):
        pytest.skip("not for the installed versions")
    module = import_target(entry)
    replacement, original = implementation(entry.by), originals[entry.target]
    owner, name = importer.place(module, entry)
    assert vars(owner)[name] is replacement
    if isinstance(original, LateName):
        original = original.load()
    if isinstance(original, ModuleType):
        replaced = {n: f for n, f in vars(replacement).items() if inspect.isfunction(f)}
        for name, function in replaced.items():
            if name in ARGUMENTS:
                assert len(parameters(function)) == ARGUMENTS[name]
                continue
            assert parameters(function) == parameters(getattr(original, name)), name
    elif inspect.isclass(original):
        methods = [n for n in vars(original) if inspect.isroutine(getattr(original, n))]
        for name in methods:
            assert parameters(getattr(replacement, name)) == parameters(getattr(original, name))
        assert replacement.__mro__[1:] == original.__mro__[1:]
    elif callable(original):
        expected = parameters(original)
        # Keywords of later versions may come in addition.
        added = [p for p in parameters(replacement) if p not in expected]
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in added)
        assert [p for p in parameters(replacement) if p in expected] == expected


@pytest.mark.parametrize(
    "entry", [*REPLACEMENTS, *SURROUNDINGS], ids=lambda e: getattr(e, "target", e.by)
)
def test_every_override_stands_in_the_file_that_mirrors_its_target(entry):
    folder = importlib.import_module("dgl_mgpu.dgl.patches").__path__[0]
    module, _, _ = entry.by.partition(":")
    mirror = entry.module.removeprefix("dgl.")
    if entry.by in SHARED:
        assert mirror.startswith(f"{module}.")
        mirror = module
    assert module == mirror
    is_package = importlib.util.find_spec(entry.module).submodule_search_locations is not None
    path = Path(folder, *module.split("."))
    if entry.by not in SHARED:
        assert (path / "__init__.py" if is_package else path.with_suffix(".py")).is_file()


@pytest.mark.parametrize("entry", SURROUNDINGS, ids=lambda e: e.module)
def test_surrounding_is_a_context_manager_for_a_module_that_exists(entry):
    assert importlib.util.find_spec(entry.module) is not None
    with implementation(entry.by)():
        pass


@pytest.mark.parametrize(
    "entry", [*REPLACEMENTS, *SURROUNDINGS], ids=lambda e: getattr(e, "target", e.by)
)
def test_every_entry_says_why_and_for_which_versions(entry):
    assert len(entry.reason) > 20
    assert entry.versions


def test_an_entry_applies_only_where_all_its_versions_hold(monkeypatch):
    entry = Replacement(
        "m:n", "x:y", (VersionRange("a", "1", "2"), VersionRange("b", "3", "4")), ""
    )
    for versions, expected in (
        ({"a": "1.5", "b": "3.0"}, True),
        ({"a": "2.0", "b": "3.0"}, False),
        ({"a": "1.5", "b": "2.9"}, False),
        ({"a": "1.5", "b": None}, False),
    ):
        monkeypatch.setattr(registry, "installed_version", versions.__getitem__)
        assert applies(entry) is expected


@pytest.mark.parametrize("holds", [True, False])
def test_names_are_replaced_only_where_the_versions_hold(monkeypatch, holds):
    """Any name of the package will do in the place of an override."""
    version = VersionRange("python", "3" if holds else "4", "5")
    entry = Replacement("target_module:name", "core:invoke_edge_udf", (version,), "a test")
    monkeypatch.setattr(importer, "REPLACEMENTS", (entry,))
    module = ModuleType("target_module")
    module.name = before = object()
    importer.replace_names(module)
    assert (module.name is implementation(entry.by)) is holds
    assert (module.name is before) is not holds
    assert (originals.pop(entry.target, None) is before) is holds


@pytest.fixture
def cuda_autocast():
    """CUDA autocast switched on; the switch needs no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)


@pytest.mark.filterwarnings("error")
def test_sparse_operators_run_under_cuda_autocast_without_a_warning(cuda_autocast):
    import dgl

    g = dgl.graph(([0, 1], [1, 0]))
    x = torch.ones(2, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")  # no GPU here
        out = dgl.ops.copy_u_sum(g, x)
    assert out.dtype == torch.float32  # CPU tensors are not cast by CUDA autocast
    assert torch.is_autocast_enabled("cuda")


def test_autocast_casts_what_torch_casts(cuda_autocast, monkeypatch):
    # Without a GPU, tensors on the meta device stand for those on it.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.is_meta))
    single, double, ids = (
        torch.empty(2, dtype=dtype, device="meta")
        for dtype in (torch.float32, torch.float64, torch.int64)
    )
    cast = autocast._cast_if_autocast_enabled("graph", single, double, ids, None, [single])
    assert cast[0] == "graph" and cast[4] is None
    assert cast[1].dtype == cast[5][0].dtype == torch.bfloat16
    assert cast[2] is double and cast[3] is ids


def test_autocast_changes_nothing_when_it_is_off():
    args = (torch.ones(2), None)
    assert autocast._cast_if_autocast_enabled(*args) == args
