"""The smallest numbers of each of several groups."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.cpu import kernel

#: Groups worth a thread.
_GRAIN = 1 << 9


def smallest_of_groups(values: Tensor, bounds: Tensor, most: Tensor) -> Tensor:
    """Which numbers are among the smallest of their group; of equal ones the first are.

    Parameters
    ----------
    values : Tensor, float64, shape (n,)
        Group after group; infinite numbers are none of the smallest.
    bounds : Tensor, int64, shape (groups + 1,)
        Group ``i`` has the numbers ``bounds[i]`` to ``bounds[i + 1]``.
    most : Tensor, int64, shape (groups,)
        How many numbers of each group are taken, where there are as many; negative for all.

    Returns
    -------
    Tensor, bool, shape (n,)
    """
    if values.device.type == "cpu":
        chosen = torch.zeros(len(values), dtype=torch.bool)
        arrays = (it.contiguous().numpy() for it in (values, bounds, most))
        cpu.run(_mark_smallest, len(most), _GRAIN, *arrays, chosen.numpy())
        return chosen
    lengths = bounds.diff()
    groups = torch.arange(len(most), device=values.device)
    groups = groups.repeat_interleave(lengths, output_size=len(values))
    order = values.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - bounds[:-1][groups[order]]
    limit = most[groups]
    return (values < float("inf")) & ((limit < 0) | (ranks < limit))


@kernel
def _mark_smallest(
    begin: int, end: int, values: np.ndarray, bounds: np.ndarray, most: np.ndarray,
    chosen: np.ndarray,
) -> None:  # fmt: skip
    for group in range(begin, end):
        first, last, left = bounds[group], bounds[group + 1], most[group]
        if left < 0 or last - first <= left:
            for place in range(first, last):
                chosen[place] = values[place] < np.inf
            continue
        if left == 0:
            continue
        # All below the largest number to be taken, and as many of these as are left.
        limit = np.partition(values[first:last], left - 1)[left - 1]
        for place in range(first, last):
            if values[place] < limit:
                chosen[place] = True
                left -= 1
        if limit < np.inf:
            for place in range(first, last):
                if left > 0 and values[place] == limit:
                    chosen[place] = True
                    left -= 1
