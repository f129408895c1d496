"""Append-unique: the contract."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids
from dgl_mgpu.ops.library import Operator


@Operator
def append_unique_op(
    seeds: torch.Tensor, neighbors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return neighbors.new_empty(total), torch.empty_like(neighbors)


def append_unique(
    seeds: torch.Tensor, neighbors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the nodes of a sample: seeds first, then each new neighbor as it comes.

    Parameters
    ----------
    seeds : Tensor, int32 or int64, shape (n,)
        Destination nodes.
    neighbors : Tensor, same dtype, shape (E,)
        Source nodes of the sampled edges.

    Returns
    -------
    nodes : Tensor, same dtype, shape (m,)
        ``seeds`` as given, so that row ``i`` of a block's destination is seed ``i`` (a repeated
        seed has a row of its own, as in ``dgl.to_block``); then the neighbors that are not
        among them, once each, by first occurrence.
    local : Tensor, same dtype, shape (E,)
        Index in ``nodes`` of each neighbor; the first one where a seed is repeated.

    Raises
    ------
    InvalidInputError
        If the inputs are not two vectors of one integer dtype.
    IdOutOfRangeError
        If an id is negative.

    Notes
    -----
    Same result as WholeGraph's append-unique (section III-C) but for the order of the new
    nodes, which there is the order of a hash table.
    """
    asked = "append unique neighbors to seeds"
    seeds = check_ids(seeds, asked)
    neighbors = check_ids(neighbors, asked, seeds.device)
    if seeds.dtype != neighbors.dtype:
        raise InvalidInputError(
            asked,
            f"seeds has dtype {seeds.dtype}, but neighbors has dtype {neighbors.dtype}",
            "convert one to the dtype of the other",
        )
    if seeds.numel() + neighbors.numel() > torch.iinfo(seeds.dtype).max:
        raise InvalidInputError(
            asked,
            f"there are more ids than {seeds.dtype} can number",
            "pass int64 ids or a smaller batch",
        )
    return torch.ops.dgl_mgpu.append_unique(seeds, neighbors)
