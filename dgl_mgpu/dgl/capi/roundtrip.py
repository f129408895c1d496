"""Round trips for what has no implementation on GPUs: arguments to the CPU, results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from dgl import backend as F
from dgl import ndarray as nd
from dgl.heterograph_index import HeteroGraphIndex, HeteroSubgraphIndex

from dgl_mgpu.dgl.capi import record
from dgl_mgpu.dgl.capi.table import Entry
from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.graph.dispatch import is_tensor_backed_argument, tensor_backed_graphs
from dgl_mgpu.graph.host_ids import moved, takes_ids_of_gpus
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex


def through_cpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The C function `function`, for graphs and arrays on a GPU."""

    def call(*arguments: Any) -> Any:
        record.warn_of_round_trip(name)
        device = _device(arguments)
        with tensor_backed_graphs(False):
            return _back(function(*map(_to_cpu, arguments)), device)

    return call


def on_host_graphs(name: str, on_tensors: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """`on_tensors`; for DGL's graphs in host memory and ids on a GPU, `function` with copied ids.

    DGL allows that for pinned graphs.  The graph itself is not copied.
    """
    on_tensors = takes_ids_of_gpus(on_tensors)

    def call(*arguments: Any) -> Any:
        graph = arguments[0] if arguments else None
        if not isinstance(graph, HeteroGraphIndex) or isinstance(graph, TensorIndex):
            return on_tensors(*arguments)
        device = _device(arguments)
        if not graph.is_pinned():
            raise InvalidInputError(
                f"call {name} with a graph on the CPU and ids on {device}",
                "the graph is not pinned",
                f"pin it with g.pin_memory_(), or move the graph or the ids: g.to('{device}')",
            )
        return _back(function(*map(_to_cpu, arguments)), device)

    return call


def refuse(name: str, entry: Entry) -> Callable[..., NoReturn]:
    """A function that raises why a C function cannot be called with graphs or arrays on a GPU."""

    def call(*arguments: Any) -> NoReturn:
        raise UnavailableError(
            f"call {name} with a graph or an array on {_device(arguments)}",
            f"it is not made for GPUs: {entry.reason}",
            "move the graph to the CPU first, with g.cpu()",
        )

    return call


def _device(arguments: Any) -> torch.device:
    for argument in arguments:
        if isinstance(argument, torch.Tensor | TensorIndex):
            return argument.device
        if isinstance(argument, list | tuple) and is_tensor_backed_argument(argument):
            return _device(argument)
    return torch.device("cpu")


def _to_cpu(argument: Any) -> Any:
    if isinstance(argument, TensorIndex):
        return argument.to_dgl()
    if isinstance(argument, torch.Tensor):
        return F.zerocopy_to_dgl_ndarray(argument.cpu())
    if isinstance(argument, list | tuple):
        return [_to_cpu(part) for part in argument]
    return argument


def _back(result: Any, device: torch.device) -> Any:
    if isinstance(result, torch.Tensor | SubgraphIndex):
        return moved(result, device)
    if isinstance(result, HeteroGraphIndex):
        return TensorIndex.from_dgl(result, device)
    if isinstance(result, HeteroSubgraphIndex):
        return SubgraphIndex(
            TensorIndex.from_dgl(result.graph, device),
            [ids.to(device) for ids in result.induced_nodes],
            [ids.to(device) for ids in result.induced_edges],
        )
    if isinstance(result, nd.NDArray):
        return F.zerocopy_from_dgl_ndarray(result).to(device)
    if callable(result) and not isinstance(result, type):  # an array of results: a C function
        return lambda index: _back(result(index), device)
    is_list = hasattr(result, "__len__") and hasattr(result, "__getitem__")
    if is_list and not isinstance(result, str):
        return [_back(part, device) for part in result]
    return result
