"""Access to the store from your own kernels, written in Python with ``numba.cuda.jit``.

The three accessors of XGNN's global GNN memory store (section 3, figure 5) as device functions::

    from dgl_mgpu.ops.numba_cuda import cuda, feature, graph_of, neighbor, num_neighbors, table_of

    @cuda.jit
    def degrees(graph, nodes, out):
        i = cuda.grid(1)
        if i < nodes.size:
            out[i] = num_neighbors(graph, nodes[i])

    degrees[blocks, threads](graph_of(view), nodes, out)

``docs/howto/own-kernels.md`` has a longer example, and ``kernels/ggms.cuh`` the same for CUDA C++.
Import ``cuda`` from here: the package numba-cuda as released does not import with NumPy 2.5.

Nothing else of this package imports this module: it needs numba-cuda, which imports CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.ops.view import (
    EIDS,
    FIRST,
    INDICES,
    INDPTR,
    PAIRED,
    PARTS,
    START,
    STOP,
    GraphView,
    RowView,
)


def _import_numba_cuda() -> Any:
    # numba-cuda uses `row_stack` at import, which NumPy 2.5 removed.
    is_missing = not hasattr(np, "row_stack")
    if is_missing:
        np.row_stack = np.vstack  # type: ignore[attr-defined]
    try:
        cuda = importlib.import_module("numba.cuda")
        importlib.import_module("numba.cuda.extending")
        importlib.import_module("numba.cuda.np.arrayobj")
    except ImportError as error:
        major = (torch.version.cuda or "13").partition(".")[0]
        raise UnavailableError(
            "read the store in Numba's CUDA kernels",
            f"numba-cuda cannot be imported ({error})",
            f"pip install '.[cuda{major}]'",
        ) from error
    finally:
        if is_missing:
            del np.row_stack  # type: ignore[attr-defined]
    return cuda


cuda = _import_numba_cuda()

_inline: Callable[..., Any] = cuda.jit(device=True, forceinline=True)


class Graph(NamedTuple):
    """A graph as kernels take it; made by :func:`graph_of`."""

    tiers: Any
    pointers: Any
    position: Any
    ids: Any


class Table(NamedTuple):
    """A table of rows as kernels take it; made by :func:`table_of`."""

    tiers: Any
    pointers: Any
    position: Any
    elements: Any
    row_size: int


def graph_of(view: GraphView) -> Graph:
    """A graph's view in the form that a kernel takes.

    Make it once and pass it to any number of launches; the view must be kept meanwhile.

    Parameters
    ----------
    view : GraphView
        With its tensors on the GPU that is to run the kernel.

    Raises
    ------
    InvalidInputError
        If the view is not on a GPU.
    """
    return Graph(*_places(view), _typed(view.idtype, view))


def table_of(view: RowView) -> Table:
    """A table's view in the form that a kernel takes; see :func:`graph_of`.

    Raises
    ------
    InvalidInputError
        If the view is not on a GPU, its elements are of a type that NumPy lacks, or some of its
        rows are on disk, where kernels cannot read them.
    """
    if view.disk is not None:
        raise InvalidInputError(
            "pass a table to a kernel in Numba",
            "some of its rows are on disk, which only a gather reads",
            "keep the table in GPU and host memory, or gather its rows for the kernel",
        )
    if view.dtype not in _NUMPY_DTYPES:
        raise InvalidInputError(
            "pass a table to a kernel in Numba",
            f"its elements are of {view.dtype}, a type that NumPy lacks",
            "write the kernel in CUDA C++ (kernels/ggms.cuh), or store another type",
        )
    row_size = view.row_bytes // view.dtype.itemsize
    return Table(*_places(view), _typed(view.dtype, view), row_size)


_NUMPY_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip


def _places(view: GraphView | RowView) -> tuple[Any, Any, Any]:
    if not view.tiers.is_cuda:
        raise InvalidInputError(
            "pass a view to a kernel in Numba",
            f"it is on device '{view.tiers.device}'",
            "use a store on GPUs",
        )
    return (
        cuda.as_cuda_array(view.tiers),
        cuda.as_cuda_array(view.pointers),
        cuda.as_cuda_array(view.position),
    )


def _typed(dtype: torch.dtype, view: GraphView | RowView) -> Any:
    """An array that passes a type to a kernel; its element is never read."""
    return cuda.as_cuda_array(torch.zeros(1, dtype=dtype, device=view.tiers.device))


@cuda.extending.intrinsic
def _load(typing_context, like, address, index):  # type: ignore[no-untyped-def]
    """Element ``index`` of the array at an address, of the type of ``like``'s elements."""
    element = like.dtype

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer_type = context.get_data_type(element).as_pointer()
        pointer = builder.inttoptr(args[1], pointer_type)
        return context.unpack_value(builder, element, builder.gep(pointer, [args[2]]))

    return element(like, cuda.types.int64, cuda.types.int64), codegen


@_inline
def _find(rows, row):  # type: ignore[no-untyped-def]
    """Which segment holds a row, and which of the segment's rows it is."""
    place = np.int64(row)
    if rows.position.size != 0:
        place = np.int64(rows.position[row])
    tier = 0
    while tier + 1 < rows.tiers.shape[0] and place >= rows.tiers[tier, STOP]:
        tier += 1
    offset = place - rows.tiers[tier, START]
    parts = rows.tiers[tier, PARTS]
    first = rows.tiers[tier, FIRST]
    if parts == 1:
        return first, offset
    local = offset // parts
    return first + (offset - local * parts), local


@_inline
def _bounds(graph, segment, local):  # type: ignore[no-untyped-def]
    """Address of a row's first bound, and how many int64 further the next row's is."""
    step = 2 if graph.pointers[segment, EIDS] == PAIRED else 1
    return graph.pointers[segment, INDPTR] + 8 * step * local, step


@_inline
def num_neighbors(graph, node):  # type: ignore[no-untyped-def]
    """In-degree of a node (NumNeighbor), int64; ``node`` must be in ``[0, num_rows)``."""
    segment, local = _find(graph, node)
    first, step = _bounds(graph, segment, local)
    return _load(graph.pointers, first, step) - _load(graph.pointers, first, 0)


@_inline
def neighbor(graph, node, i):  # type: ignore[no-untyped-def]
    """Source of in-edge ``i`` of a node (Neighbors), of the graph's id type.

    ``i`` must be in ``[0, num_neighbors(graph, node))``.
    """
    segment, local = _find(graph, node)
    begin = _load(graph.pointers, _bounds(graph, segment, local)[0], 0)
    return _load(graph.ids, graph.pointers[segment, INDICES], begin + i)


@_inline
def edge_id(graph, node, i):  # type: ignore[no-untyped-def]
    """Id of in-edge ``i`` of a node, of the graph's id type; ``i`` as for :func:`neighbor`."""
    segment, local = _find(graph, node)
    first, _ = _bounds(graph, segment, local)
    eids = graph.pointers[segment, EIDS]
    if eids == PAIRED:
        return graph.ids.dtype.type(_load(graph.pointers, first, 1) + i)
    place = _load(graph.pointers, first, 0) + i
    if eids == 0:  # not stored: an edge's id is its place
        return graph.ids.dtype.type(place)
    return _load(graph.ids, eids, place)


@_inline
def feature(table, node, column):  # type: ignore[no-untyped-def]
    """Element ``column`` of a node's row (Features), of the type as stored.

    ``column`` counts through all dimensions of a row: it must be in ``[0, table.row_size)``.
    """
    segment, local = _find(table, node)
    return _load(table.elements, table.pointers[segment], local * table.row_size + column)
