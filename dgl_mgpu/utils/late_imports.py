"""Packages that another one imports at its own import, but that are loaded at their first use.

``importlib.util.LazyLoader`` would leave its modules to everybody: whoever goes over all modules,
as `inspect` does, would load them. Here they are seen by who imports them inside of
`late_imports`, and by nobody else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dgl_mgpu.utils import extras


@contextmanager
def late_imports(packages: Mapping[str, Collection[str]]) -> Iterator[None]:
    """Imports of these packages in here give modules that load them when they are used.

    Parameters
    ----------
    packages : mapping from str to collection of str
        Packages, each with those of its names, as "module:name", that may be imported by
        ``from … import …``, or be what something is asked to be an instance of, without loading
        the package. Packages that have been imported already are left alone.
    """
    finder = _LateFinder(
        {name: names for name, names in packages.items() if name not in sys.modules}
    )
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for package in list(finder.packages):
            finder.leave(package)


class _LateFinder(MetaPathFinder, Loader):
    """Finds late modules, whether or not there are any of their names."""

    def __init__(self, packages: dict[str, Collection[str]]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _LateModule(spec.name)
        vars(module)["_finder"] = self
        for name in self.packages[spec.name.partition(".")[0]]:
            home, _, attribute = name.partition(":")
            if home == spec.name:
                vars(module)[attribute] = LateName(module, attribute)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing, for now."""

    def leave(self, package: str) -> None:
        """From now on, imports of this package load it."""
        if self.packages.pop(package, None) is None:
            return
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package and isinstance(module, _LateModule):
                sys.modules.pop(name, None)


class _LateModule(ModuleType):
    """A module that is imported when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        is_special = name.startswith("__") and name != "__version__"
        if is_special and self.__name__.partition(".")[0] in self._finder.packages:
            raise AttributeError(name)  # the import system asks
        return _imported(self, name)


class LateName:
    """A function, class or module that is imported when it is used."""

    def __init__(self, module: _LateModule, name: str) -> None:
        self._module, self._name = module, name

    def load(self) -> Any:
        """What ``from module import name`` gives."""
        return _imported(self._module, self._name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.load()(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        # Before its module was imported, nothing can be an instance of a class.
        is_there = not isinstance(sys.modules.get(self._module.__name__), _LateModule | None)
        return is_there and isinstance(instance, self.load())

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_module, (self._module.__name__, self._name)


def _imported(module: _LateModule, name: str) -> Any:
    module._finder.leave(module.__name__.partition(".")[0])
    with extras.required(f"import {module.__name__}, which DGL uses here"):
        return getattr(importlib.import_module(module.__name__), name)


def _of_module(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
