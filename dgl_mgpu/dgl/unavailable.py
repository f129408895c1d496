"""Stand-ins for the parts of DGL whose C++ library is missing for the installed torch.

DGL imports `dgl.graphbolt` from inside, so that importing it must succeed; the error comes when
something in it is used.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dgl_mgpu.dgl.environment import installed_version
from dgl_mgpu.dgl.registry import SPARSE_LIBRARY, UNAVAILABLE, Unavailable
from dgl_mgpu.errors import UnavailableError


def why_unavailable(part: Unavailable, dgl_folder: Path) -> str | None:
    """Why `part` cannot work with the installed torch; None if it can."""
    if not _has_library(part.library, dgl_folder):
        torch = _torch_version()
        folder, _, name = part.library.rpartition("/")
        pattern = re.compile(re.escape(name).replace(re.escape("{torch}"), r"([\d.]+)"))
        built = [pattern.fullmatch(path.name) for path in sorted((dgl_folder / folder).glob("*"))]
        versions = ", ".join(match.group(1) for match in built if match) or "none"
        return (
            f"DGL {installed_version('dgl')} ships its C++ library for torch {versions}, "
            f"and torch {torch} is installed"
        )
    if part.needs and not _is_installed(part.needs):
        return f"it needs {part.needs}, which the installed {part.needs.split('.')[0]} lacks"
    return None


def _has_library(library: str, dgl_folder: Path) -> bool:
    return (dgl_folder / library.format(torch=_torch_version())).is_file()


def _torch_version() -> str:
    return (installed_version("torch") or "").partition("+")[0]


def _is_installed(module: str) -> bool:
    """Whether ``package.module`` exists, without importing the package (it may warn)."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any((Path(folder) / rest).is_dir() for folder in folders)


def dgl_works_by_itself(dgl_folder: Path) -> bool:
    """Whether every library of DGL exists for the installed torch: then nothing needs mending."""
    return _has_library(SPARSE_LIBRARY, dgl_folder) and all(
        why_unavailable(part, dgl_folder) is None for part in UNAVAILABLE
    )


class UnavailableLoader:
    """Loads a module in which every name that DGL's own would have raises `UnavailableError`."""

    def __init__(self, part: Unavailable, dgl_folder: Path, reason: str) -> None:
        self.part = part
        self.reason = reason
        self.folder = dgl_folder / part.module.rpartition(".")[2]

    def error(self, name: str) -> UnavailableError:
        instead = self.part.instead[0].upper() + self.part.instead[1:]
        return UnavailableError(f"use {self.part.module}.{name}", self.reason, instead)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            # Names the real module would not have are missing in the ordinary way: pickle and
            # inspect look through all modules for a name and expect an AttributeError.
            # ``__all__`` is what ``import *`` asks for.
            if name == "__all__" or name in public_names(self.folder):
                raise self.error(name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__doc__ = f"Stand-in for {self.part.module}: {self.reason}."
        module.__path__ = []  # a package, none of whose submodules can be found
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


@cache
def public_names(package: Path) -> frozenset[str]:
    """Names a package defines at the top level of any of its files, read without importing it."""
    names: set[str] = set()
    for path in package.rglob("*.py"):
        names.add(path.parent.name if path.stem == "__init__" else path.stem)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names.update(t.id for t in node.targets if isinstance(t, ast.Name))
    return frozenset(name for name in names if not name.startswith("__"))
