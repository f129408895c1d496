"""Data parallelism: one model on all ranks, whose gradients are the mean of theirs.

In place of torch's DistributedDataParallel, which builds its buckets anew after its first step.
Where a number lies in a bucket decides in which order ranks' numbers are added up, so a run that
went on from a checkpoint differed in last digits from one that had not stopped, from three ranks
on.  Here gradients are exchanged in one message, whose order is the parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


def take_first_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Have parameters or buffers be those of the first rank; collective.

    ``tensors``: of the same shapes and dtypes on all ranks.
    """
    if dist.is_initialized():
        for each in tensors:
            dist.broadcast(each.detach(), 0)


def flattened_gradients(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """One after another, also of those that have none: other ranks' mini-batches may differ."""
    gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    return torch.cat([each.flatten() for each in gradients])


def average_gradients(parameters: Sequence[torch.Tensor], flat: torch.Tensor | None = None) -> None:
    """Have gradients be the mean over ranks, zeros where none has any; collective.

    The same gradients give the same bits, whatever was computed before. ``parameters``: the same on
    all ranks, of floating-point dtypes. ``flat`` (Tensor, shape (numbers of all parameters,)):
    :func:`flattened_gradients`, where that is there already; overwritten.
    """
    if not dist.is_initialized():
        return
    if flat is None:
        flat = flattened_gradients(parameters)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split_with_sizes([each.numel() for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
