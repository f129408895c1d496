"""NumPy's arrays out of pickles, of which nothing is called that could do more than make them.

NumPy's own constructors trust a pickle: the state of a dtype may say that bytes of the file are
addresses of Python objects, and a shape may ask for any amount of memory.  What stands for them
here makes arrays of numbers that lie in the file, and nothing else.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np

_NUMBERS = re.compile(r"[biufc]\d{1,2}")
_BYTE_ORDERS = ("<", ">", "=", "|")


class _Dtype:
    """Stands for ``numpy.dtype``."""

    def __init__(self, code: Any, *how: Any) -> None:
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(
                f"it asks for arrays of {code!r:.50}, which are no numbers"
            )
        self.real = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        _, order, *layout = state
        # Of a number all else is None, but for size and alignment, which are -1, and flags.
        is_number = all(part is None or (type(part) is int and part <= 0) for part in layout)
        if order not in _BYTE_ORDERS or not is_number:
            raise pickle.UnpicklingError("it asks for arrays of structures, which are no numbers")
        self.real = self.real.newbyteorder(order)


class _Array(np.ndarray):
    """Stands for ``numpy.ndarray`` while a pickle is read."""

    def __new__(cls, *shape: Any) -> _Array:
        # As `_reconstruct` does not make one.
        raise pickle.UnpicklingError(f"it asks for an array of shape {shape!r:.50} by itself")

    def __setstate__(self, state: Any) -> None:
        version, shape, dtype, fortran_order, content = state
        if not isinstance(content, bytes | str):
            raise pickle.UnpicklingError("it asks for arrays of objects, which are no numbers")
        # NumPy compares the shape with the bytes that there are.
        checked: Any = (version, shape, _real(dtype), fortran_order, content)
        super().__setstate__(checked)


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """Stand for the function of this name: an empty array, whose state comes next."""
    if kind is not _Array or shape != (0,):
        raise pickle.UnpicklingError(f"it asks for an array of shape {shape!r:.50} without content")
    return np.ndarray.__new__(_Array, (0,), np.int8)


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    return np.frombuffer(content, _real(dtype)).reshape(shape, order=order)


def _scalar(dtype: Any, content: Any) -> Any:
    content = content.encode("latin1") if isinstance(content, str) else content
    (value,) = np.frombuffer(content, _real(dtype))
    return value


def _real(dtype: Any) -> np.dtype:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError(f"it asks for arrays of {dtype!r:.50}, which are no numbers")
    return dtype.real


def _latin1(text: str, encoding: str) -> bytes:
    """Stand for ``_codecs.encode``, by which newer pickles write bytes."""
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Stand for ``bytes``, which is called for none alone."""
    return b""


#: What a restricted unpickler is to take for the names by which NumPy pickles arrays.
ARRAYS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): _no_bytes,
}
for _core in ("numpy.core", "numpy._core"):  # NumPy 2 moved it; files hold their writer's name
    ARRAYS[f"{_core}.multiarray", "_reconstruct"] = _reconstruct
    ARRAYS[f"{_core}.multiarray", "scalar"] = _scalar
    ARRAYS[f"{_core}.numeric", "_frombuffer"] = _frombuffer


def with_arrays(content: Any) -> Any:
    """What was unpickled, with NumPy's arrays in place of what stood for them."""
    if isinstance(content, _Array):
        return content.view(np.ndarray)
    if isinstance(content, dict):
        for key, value in content.items():
            content[key] = with_arrays(value)
    elif type(content) is list:
        content[:] = map(with_arrays, content)
    elif type(content) is tuple:
        return tuple(map(with_arrays, content))
    return content
