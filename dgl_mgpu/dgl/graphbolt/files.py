"""Graphs in files that GraphBolt's C++ library has written, such as those that DGL offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph
from dgl_mgpu.errors import InvalidInputError

_CLASS = "__torch__.torch.classes.graphbolt.FusedCSCSamplingGraph"
_VERSION = 6199
_State = Mapping[str, Mapping[str, Tensor]]


class ScriptObject(FusedCSCSamplingGraph):
    """What stands in a file for a graph of the C++ library; once read, it is a graph like others.

    torch knows it by the name that the file has: objects of C++ classes are ``torch.ScriptObject``.
    """

    def __setstate__(self, state: Any) -> None:
        content, name = state
        if name != _CLASS:
            raise InvalidInputError(
                "read an object of a C++ class", f"its class is {name}", "read graphs of GraphBolt"
            )
        parts = _parts(content)
        self.__class__ = FusedCSCSamplingGraph  # type: ignore[assignment]
        self.__init__(*parts)  # type: ignore[misc]


ScriptObject.__module__ = "torch"


def _parts(content: _State) -> list[Any]:
    """Arguments of a graph's constructor."""
    tensors = content["independent_tensors"]
    version = tensors["version_number"].tolist()
    if version != [_VERSION]:
        raise InvalidInputError(
            "read a graph of GraphBolt", f"its version is {version}", f"write version {_VERSION}"
        )
    return [
        tensors["indptr"],
        tensors["indices"],
        tensors.get("node_type_offset"),
        tensors.get("type_per_edge"),
        _numbers(content.get("node_type_to_id")),
        _numbers(content.get("edge_type_to_id")),
        _tensors(content.get("node_attributes")),
        _tensors(content.get("edge_attributes")),
    ]


def _numbers(tensors: Mapping[str, Tensor] | None) -> dict[str, int] | None:
    return None if tensors is None else {name: int(it) for name, it in tensors.items()}


def _tensors(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    return None if tensors is None else dict(tensors)
