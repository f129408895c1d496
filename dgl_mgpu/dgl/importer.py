"""The import hook: acts when DGL's or ogb's modules are first imported, and never before.

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

from dgl_mgpu.dgl.registry import REPLACEMENTS, SURROUNDINGS, UNAVAILABLE, Replacement, applies
from dgl_mgpu.dgl.unavailable import UnavailableLoader, dgl_works_by_itself, why_unavailable
from dgl_mgpu.graph.originals import originals

_TARGETS = {entry.module for entry in REPLACEMENTS} | {entry.module for entry in SURROUNDINGS}
_UNAVAILABLE = {part.module: part for part in UNAVAILABLE}


class CompatFinder:
    """Meta-path finder for the modules that the registry names."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages  # to mend, of "dgl" and "ogb"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        if name in _UNAVAILABLE:
            return _unavailable_spec(name)
        parent, _, child = name.rpartition(".")
        if parent in _UNAVAILABLE and isinstance(_loader(parent), UnavailableLoader):
            raise _loader(parent).error(child)
        if name != "dgl" and name not in _TARGETS:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        if name == "dgl" and spec.origin and dgl_works_by_itself(Path(spec.origin).parent):
            self.packages.discard("dgl")
        elif name in _TARGETS:
            _mend_on_execution(name, spec.loader)
        return spec


def _loader(module: str) -> Any:
    spec = sys.modules[module].__spec__
    return spec.loader if spec is not None else None


def _unavailable_spec(name: str) -> ModuleSpec | None:
    part = _UNAVAILABLE[name]
    folder = Path(sys.modules["dgl"].__path__[0])
    reason = why_unavailable(part, folder)
    if reason is None:
        return None
    return ModuleSpec(name, UnavailableLoader(part, folder, reason), is_package=True)  # type: ignore[arg-type]


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
