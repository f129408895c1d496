"""Errors of this package where DGL's C++ would raise a `DGLError`: they are both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from dgl._ffi.base import DGLError

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError


class InvalidCallError(InvalidInputError, DGLError):
    """An argument has the wrong shape, dtype, range or content."""


class UnknownIdError(IdOutOfRangeError, DGLError):
    """A node or edge id is negative or not smaller than the number of nodes or edges."""


class FailedAssertionError(InvalidInputError, AssertionError):
    """What DGL's Python asserts of an argument does not hold."""


class UnknownFeatureError(InvalidInputError, KeyError):
    """A graph has no feature of this name."""


class InvalidEdgeWeightError(InvalidWeightError, DGLError):
    """Edge weights hold NaN, infinity or a negative value, or are all zero at some node."""


def as_dgl_error(error: InvalidInputError) -> InvalidInputError:
    """The same error as one that is a `DGLError` too."""
    if isinstance(error, DGLError):
        return error
    for kind in (UnknownIdError, InvalidEdgeWeightError):
        if isinstance(error, kind.__mro__[1]):
            return kind(error.asked, error.found, error.fix)
    return InvalidCallError(error.asked, error.found, error.fix)


@contextmanager
def typed_assertions(action: str, fix: str) -> Iterator[None]:
    """Within, assertions that fail are typed errors, too."""
    try:
        yield
    except InvalidInputError:
        raise
    except AssertionError as error:
        found = " ".join(str(error).split()).removesuffix(".")
        raise FailedAssertionError(action, found, fix) from error


def raising_dgl_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose errors of its input are `DGLError` too."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except InvalidInputError as error:
            raise as_dgl_error(error) from error

    return call
