"""Pinned graphs, and their pickling. What runs kernels is imported at the first call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dgl_mgpu.dgl.patches import imported_at_call
from dgl_mgpu.graph.originals import originals

if TYPE_CHECKING:
    from dgl.heterograph_index import HeteroGraphIndex, HeteroPickleStates

_INDEX = "dgl.heterograph_index:"
# Ends the metadata of a pickled graph that is pinned; DGL's C++ ignores what follows its own.
_MARK = b"dgl_mgpu: pinned"


pin_index = imported_at_call("graph.pinning.pinned_graphs:pin_index")
pin_copy = imported_at_call("graph.pinning.pinned_graphs:pin_copy")
unpin_index = imported_at_call("graph.pinning.pinned_graphs:unpin_index")


def is_index_pinned(*arguments: HeteroGraphIndex) -> bool:
    """Whether a graph is pinned; none is before the module that pins was imported."""
    pinned_graphs = sys.modules.get("dgl_mgpu.graph.pinning.pinned_graphs")
    return pinned_graphs is not None and pinned_graphs.is_index_pinned(*arguments)


def pickle_states(*arguments: HeteroGraphIndex) -> HeteroPickleStates:
    """The pickled graph, marked if it is pinned."""
    (index,) = arguments
    return _marked(index, originals[_INDEX + "_CAPI_DGLHeteroPickle"](index))


def forking_pickle_states(*arguments: HeteroGraphIndex) -> HeteroPickleStates:
    """The same for another process of this machine."""
    (index,) = arguments
    return _marked(index, originals[_INDEX + "_CAPI_DGLHeteroForkingPickle"](index))


def set_index_state(self: HeteroGraphIndex, state: Any) -> None:
    """Unpickle a graph, pinned if it was."""
    originals[_INDEX + "HeteroGraphIndex.__setstate__"](self, state)
    if hasattr(state, "meta"):  # old versions of DGL have pickled tuples
        _pin_if_marked(self, state.meta)


def _forking_rebuild(pk_state: tuple[int, bytearray, list[Any]]) -> HeteroGraphIndex:
    """A graph from another process of this machine, pinned if it was there."""
    index = originals[_INDEX + "_forking_rebuild"](pk_state)
    _pin_if_marked(index, pk_state[1])
    return index


def _marked(index: HeteroGraphIndex, states: HeteroPickleStates) -> HeteroPickleStates:
    if not is_index_pinned(index):
        return states
    from dgl.heterograph_index import _CAPI_DGLCreateHeteroPickleStates as make_states

    return make_states(states.version, states.meta + _MARK, states.arrays)


def _pin_if_marked(index: HeteroGraphIndex, meta: bytes | bytearray) -> None:
    if meta.endswith(_MARK):
        from dgl_mgpu.graph.pinning import pinned_graphs

        pinned_graphs.pin_where_gpus_are(index)
