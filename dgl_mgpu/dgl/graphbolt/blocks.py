"""DGL's blocks of GraphBolt's sampled subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dgl
import torch
from dgl.base import DGLError
from dgl.frame import Frame
from dgl.graphbolt.base import etype_str_to_tuple
from dgl.heterograph import DGLBlock
from torch import Tensor

from dgl_mgpu.graph.block_frames import BlockFrame
from dgl_mgpu.graph.blocks import block_types
from dgl_mgpu.graph.errors import FailedAssertionError
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.sampling.block_sampling import block_index_on_cpu
from dgl_mgpu.utils.types import ETYPE, NTYPE, CanonicalEtype

_NONE = torch.empty(0, dtype=torch.int64)
_INT32_MAX = torch.iinfo(torch.int32).max
#: The attribute of sources that are known to be below a number, and the version that they have.
_BOUND = "_dgl_mgpu_bound"


def mark_compacted(subgraph: Any) -> None:
    """Note that sources are numbers of rows, which samplers of this package make so."""
    cscs, rows, _ = _parts(subgraph)
    for etype, csc in cscs.items():
        _set_bound(csc.indices, len(rows[etype[0]]))


def _set_bound(indices: Tensor, bound: int) -> None:
    if not indices.is_inference():
        setattr(indices, _BOUND, (bound, indices._version))


def _is_bounded(indices: Tensor, bound: int) -> bool:
    known = getattr(indices, _BOUND, None)
    return known is not None and known == (bound, indices._version)


def blocks_of(subgraphs: Sequence[Any]) -> list[DGLBlock]:
    """The blocks of sampled subgraphs, whose indices become int32 where they fit.

    Raises
    ------
    DGLError
        If a source is not among the rows of its subgraph.
    FailedAssertionError
        If a subgraph was not compacted.
    """
    parts = [_parts(subgraph) for subgraph in subgraphs]
    _check(parts)
    blocks = [_block(*part) for part in parts]
    for number, (block, subgraph) in enumerate(zip(blocks, subgraphs, strict=True)):
        _add_ids(block, subgraph, is_first=number == 0)
    return blocks


_Parts = tuple[dict[CanonicalEtype, Any], dict[str, Tensor], dict[str, Tensor]]


def _parts(subgraph: Any) -> _Parts:
    """Edges by type, and the ids of rows and of columns by node type."""
    csc = subgraph.sampled_csc
    rows, columns = subgraph.original_row_node_ids, subgraph.original_column_node_ids
    if rows is None or columns is None:
        name = "original_row_node_ids" if rows is None else "original_column_node_ids"
        raise FailedAssertionError(
            "make blocks", f"Missing `{name}` in sampled subgraph", "compact what was sampled first"
        )
    if not isinstance(csc, dict):
        return {(NTYPE, ETYPE, NTYPE): csc}, {NTYPE: rows}, {NTYPE: columns}
    by_etype = {etype_str_to_tuple(etype): csc[etype] for etype in csc}
    rows, columns = dict(rows), dict(columns)
    for source, _, target in by_etype:  # of a type without nodes there may be nothing
        rows.setdefault(source, _NONE)
        columns.setdefault(target, _NONE)
    return by_etype, rows, columns


def _check(parts: Sequence[_Parts]) -> None:
    """Raise DGLError unless all sources are among the rows; the host waits for a GPU once."""
    unknown = [
        (csc.indices, len(rows[etype[0]]))
        for cscs, rows, _ in parts
        for etype, csc in cscs.items()
        if len(csc.indices) and not _is_bounded(csc.indices, len(rows[etype[0]]))
    ]
    if not unknown:
        return
    ends = torch.stack([torch.stack(torch.aminmax(indices)).long() for indices, _ in unknown])
    for (low, high), (_, bound) in zip(ends.tolist(), unknown, strict=True):
        if low < 0 or high >= bound:
            raise DGLError(
                f"a source of a sampled subgraph is {low if low < 0 else high}, and there are"
                f" {bound} rows: number sources as original_row_node_ids does, from 0 on"
            )


def _block(
    cscs: dict[CanonicalEtype, Any], rows: dict[str, Tensor], columns: dict[str, Tensor]
) -> DGLBlock:
    """A block without columns in its frames, of types in the order of their names."""
    srctypes, dsttypes, etypes = sorted(rows), sorted(columns), sorted(cscs)
    num_src = [len(rows[ntype]) for ntype in srctypes]
    num_dst = [len(columns[ntype]) for ntype in dsttypes]
    tensors = [_narrowed(cscs[etype], len(rows[etype[0]])) for etype in etypes]
    types = block_types(srctypes, etypes, dsttypes)
    node_frames = [Frame(num_rows=count) for count in (*num_src, *num_dst)]
    edge_frames = [Frame(num_rows=len(indices)) for _, indices in tensors]
    if tensors and tensors[0][1].device.type != "cpu":
        relations = [
            Relation(num_src[src], num_dst[dst], csc=Compressed(indptr, indices, None))
            for (indptr, indices), (src, dst) in zip(tensors, types.ends, strict=True)
        ]
        return types.of_frames(relations, [*num_src, *num_dst], node_frames, edge_frames)
    # DGL's CPU kernels for edge features refuse a graph without explicit ids.
    with_ids = [
        (indptr, indices, torch.arange(len(indices), dtype=indices.dtype))
        for indptr, indices in tensors
    ]
    index = block_index_on_cpu(num_src, num_dst, types.ends, with_ids)
    names = [etype for _, etype, _ in etypes]
    return DGLBlock(
        index, (srctypes, dsttypes), names, node_frames=node_frames, edge_frames=edge_frames
    )


def _narrowed(csc: Any, bound: int) -> tuple[Tensor, Tensor]:
    """A subgraph's tensors as int32, if they fit, which they become in it, too."""
    indptr, indices = csc.indptr, csc.indices
    fits = max(len(indptr) - 2, len(indices)) <= _INT32_MAX
    dtype = torch.int32 if fits else torch.int64
    if indptr.dtype != dtype:
        csc.indptr = indptr = indptr.to(dtype)
    if indices.dtype != dtype:
        is_bounded = _is_bounded(indices, bound)
        csc.indices = indices = indices.to(dtype)
        if is_bounded:
            _set_bound(indices, bound)
    return indptr, indices


def _add_ids(block: DGLBlock, subgraph: Any, *, is_first: bool) -> None:
    """Original ids as GraphBolt gives them: of the first block's sources, and of edges."""
    rows, eids = subgraph.original_row_node_ids, subgraph.original_edge_ids
    if isinstance(subgraph.sampled_csc, dict):
        if is_first:
            for ntype, ids in rows.items():
                block.srcnodes[ntype].data[dgl.NID] = ids
        for etype, ids in (eids or {}).items():
            block.edges[etype_str_to_tuple(etype)].data[dgl.EID] = ids
        return
    if is_first:
        block._node_frames[0] = BlockFrame(dgl.NID, rows, len(rows))
    if eids is not None:
        if len(eids) != block._edge_frames[0].num_rows:
            raise DGLError(
                f"a sampled subgraph has {block._edge_frames[0].num_rows} edges, and"
                f" {len(eids)} original_edge_ids: pass one for each"
            )
        block._edge_frames[0] = BlockFrame(dgl.EID, eids, len(eids))
