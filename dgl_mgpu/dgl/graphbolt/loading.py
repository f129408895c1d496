"""Importing `dgl.graphbolt` without its C++ library, when something in it is first used."""

from __future__ import annotations

import contextlib
import importlib.util
import os.path
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import patch

import torch

_LIBRARY = "graphbolt_pytorch_"


class GraphBoltLoader(Loader):
    """Loads DGL's Python files of GraphBolt over this package's operators."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the ordinary loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, which finds its operators and datapipes."""
        from dgl_mgpu.dgl.graphbolt import datapipes, serialization
        from dgl_mgpu.dgl.graphbolt.operators import OPERATORS

        datapipes.install()
        torch.ops.graphbolt = OPERATORS  # type: ignore[attr-defined]
        with _library_there():
            self._loader.exec_module(module)
        serialization.allow(module)


def lazily_loaded(spec: ModuleSpec) -> ModuleSpec:
    """A spec of GraphBolt that executes it at the first use: DGL imports it unused.

    It needs pydantic and torch's datapipes, which take as long to import as all of DGL.
    """
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(GraphBoltLoader(spec.loader))
    return spec


@contextlib.contextmanager
def _library_there() -> Iterator[None]:
    """Within, GraphBolt finds a C++ library of torch's version and loads it."""
    exists = os.path.exists

    def is_there(path: str) -> bool:
        return _LIBRARY in os.path.basename(path) or exists(path)

    with patch.object(os.path, "exists", is_there), patch.object(torch.classes, "load_library"):
        yield
