"""Graphs in host memory that are asked with ids on a GPU, as DGL allows for pinned ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.graph.dispatch import TensorBacked
from dgl_mgpu.graph.errors import InvalidCallError


def takes_ids_of_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a graph that takes ids on a GPU, too, where the graph is pinned.

    The ids are copied to the CPU and results to the GPU; the graph stays where it is.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        graph: Any = arguments[0] if arguments else None
        device = gpu_of(arguments[1:]) if isinstance(graph, HeteroGraphIndex) else None
        if device is None or graph.device.type != "cpu":
            return function(*arguments, **options)
        if not graph.is_pinned():
            raise InvalidCallError(
                f"call {function.__name__} with a graph on the CPU and ids on {device}",
                "the graph is not pinned",
                f"pin it with g.pin_memory_(), or move the graph or the ids: g.to('{device}')",
            )
        return moved(function(*moved(arguments, torch.device("cpu")), **options), device)

    return call


def gpu_of(arguments: Iterable[Any]) -> torch.device | None:
    """The GPU that tensors among some arguments are on, if any is."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if argument.is_cuda:
                return argument.device
        elif isinstance(argument, list | tuple) and (device := gpu_of(argument)) is not None:
            return device
    return None


def moved(value: Any, device: torch.device) -> Any:
    """Tensors and graphs, also those in lists, on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, TensorBacked):
        return value.on(device)  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    return value
