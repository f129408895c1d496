"""Old names that work for one more minor version, with a warning that names the new one."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated_alias(old: str, function: Callable[P, R], new: str) -> Callable[P, R]:
    """A function under its old name, which warns at each call.

    Names are as users write them, such as 'dgl_mgpu.ops.sample_blocks_async'.
    """

    @functools.wraps(function)
    def alias(*args: P.args, **kwargs: P.kwargs) -> R:
        warnings.warn(
            f"{old} is deprecated and will be removed in 0.2; use {new}",
            DeprecationWarning,
            stacklevel=2,
        )
        return function(*args, **kwargs)

    alias.__name__ = old.rpartition(".")[2]
    alias.__qualname__ = alias.__name__
    return alias


def renamed_method(old: str, method: Callable[..., R], until: str) -> Callable[..., R]:
    """A method under its old name: warns, and calls what has the new name.

    Subclasses may override that.  Version ``until`` no longer has the old name.
    """
    new = method.__name__

    @functools.wraps(method)
    def renamed(self: Any, *arguments: Any, **options: Any) -> R:
        warnings.warn(
            f"{old} is now {new}; the old name goes in version {until}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)(*arguments, **options)

    renamed.__name__ = old
    renamed.__qualname__ = method.__qualname__.rpartition(".")[0] + "." + old
    renamed.__doc__ = f"Deprecated: call :meth:`{new}`."
    return renamed


class RenamedModules(MetaPathFinder, Loader):
    """Imports modules by the old full names that they have until version ``until``."""

    def __init__(self, names: Mapping[str, str], until: str) -> None:
        self._names, self._until = names, until

    def install(self) -> None:
        """Take part in imports, after all others."""
        sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self._names[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}; the old name goes in version {self._until}",
            DeprecationWarning,
            stacklevel=2,
        )
        return _Renamed(spec.name, new)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are the new module's."""


class _Renamed(ModuleType):
    """A module whose names are another one's."""

    def __init__(self, name: str, new: str) -> None:
        super().__init__(name, f"Now `{new}`.")
        self.__dict__["_new"] = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__dict__["_new"]), name)
