"""Ids whose values nobody has looked at, as a store takes those on a GPU."""

from __future__ import annotations

import torch


class UnreadIds(torch.Tensor):
    """Ids in the host's memory that say that they are on a GPU, so that no check waits for them."""

    is_cuda = True


def unread(ids: torch.Tensor) -> torch.Tensor:
    """The same ids as such."""
    return ids.as_subclass(UnreadIds)
