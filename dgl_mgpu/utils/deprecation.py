"""Old names of public functions, kept for one minor version."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated_alias(old: str, function: Callable[P, R], new: str) -> Callable[P, R]:
    """A function under its old name, which warns at each call.

    Parameters
    ----------
    old, new : str
        The names as users write them, such as 'dgl_mgpu.ops.sample_blocks_async'.
    function : callable
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
