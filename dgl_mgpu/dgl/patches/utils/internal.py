"""Methods of DGLGraph that are functions, too."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def alias_func(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of DGL's: a method that calls what has the function's name at the time."""

    @functools.wraps(func)
    def method(*arguments: Any, **options: Any) -> Any:
        return getattr(sys.modules[func.__module__], func.__name__)(*arguments, **options)

    method.__doc__ = f"Alias of :func:`dgl.{func.__name__}`."
    return method
