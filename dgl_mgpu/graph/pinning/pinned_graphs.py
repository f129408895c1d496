"""Graphs in the host's memory that GPUs sample where they are.

Graphs share arrays: a relation of a graph, the graph reversed or in fewer formats.  DGL asks the
arrays whether a graph is pinned, so that all who share them are pinned, and unpinned, together;
here their memory is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from dgl import backend as F
from dgl._ffi.function import get_global_func
from dgl.heterograph_index import HeteroGraphIndex, create_heterograph_from_relations
from dgl.utils import toindex

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.pinning.pinning import PinnedMemory, can_pin, pin_memory_inplace

#: A relation's arrays as they are, format by format.  For a whole graph it would make the first
#: relation's formats of all relations.
_states_of = get_global_func("heterograph_index._CAPI_DGLHeteroForkingPickle")
_make_states = get_global_func("heterograph_index._CAPI_DGLCreateHeteroPickleStates")
_from_states = get_global_func("heterograph_index._CAPI_DGLHeteroForkingUnpickle")
#: Arrays of each format.
_ARRAYS = {"coo": 2, "csr": 3, "csc": 3}

#: What graphs have pinned, by address.
_by_address: WeakValueDictionary[int, PinnedMemory] = WeakValueDictionary()


@dataclass
class _Pins:
    """What of a graph is pinned, and its tensors once they were asked for."""

    memory: list[PinnedMemory]
    tensors: TensorIndex | None = None

    @property
    def are_valid(self) -> bool:
        return all(memory.is_pinned for memory in self.memory)


def pin_index(index: HeteroGraphIndex) -> HeteroGraphIndex:
    """Pin the structure of a graph on the CPU in all its formats: ``_CAPI_DGLHeteroPinMemory_``.

    A format that it gets later is pinned when a GPU first samples by it.  The memory stays pinned
    until a graph that shares it is unpinned, or as long as one lives that was pinned or asked
    whether it is.  Raises as `pin_memory_inplace`; nothing is pinned then.
    """
    if _find_pins(index) is None:
        tensors = TensorIndex.from_dgl(index, "cpu")
        memory = [_pin(t) for relation in tensors.relations for t in relation.tensors()]
        vars(index)["_pins"] = _Pins(memory, tensors)
    return index


def pin_copy(index: HeteroGraphIndex) -> HeteroGraphIndex:
    """A copy of a graph in pinned memory of torch's, unless it is: ``_CAPI_DGLHeteroPinMemory``."""
    if _find_pins(index) is not None:
        return index
    if not can_pin():
        raise UnavailableError(
            "copy a graph to pinned memory",
            "torch sees no GPU",
            "leave the graph as it is, or use a machine with a GPU",
        )
    num_nodes = [index.num_nodes(ntype) for ntype in range(index.number_of_ntypes())]
    if isinstance(index, TensorIndex):
        pinned = [relation.mapped(torch.Tensor.pin_memory) for relation in index.relations]
        return pin_index(TensorIndex(index.schema, num_nodes, pinned))
    relations = [
        _copy_relation(index.get_relation_graph(etype)) for etype in range(index.number_of_etypes())
    ]
    return pin_index(
        create_heterograph_from_relations(index.metagraph, relations, toindex(num_nodes))
    )


def unpin_index(index: HeteroGraphIndex) -> HeteroGraphIndex:
    """Unpin a graph's memory: ``_CAPI_DGLHeteroUnpinMemory_``.

    Every graph that shares it is unpinned with it.
    """
    pins = _find_pins(index)
    if pins is not None:
        for memory in pins.memory:
            memory.unpin_memory_()
        del vars(index)["_pins"]
    return index


def is_index_pinned(index: HeteroGraphIndex) -> bool:
    """Whether a graph's memory has been pinned as one's: ``_CAPI_DGLHeteroIsPinned``."""
    return _find_pins(index) is not None


def pinned_tensors(index: HeteroGraphIndex) -> TensorIndex | None:
    """A pinned graph in tensors on the CPU that are its memory; None if it is not pinned."""
    pins = _find_pins(index)
    if pins is None:
        return None
    if pins.tensors is None:
        pins.tensors = TensorIndex.from_dgl(index, "cpu")
    return pins.tensors


def pin_where_gpus_are(index: HeteroGraphIndex) -> None:
    """Pin a graph that was pinned where it was pickled, if there is a GPU here for which to."""
    if can_pin():
        pin_index(index)


def _copy_relation(relation: HeteroGraphIndex) -> HeteroGraphIndex:
    states = _states_of(relation)
    arrays = [F.to_dgl_nd(F.from_dgl_nd(array).pin_memory()) for array in states.arrays]
    return _from_states(_make_states(states.version, states.meta, arrays))


def _pin(tensor: torch.Tensor) -> PinnedMemory:
    if tensor.numel() == 0:
        return pin_memory_inplace(tensor)
    memory = _memory_at(tensor.data_ptr())
    if memory is None:
        memory = _by_address[tensor.data_ptr()] = pin_memory_inplace(tensor)
    return memory


def _memory_at(address: int) -> PinnedMemory | None:
    """What a graph has pinned there."""
    memory = _by_address.get(address)
    return memory if memory is not None and memory.is_pinned else None


def _find_pins(index: HeteroGraphIndex) -> _Pins | None:
    pins = vars(index).get("_pins")
    if pins is not None and pins.are_valid:
        return pins
    pins = _shared_pins(index) if _by_address else None
    if pins is None:
        vars(index).pop("_pins", None)
    else:
        vars(index)["_pins"] = pins
    return pins


def _shared_pins(index: HeteroGraphIndex) -> _Pins | None:
    """What graphs have pinned of the memory of this one, if it is each relation in a format."""
    pinned: list[PinnedMemory] = []
    for etype in range(index.number_of_etypes()):
        relation = index.get_relation_graph(etype)
        memory = _pinned_formats(relation)
        if not memory and relation.num_edges(0) > 0:
            return None
        pinned += memory
    return _Pins(pinned) if pinned else None


def _pinned_formats(relation: HeteroGraphIndex) -> list[PinnedMemory]:
    pinned: list[PinnedMemory] = []
    for addresses in _addresses(relation):
        first, second = map(_memory_at, addresses)
        if first is not None and second is not None:
            pinned += first, second
    return pinned


def _addresses(relation: HeteroGraphIndex) -> list[tuple[int, int]]:
    """Of the first two arrays of each format: edge ids, the third, may be only places."""
    if isinstance(relation, TensorIndex):
        (edges,) = relation.relations
        held = [edges.held(name) for name in edges.created]
        return [(matrix[0].data_ptr(), matrix[1].data_ptr()) for matrix in held if matrix]
    addresses = [array.handle.contents.data or 0 for array in _states_of(relation).arrays]
    by_format = []
    for name in relation.formats()["created"]:
        by_format.append((addresses[0], addresses[1]))
        addresses = addresses[_ARRAYS[name] :]
    return by_format
