"""Plain data as bytes, for messages between processes.

Reading bytes runs no code, whoever wrote them: there are numbers, strings, containers, arrays,
and this package's own data classes, whose fields are filled in without a call of theirs.  Pickle,
which calls what the bytes name, is for pipes between a process and its own children.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_PACKAGE = __name__.partition(".")[0]
_HEAD = struct.Struct("!Q")
_NUMERIC = "biufc"
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
# Quantized ones are nothing without a scale, and a tensor of one ends the process that looks at it.
_DTYPES = {name: each for name, each in _DTYPES.items() if not name.startswith("torch.q")}
# Types that are no data classes: what makes plain data of one, and one of that.
_registered: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}


class NotPlainError(TypeError):
    """A value that has no plain form, or bytes that are not one."""


def register(kind: type, to_plain: Callable[[Any], Any], of_plain: Callable[[Any], Any]) -> None:
    """Have a class of this package written and read.

    ``of_plain`` gets whatever bytes say, so it must run nothing of it.
    """
    _registered[kind] = to_plain, of_plain


def dumps(value: Any) -> bytes:
    """Bytes from which :func:`loads` makes an equal value.

    Plain data are None, bool, int, float, complex, str, bytes; tuple, list, dict, OrderedDict, set,
    frozenset, slice; paths; NumPy's numeric arrays, scalars and dtypes; torch's dense tensors in
    the host's memory, sizes, dtypes and devices; enumerations, named tuples and data classes of
    this package; of these in any depth. Raises NotPlainError for anything else.
    """
    buffers: list[memoryview] = []
    tree = _encode(value, buffers)
    head = json.dumps([tree, [buffer.nbytes for buffer in buffers]]).encode()
    return b"".join([_HEAD.pack(len(head)), head, *buffers])


def loads(data: bytes | memoryview) -> Any:
    """The value that was written.

    Arrays and tensors have memory of their own. Raises NotPlainError if the bytes were not written
    by :func:`dumps`.
    """
    try:
        view = memoryview(data)
        (size,) = _HEAD.unpack(view[: _HEAD.size])
        start = _HEAD.size + size
        tree, lengths = json.loads(bytes(view[_HEAD.size : start]))
        buffers = []
        for length in lengths:
            if not 0 <= length <= len(view) - start:
                raise NotPlainError(f"a part of {length} bytes is not there")
            buffers.append(view[start : start + length])
            start += length
        return _decode(tree, buffers)
    except NotPlainError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError,
            ValueError, struct.error) as error:  # fmt: skip
        raise NotPlainError(f"these bytes are no plain data: {error}") from error


# --- what a value is written as: itself, a list of values, or {name of its form: content} -------


def _encode(value: Any, buffers: list[memoryview]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(entry, buffers) for entry in value]
    if kind in _CONTAINERS:
        return {_CONTAINERS[kind]: [_encode(entry, buffers) for entry in value]}
    if kind in _DICTS:
        items = [[_encode(entry, buffers) for entry in item] for item in value.items()]
        return {_DICTS[kind]: items}
    if kind in _FORMS:
        return {_FORMS[kind][0]: _encode(_FORMS[kind][1](value), buffers)}
    if kind is bytes:
        buffers.append(memoryview(value))
        return {"bytes": len(buffers) - 1}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMERIC:
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        form = "array" if isinstance(value, np.ndarray) else "scalar"
        return {form: [len(buffers) - 1, value.dtype.str, list(value.shape)]}
    is_dense = kind is torch.Tensor and value.layout == torch.strided and not value.is_quantized
    if is_dense and value.device.type == "cpu":
        rows = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        buffers.append(rows.view(torch.uint8).numpy().data)
        return {"tensor": [len(buffers) - 1, str(value.dtype), list(value.shape)]}
    if isinstance(value, np.dtype) and value.kind in _NUMERIC:
        return {"numpy dtype": value.str}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    return _encode_object(value, buffers)


def _encode_object(value: Any, buffers: list[memoryview]) -> Any:
    kind = type(value)
    name = [kind.__module__, kind.__qualname__]
    if _class(*name) is not kind:
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} is no plain data")
    if kind in _registered:
        return {"object": [name, _encode(_registered[kind][0](value), buffers)]}
    if isinstance(value, enum.Enum):
        return {"enum": [name, value.name]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"record": [name, [_encode(entry, buffers) for entry in value]]}
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, entry.name) for entry in dataclasses.fields(value)]
        return {"record": [name, [_encode(entry, buffers) for entry in fields]]}
    raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} is no plain data")


def _class(module: str, name: str) -> type | None:
    """A class that this package has and has loaded; nothing is imported because bytes name it."""
    if module.partition(".")[0] != _PACKAGE:
        return None
    item: Any = sys.modules.get(module)
    for part in name.split("."):
        item = getattr(item, part, None)
    is_its_own = isinstance(item, type) and item.__module__ == module
    return item if is_its_own else None


def _decode(tree: Any, buffers: Sequence[memoryview]) -> Any:
    if isinstance(tree, list):
        return [_decode(entry, buffers) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    ((form, content),) = tree.items()
    if form in ("object", "enum", "record"):
        return _decode_object(form, content, buffers)
    if form == "bytes":
        return bytes(buffers[content])
    if form in ("array", "scalar"):
        place, dtype, shape = content
        rows = np.frombuffer(buffers[place], _numeric_dtype(dtype)).reshape(shape)
        return rows.copy() if form == "array" else rows[()]
    if form == "tensor":
        place, dtype, shape = content
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count * _DTYPES[dtype].itemsize != len(buffers[place]):
            raise NotPlainError(f"a tensor of shape {shape} in {len(buffers[place])} bytes")
        if not count:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        return torch.frombuffer(bytearray(buffers[place]), dtype=_DTYPES[dtype]).reshape(shape)
    if form in _DICTS.values():
        items = [(_decode(key, buffers), _decode(value, buffers)) for key, value in content]
        return dict(items) if form == "dict" else OrderedDict(items)
    return _BY_FORM[form](_decode(content, buffers))


def _decode_object(form: str, content: Any, buffers: Sequence[memoryview]) -> Any:
    name, inside = content
    cls = _class(*name)
    if cls is None:
        raise NotPlainError(f"{'.'.join(name)} is not a class of {_PACKAGE} that is loaded")
    kind: Any = cls
    if form == "object":
        return _registered[cls][1](_decode(inside, buffers))
    if form == "enum":
        if not issubclass(kind, enum.Enum):
            raise NotPlainError(f"{kind.__qualname__} is no enumeration")
        return kind[inside]
    values = [_decode(entry, buffers) for entry in inside]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind._make(values)
    if not dataclasses.is_dataclass(kind):
        raise NotPlainError(f"{kind.__qualname__} is no data class")
    fields = dataclasses.fields(kind)
    instance: Any = object.__new__(cls)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(instance, field.name, value)
    return instance


def _numeric_dtype(name: Any) -> np.dtype:
    dtype = np.dtype(str(name))
    if dtype.kind not in _NUMERIC:
        raise NotPlainError(f"an array of {name!r}")
    return dtype


_DICTS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered dict"}
_CONTAINERS: dict[Any, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
# Form's name, what it is made of, and what makes one of that.
_FORMS: dict[Any, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: ("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    slice: (
        "slice",
        lambda value: [value.start, value.stop, value.step],
        lambda ends: slice(*ends),
    ),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("torch dtype", str, lambda name: _DTYPES[name]),
    torch.device: ("device", str, torch.device),
}
_BY_FORM: dict[str, Callable[[Any], Any]] = {
    **{form: kind for kind, form in _CONTAINERS.items()},
    **{form: make for form, _, make in _FORMS.values()},
    "numpy dtype": _numeric_dtype,
    "path": Path,
}
