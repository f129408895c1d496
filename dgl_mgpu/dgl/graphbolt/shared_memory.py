"""GraphBolt's graphs in memory that processes share, by a name."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError, SharedMemoryError
from dgl_mgpu.machine.shared_memory import SHARED_MEMORY, SharedMemory
from dgl_mgpu.utils.units import human_bytes

#: Tensors begin at multiples of this many bytes, after a head of as many with the length of the
#: description that follows.
_ALIGNMENT = 64


def share(parts: Mapping[str, Any], name: str) -> tuple[dict[str, Any], object]:
    """Copy what a graph consists of to shared memory.

    Parameters
    ----------
    parts : dict
        Tensors, dicts of tensors or of ints, and None.
    name : str

    Returns
    -------
    parts : dict
        The same in shared memory.
    owner : object
        The name is there as long as this.

    Raises
    ------
    InvalidInputError
        If the name is taken.
    SharedMemoryError
        If there is too little shared memory.
    """
    path = _path(name)
    tensors = {key: it.contiguous().cpu() for key, it in _flat(parts)}
    places, end = {}, 0
    for key, tensor in tensors.items():
        places[key] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "at": end}
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    plain = {key: _without_tensors(value) for key, value in parts.items()}
    text = json.dumps({"tensors": places, "plain": plain}).encode()
    begin = _ALIGNMENT + -(-len(text) // _ALIGNMENT) * _ALIGNMENT
    action = f"copy a graph to shared memory '{name}'"
    memory = SharedMemory.of_this_machine()
    if begin + end > memory.room:
        raise SharedMemoryError(
            action,
            f"it takes {human_bytes(begin + end)}, and there is room for"
            f" {human_bytes(memory.room)}",
            memory.advice(begin + end),
        )
    # Others see it when it is complete.
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix=f"{path.name}.") as file:
        file.truncate(begin + end)
        file.write(len(text).to_bytes(8, "little").ljust(_ALIGNMENT, b"\0") + text)
        file.flush()
        shared = _mapped(Path(file.name))
        for (_, target), source in zip(_flat(shared), tensors.values(), strict=True):
            target.copy_(source)
        try:
            os.link(file.name, path)
        except FileExistsError as error:
            raise InvalidInputError(
                action, f"{path} is there already", "choose another name"
            ) from error
    return shared, _Owner(path)


class _Owner:
    """Deletes a file with itself, in the process that made it."""

    def __init__(self, path: Path) -> None:
        weakref.finalize(self, _delete, path, os.getpid())


def _delete(path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)


def load(name: str) -> dict[str, Any]:
    """What a graph consists of, from shared memory.

    Raises InvalidInputError if there is no such name.
    """
    path = _path(name)
    if not path.is_file():
        raise InvalidInputError(
            f"load a graph from shared memory '{name}'",
            f"there is no {path}",
            "pass a name that copy_to_shared_memory was given, while that graph is there",
        )
    return _mapped(path)


def _mapped(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
    length = int.from_bytes(bytes(whole[:8].tolist()), "little")
    described = json.loads(bytes(whole[_ALIGNMENT : _ALIGNMENT + length].tolist()))
    begin = _ALIGNMENT + -(-length // _ALIGNMENT) * _ALIGNMENT
    parts: dict[str, Any] = described["plain"]
    for key, place in described["tensors"].items():
        dtype = getattr(torch, place["dtype"].removeprefix("torch."))
        shape = torch.Size(place["shape"])
        at = begin + place["at"]
        tensor = whole[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        part, _, inner = key.partition("/")
        if inner:
            parts[part][inner] = tensor
        else:
            parts[part] = tensor
    return parts


def _path(name: str) -> Path:
    name = name.removeprefix("/")  # as POSIX has them
    if not name or "/" in name:
        raise InvalidInputError(
            f"name shared memory {name!r}", "it is no file name", "leave out slashes"
        )
    return SHARED_MEMORY / f"{name}.graphbolt"


def _flat(parts: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in parts.items():
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, Mapping):
            for inner, part in value.items():
                if isinstance(part, Tensor):
                    yield f"{key}/{inner}", part


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: part for key, part in value.items() if not isinstance(part, Tensor)}
    return None if isinstance(value, Tensor) else value
