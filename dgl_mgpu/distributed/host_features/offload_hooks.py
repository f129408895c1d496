"""Features of the host's memory on a device while a model reads them that wants all at once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dgl_mgpu.distributed.host_features.host_rows import HostRows


@contextlib.contextmanager
def offloaded_rows(inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A model's inputs, with tensors in place of `HostRows`, for its forward pass in this context.

    All of the rows are brought to the device whenever one is looked up, and again in the backward
    pass where an operation has saved them: in between, neither autograd nor ``inputs`` holds them.
    So they take their room while the model itself does, as a rule in the first layer's forward
    pass, and while that layer goes backward.  What it makes of them and saves, such as sums as wide
    as they are, or rows of which some are dropped out, stays from the one to the other.

    Parameters
    ----------
    inputs : dict
        `HostRows` may be in dicts of it.
    """
    if not _any_host_rows(inputs):
        yield inputs
        return
    inside = _SharedRows(inputs)
    with torch.autograd.graph.saved_tensors_hooks(inside.put_away, inside.brought_again):
        yield inside


def _any_host_rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_any_host_rows(each) for each in value.values())
    return isinstance(value, HostRows)


class _View:
    """What an operation has saved of rows that were lent to it."""

    def __init__(self, rows: HostRows, tensor: torch.Tensor) -> None:
        self._rows = rows
        self._as = tensor.size(), tensor.stride(), tensor.storage_offset()

    def brought(self) -> torch.Tensor:
        return self._rows.whole().as_strided(*self._as)


class _SharedRows(Mapping[str, Any]):
    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        #: What was lent, as long as somebody has it, and its version then.
        self._out: list[tuple[weakref.ref[torch.Tensor], int, HostRows]] = []

    def __getitem__(self, key: str) -> Any:
        return self._lend(self._inputs[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def _lend(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._lend(each) for key, each in value.items()}
        if not isinstance(value, HostRows):
            return value
        found = value.whole()
        self._out.append((weakref.ref(found), found._version, value))
        return found

    def put_away(self, saved: torch.Tensor) -> torch.Tensor | _View:
        """What autograd keeps of a tensor."""
        for reference, version, rows in self._out:
            whole = reference()
            # What a model has changed in place is no longer what could be brought again.
            is_unchanged = saved._version == version
            if whole is not None and saved.numel() and is_unchanged and _shares(saved, whole):
                return _View(rows, saved)
        return saved

    def brought_again(self, kept: torch.Tensor | _View) -> torch.Tensor:
        return kept.brought() if isinstance(kept, _View) else kept


def _shares(saved: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor is a view of another's memory."""
    same = saved.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same and saved.dtype == whole.dtype
