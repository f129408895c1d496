"""DGL's containers, which C functions take and give, as Python's: functions of its API."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from dgl.container import List, Map, StrMap, Value


def _made(kind: Any, content: Any) -> Any:
    made = kind.__new__(kind)
    made.handle = content
    return made


def _Value(value: Any) -> Value:  # DGL's names
    return _made(Value, value)


def _ValueGet(value: Value) -> Any:
    return value.handle


def _List(*items: Any) -> List:
    return _made(List, list(items))


def _ListGetItem(items: List, at: int) -> Any:
    return items.handle[at]


def _ListSize(items: List) -> int:
    return len(items.handle)


def _Map(*keys_and_values: Any) -> Map:
    content = dict(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))
    return _made(StrMap if all(isinstance(key, str) for key in content) else Map, content)


def _EmptyStrMap() -> StrMap:
    return _made(StrMap, {})


def _MapGetItem(items: Map, key: Any) -> Any:
    return items.handle[key]


def _MapCount(items: Map, key: Any) -> int:
    return int(key in items.handle)


def _MapItems(items: Map) -> list[Any]:
    return [_content(part) for item in items.handle.items() for part in item]


def _content(part: Any) -> Any:
    return part.handle if isinstance(part, Value) else part


def _MapSize(items: Map) -> int:
    return len(items.handle)


def _GetDeviceAttr(device_type: int, device_id: int, attribute: int) -> int:
    """Whether a device exists, attribute 0; nobody asks for others."""
    return int(device_type == 1 or (device_type == 2 and device_id < torch.cuda.device_count()))


def _TestPythonCallback(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)


def _TestPythonCallbackThread(function: Callable[[Any], Any], argument: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(argument)))
    thread.start()
    thread.join()
    return results[0]
