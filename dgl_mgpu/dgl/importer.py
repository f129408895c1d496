"""The import hook: acts when modules of DGL, ogb or Hydra are first imported, and never before.

A finder at the head of `sys.meta_path` lets the ordinary finders locate a module, and applies the
registry around its execution.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dgl_mgpu.dgl.environment import check_environment
from dgl_mgpu.dgl.ffi import STAND_INS
from dgl_mgpu.dgl.graphbolt.loading import GraphBoltLoader, already_loaded
from dgl_mgpu.dgl.graphbolt.loading import load as load_graphbolt
from dgl_mgpu.dgl.libraries import dgl_works_by_itself, graphbolt_works_by_itself, uses_libdgl
from dgl_mgpu.dgl.registry import REPLACEMENTS, SURROUNDINGS, Replacement, applies
from dgl_mgpu.graph.originals import originals

_TARGETS = {entry.module for entry in REPLACEMENTS} | {entry.module for entry in SURROUNDINGS}
_GRAPHBOLT = "dgl.graphbolt"
#: Those that have modules to mend.
PACKAGES = {target.partition(".")[0] for target in _TARGETS}


class CompatFinder:
    """Meta-path finder for the modules that the registry names."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages  # to mend, of `PACKAGES`

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        if name == "dgl":
            check_environment("dgl")
        if name.startswith(f"{_GRAPHBOLT}."):
            load_graphbolt(sys.modules[_GRAPHBOLT])
            if name in sys.modules:
                return already_loaded(sys.modules[name], name)
        if name in STAND_INS and not uses_libdgl():
            return already_loaded(importlib.import_module(_stand_in(name)), name)
        if name not in ("dgl", _GRAPHBOLT) and name not in _TARGETS:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        if name == _GRAPHBOLT:
            if not graphbolt_works_by_itself(Path(sys.modules["dgl"].__path__[0])):
                assert spec.loader is not None
                spec.loader = GraphBoltLoader(spec.loader)  # type: ignore[arg-type]
            return spec
        if name == "dgl" and spec.origin and dgl_works_by_itself(Path(spec.origin).parent):
            self.packages.discard("dgl")
        elif name in _TARGETS:
            _mend_on_execution(name, spec.loader)
        return spec


def _stand_in(name: str) -> str:
    return f"{__package__}.ffi.{name.rpartition('.')[2]}"


def _mend_on_execution(name: str, loader: Any) -> None:
    """Make `loader` execute the module inside its surroundings and then replace its names.

    Only ``exec_module`` of this one instance is replaced.
    """
    execute: Callable[[ModuleType], None] = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with ExitStack() as stack:
            for entry in SURROUNDINGS:
                if entry.module == name and applies(entry):
                    stack.enter_context(implementation(entry.by)())
            execute(module)
        replace_names(module)

    loader.exec_module = exec_module


def implementation(by: str) -> Any:
    """The object that an entry of the registry names as ``"module:name"`` in `patches`."""
    module, _, name = by.partition(":")
    return getattr(importlib.import_module(f"{__package__}.patches.{module}"), name)


def replace_names(module: ModuleType) -> None:
    """Apply every replacement whose target lies in `module`, once."""
    for entry in REPLACEMENTS:
        if entry.module == module.__name__ and applies(entry):
            owner, name = place(module, entry)
            replacement, present = implementation(entry.by), vars(owner)[name]
            if present is not replacement:
                originals[entry.target] = present
                setattr(owner, name, replacement)


def place(module: ModuleType, entry: Replacement) -> tuple[Any, str]:
    """The module, or the class in it, that has the replaced name, and the name."""
    *classes, name = entry.target.partition(":")[2].split(".")
    return functools.reduce(getattr, classes, module), name
