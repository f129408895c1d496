"""In place of ``dgl._ffi.base``, which loads the binary."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from dgl._ffi.libinfo import __version__ as __version__

from dgl_mgpu.errors import UnavailableError

string_types = (str,)
numeric_types = (float, int, np.float32, np.int32)


class DGLError(Exception):
    """DGL's error."""


class _NoLibrary:
    """What calls of the binary that DGL's Python makes by itself meet."""

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("DGL"):  # which nobody calls, but may look for
            raise AttributeError(name)
        raise UnavailableError(
            f"call {name}",
            "it is a function of DGL's binary, which is not used here",
            "do without it, or unset DGL_MGPU_LIBDGL where DGL's wheel has a libdgl that loads",
        )


_LIB = _NoLibrary()
_LIB_NAME = _DIR_NAME = ""
_FFI_MODE = "none"


def check_call(ret: int) -> None:
    """Nothing here calls C."""


def py_str(x: bytes) -> str:  # DGL's name
    """Text of a C string."""
    return x.decode("utf-8")


def c_str(string: str) -> ctypes.c_char_p:
    """A C string of text."""
    return ctypes.c_char_p(string.encode("utf-8"))


def c_array(ctype: Any, values: Sequence[Any]) -> Any:
    """A C array of values."""
    return (ctype * len(values))(*values)


def load_tensor_adapter(backend: str, version: str) -> None:
    """Nothing: only the binary allocates memory by torch's allocator."""


def is_tensor_adaptor_enabled() -> bool:
    """Whether the binary allocates memory by torch's allocator."""
    return False
