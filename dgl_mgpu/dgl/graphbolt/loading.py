"""Importing `dgl.graphbolt` without its C++ library, when something in it is first used."""

from __future__ import annotations

import ast
import functools
import importlib
import os.path
import threading
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dgl_mgpu.dgl.environment import installed_version
from dgl_mgpu.dgl.registry import GRAPHBOLT
from dgl_mgpu.errors import UnavailableError

_LIBRARY = "graphbolt_pytorch_"
#: Names of `dgl_mgpu.dgl.graphbolt.later_names`, which cannot be imported before.
_LATER = (
    *("CPUCachedFeature", "DiskBasedFeature", "HeteroItemSet", "SeedEdgesExcluder"),
    *("cpu_cached_feature", "gpu_cached_feature"),
)
_lock = threading.RLock()


class GraphBoltLoader(Loader):
    """Loads DGL's Python files of GraphBolt over this package's operators, at their first use.

    DGL imports GraphBolt unused; its pydantic takes as long to import as half of DGL.
    `importlib.util.LazyLoader` would load it for whoever goes over all modules, as `inspect` does.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the ordinary loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Let the module wait until it is used."""
        module.__class__ = _WaitingModule


class _WaitingModule(ModuleType):
    """A module that is executed when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules, as pickle does, asks for names that it has not.
        is_asked = name in ("__all__", *_LATER) or name in _names(Path(self.__path__[0]))
        if not is_asked:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        load(self)
        return getattr(self, name)


class _ModuleInExecution(ModuleType):
    """A module that a thread executes: others wait for it."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if type(self) is not _ModuleInExecution:
                return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")


def load(module: ModuleType) -> None:
    """Execute GraphBolt, if it is still waiting for that."""
    with _lock:
        if type(module) is not _WaitingModule or module.__spec__ is None:
            return
        module.__class__ = _ModuleInExecution  # type: ignore[assignment]
        try:
            _execute(module, module.__spec__.loader)
        except BaseException:
            module.__class__ = _WaitingModule
            raise
        module.__class__ = ModuleType  # type: ignore[assignment]


def _execute(module: ModuleType, loader: Any) -> None:
    _check_version()
    from unittest.mock import patch

    import torch

    from dgl_mgpu.dgl.graphbolt import datapipes
    from dgl_mgpu.dgl.graphbolt.files import ScriptObject
    from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph
    from dgl_mgpu.dgl.graphbolt.operators import OPERATORS

    datapipes.install()
    torch.ops.graphbolt = OPERATORS  # type: ignore[attr-defined]
    exists, load_library = os.path.exists, torch.classes.load_library

    def is_there(path: Any) -> bool:
        return _LIBRARY in str(path) or exists(path)

    def load_others(path: Any) -> None:
        if _LIBRARY not in str(path):
            load_library(path)

    # It looks for its library, and loads it.
    with (
        patch.object(os.path, "exists", is_there),
        patch.object(torch.classes, "load_library", load_others),
    ):
        loader.loader.exec_module(module)
    importlib.import_module("dgl_mgpu.dgl.graphbolt.later_names")  # which adds them
    # So that torch reads files of graphs without running what is in them.
    own = vars(module)["FusedCSCSamplingGraph"]
    torch.serialization.add_safe_globals([own, FusedCSCSamplingGraph, ScriptObject])


def _check_version() -> None:
    """Raise UnavailableError where this package has no operators for DGL's Python files."""
    version = installed_version("dgl")
    if version is None or not GRAPHBOLT.holds(version):
        raise UnavailableError(
            f"use dgl.graphbolt of DGL {version}",
            f"its C++ library is not built for torch {installed_version('torch')}, and this "
            f"package's operators are those of {GRAPHBOLT}",
            "install DGL 2.1.0 (pip uninstall dgl, then dgl-mgpu install-dgl), or the torch that "
            "its library is built for",
        )


def already_loaded(module: ModuleType, name: str) -> ModuleSpec:
    """A spec, of some name, of a module that was imported while its spec was looked for.

    Until it is used it is the module's own, which importlib would prefer and execute again.
    """
    spec = ModuleSpec(name, _Loaded(module))
    module.__spec__ = spec
    return spec


class _Loaded(Loader):
    """Loads a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


@functools.cache
def _names(package: Path) -> frozenset[str]:
    """Names that a package defines at the top level of its files, read without importing it."""
    return frozenset(name for path in package.rglob("*.py") for name in _names_in(path))


def _names_in(path: Path) -> Iterator[str]:
    yield path.parent.name if path.stem == "__init__" else path.stem
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (it.id for it in node.targets if isinstance(it, ast.Name))
