"""Shared by several of DGL's convolutions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dgl.heterograph import DGLBlock, DGLGraph
from torch import Tensor
from torch.nn import Dropout

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import is_tensor_backed
from dgl_mgpu.graph.originals import originals

if TYPE_CHECKING:
    from dgl_mgpu.graph.relation import Relation


def forward_with_residual(name: str, module: Any, graph: Any, feat: Any, *others: Any) -> Any:
    """The original ``forward``, also where there is no node: on a rank, or of a type in a block."""
    original = originals[f"dgl.nn.pytorch.conv.{name}.forward"]
    residual = module.res_fc
    if residual is None or graph.num_dst_nodes():
        return original(module, graph, feat, *others)
    # DGL views residuals as rows of so many heads, a number that no rows do not determine.
    without = copy.copy(module)
    without._modules = {**module._modules, "res_fc": None}
    result = original(without, graph, feat, *others)
    # Gives its parameters a gradient of zeros, since on other ranks they have one.
    zero = 0 * residual((feat[1] if isinstance(feat, tuple) else feat)[:0]).sum()
    return (result[0] + zero, *result[1:]) if isinstance(result, tuple) else result + zero


def projected(module: Any, feat: Any, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Rows of sources by head, and of destinations if ``feat`` is a pair, else None."""
    shape = module._num_heads, module._out_feats
    if not isinstance(feat, tuple):
        return module.fc(rows[0]).view(len(rows[0]), *shape), None
    of_source, of_destination = (
        (module.fc_src, module.fc_dst) if hasattr(module, "fc_src") else (module.fc, module.fc)
    )
    return (
        of_source(rows[0]).view(len(rows[0]), *shape),
        of_destination(rows[1]).view(len(rows[1]), *shape),
    )


def relation_of(graph: Any) -> Relation | None:
    """The edges of a graph of tensors that has one edge type and no node types beside its ends.

    None of another graph.
    """
    if type(graph) not in (DGLGraph, DGLBlock) or not is_tensor_backed(graph._graph):
        return None
    from dgl_mgpu.graph.index import TensorIndex

    index = graph._graph
    is_one = type(index) is TensorIndex and index.schema.is_single
    return index.relations[0] if is_one else None


def reduced(graph: DGLGraph, reduce: str, rows: Tensor) -> Tensor:
    """The sum or mean of the rows of each node's in-neighbors, as ``update_all`` has it."""
    from dgl_mgpu.graph.errors import as_dgl_error
    from dgl_mgpu.graph.message_passing.operators import gspmm

    try:
        return gspmm(graph, "copy_lhs", reduce, rows, None)
    except InvalidInputError as error:
        raise as_dgl_error(error) from error


def dropped(dropout: Any, rows: Tensor) -> Tensor:
    """``dropout(rows)``, without a call where it would give the rows, and nobody would notice."""
    from dgl_mgpu.graph.message_passing import attention

    is_idle = (
        attention.is_plain(dropout, Dropout)
        and not (dropout.p and dropout.training)
        and not attention.has_any_global_hook()
    )
    return rows if is_idle else dropout(rows)
