"""ogb on a torch whose `torch.load` refuses pickles, and on a machine without a network.

ogb keeps its processed data sets as pickled NumPy arrays, which torch's ``weights_only``
unpickler does not read (they are written with pickle protocol 4). An unpickler of our own reads
them, which resolves only the names that such files hold: a file that names anything else, and so
could run code, is refused."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dgl_mgpu.errors import DataFormatError
from dgl_mgpu.utils.checksums import DAMAGE, damaged_part
from dgl_mgpu.utils.modules import module_with
from dgl_mgpu.utils.safe_pickle import ARRAYS, with_arrays

_ACTION = "read a processed ogb data set"
_FIX = "delete the data set's folder 'processed' and let ogb write it again"
_ARCHIVE = b"PK\x03\x04"
_TENSORS = {
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
}
# The graphs of the PyG variants are plain containers of tensors.
_GRAPHS = {
    (f"torch_geometric.data.{module}", name)
    for module, names in (
        ("data", ("Data", "DataEdgeAttr", "DataTensorAttr")),
        ("hetero_data", ("HeteroData",)),
        ("storage", ("BaseStorage", "GlobalStorage", "NodeStorage", "EdgeStorage")),
    )
    for name in names
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS:
            return ARRAYS[module, name]
        is_storage = module == "torch" and name.endswith("Storage") and name.isidentifier()
        if not is_storage and (module, name) not in _TENSORS | _GRAPHS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no ogb file holds")
        return super().find_class(module, name)


class _ArrayPickle:
    """What torch.load takes as ``pickle_module``."""

    __name__ = "pickle"
    Unpickler = _ArrayUnpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _ArrayUnpickler(file, **options).load()


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """torch.load, which reads pickled arrays too unless it is told how to read."""
    if pickle_module is not None or weights_only is not None:
        return torch.load(
            f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **pickle_load_args
        )
    is_path = isinstance(f, str | os.PathLike)
    action = f"{_ACTION}, {f}" if is_path else _ACTION
    try:
        if is_path and _begins_as_archive(f):
            with zipfile.ZipFile(f) as archive:
                if part := damaged_part(archive):
                    raise ValueError(f"its part {part} is damaged")
            # torch.load would run a program, so its own reader says whether it is one.
            if "constants.pkl" in torch._C.PyTorchFileReader(os.fspath(f)).get_all_records():
                raise ValueError("it is a TorchScript program")
        content = torch.load(
            f, map_location, _ArrayPickle, weights_only=False, mmap=mmap, **pickle_load_args
        )
    except FileNotFoundError:
        raise
    except (pickle.UnpicklingError, *DAMAGE) as error:
        found = f"it is damaged, or none ({str(error).partition(chr(10))[0]})"
        raise DataFormatError(action, found, _FIX) from error
    return with_arrays(content)


def _begins_as_archive(path: str | os.PathLike[str]) -> bool:
    """Whether torch.load takes a file for an archive."""
    with open(path, "rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def from_numpy(array: np.ndarray, /) -> torch.Tensor:
    """torch.from_numpy, which copies arrays that must not be written to, as pandas 3 gives out."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


torch_for_ogb = module_with(torch, load=load, from_numpy=from_numpy)


@contextmanager
def without_version_check() -> Iterator[None]:
    """Hide the package `outdated` from ogb, which then skips its version check by itself."""
    before = sys.modules.pop("outdated", None)
    sys.modules["outdated"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        del sys.modules["outdated"]
        if before is not None:
            sys.modules["outdated"] = before
