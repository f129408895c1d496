"""In place of ``dgl._ffi.function``: functions by the names that they have in the C API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dgl_mgpu.dgl.capi.table import names_without_library


class Function:
    """A function that the C API has under a name, or that a script has registered."""

    is_global = False

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


FunctionBase = Function
_registered: dict[str, Function] = {}


def convert_to_dgl_func(pyfunc: Callable[..., Any]) -> Function:
    """A function as DGL's."""
    return pyfunc if isinstance(pyfunc, Function) else Function(pyfunc)


def register_func(
    func_name: str | Callable[..., Any],
    f: Callable[..., Any] | None = None,
    override: bool = False,
) -> Any:
    """Register a function under a name, its own by default; as DGL's, also a decorator."""
    if callable(func_name):
        return register_func(func_name.__name__, func_name, override)
    if not isinstance(func_name, str):
        raise ValueError("expect string function name")
    if f is None:
        return lambda function: register_func(func_name, function, override)
    if not override and func_name in list_global_func_names():
        from dgl._ffi.base import DGLError

        raise DGLError(f"Global function {func_name} is already registered")
    _registered[func_name] = convert_to_dgl_func(f)
    return _registered[func_name]


def get_global_func(name: str, allow_missing: bool = False) -> Function | None:
    """The function of a name."""
    if name in _registered:
        return _registered[name]
    if name in names_without_library():
        from dgl_mgpu.dgl.capi.without_library import OwnFunction

        return OwnFunction(name)
    if allow_missing:
        return None
    raise ValueError(f"Cannot find global function {name}")


def list_global_func_names() -> list[str]:
    """All names that functions have."""
    return [*names_without_library(), *_registered]


def extract_ext_funcs(finit: Any) -> Any:
    """Functions of another C library, which needs DGL's: an error."""
    from dgl._ffi.base import _LIB

    return _LIB.DGLExtensionDeclarer


def _init_api(namespace: str, target_module_name: str | None = None) -> list[str]:
    """Bind all functions of a namespace to names in a module."""
    prefix = namespace.removeprefix("dgl.") + "."
    module = sys.modules[target_module_name or namespace]
    names = [name for name in list_global_func_names() if name.startswith(prefix)]
    own = {name.removeprefix(prefix): name for name in names}
    return _bind(module, {short: name for short, name in own.items() if "." not in short})


def _init_internal_api() -> None:
    names = [name for name in list_global_func_names() if name.startswith("_") and "." not in name]
    _bind(sys.modules["dgl._api_internal"], {name: name for name in names})


def _bind(module: Any, names: dict[str, str]) -> list[str]:
    for short, name in names.items():
        function: Any = get_global_func(name)
        function.__name__, function.__doc__ = short, f"DGL's function {short}."
        setattr(module, short, function)
    return list(names)
