"""What DGL's DataLoader does with the parts of every mini-batch, in less of the host's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dgl_mgpu.backend.compat.importer import originals

_HERE = "dgl.dataloading.dataloader"


#: What becomes of a container, by its type: a dict, a tuple or a list; None of what is none.
_containers: dict[type, type | None] = {}


def _container(data: Any) -> type | None:
    kind = type(data)
    try:
        return _containers[kind]
    except KeyError:
        pass
    found: type | None = None
    if issubclass(kind, Mapping):
        found = dict
    elif issubclass(kind, tuple):
        found = tuple
    elif issubclass(kind, Sequence) and not issubclass(kind, str):
        found = list
    _containers[kind] = found
    return found


def recursive_apply(data: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of ``dgl.utils.recursive_apply``: asks a type once what it is, not every object."""
    container = _container(data)
    if container is None:
        return fn(data, *args, **kwargs)
    if container is dict:
        return {key: recursive_apply(each, fn, *args, **kwargs) for key, each in data.items()}
    parts = [
        fn(each, *args, **kwargs)
        if _container(each) is None
        else recursive_apply(each, fn, *args, **kwargs)
        for each in data
    ]
    return tuple(parts) if container is tuple else parts


def recursive_apply_pair(
    data1: Any, data2: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """In place of ``dgl.utils.recursive_apply_pair``."""
    first, second = _container(data1), _container(data2)
    if first is dict and second is dict:
        return {
            key: recursive_apply_pair(each, data2[key], fn, *args, **kwargs)
            for key, each in data1.items()
        }
    if first in (None, dict) or second in (None, dict):
        return fn(data1, data2, *args, **kwargs)
    parts = [
        recursive_apply_pair(one, other, fn, *args, **kwargs)
        for one, other in zip(data1, data2, strict=False)
    ]
    return tuple(parts) if first is tuple and second is tuple else parts


def remove_parent_storage_columns(item: Any, g: Any) -> Any:
    """In place of DGL's: what stays in the process need not be taken out and put back."""
    if torch.utils.data.get_worker_info() is None:
        return item
    return originals[f"{_HERE}:remove_parent_storage_columns"](item, g)


def _prefetch(batch: Any, dataloader: Any, stream: Any) -> Any:
    """In place of DGL's: without a stream, nothing is done for one."""
    if stream is not None:
        return originals[f"{_HERE}:_prefetch"](batch, dataloader, stream)
    from dgl.dataloading.dataloader import _await_or_return, _prefetch_for

    device = dataloader.device
    feats = recursive_apply(batch, _prefetch_for, dataloader)
    feats = recursive_apply(feats, _await_or_return)
    return recursive_apply(batch, lambda x: x.to(device, non_blocking=True)), feats, None
