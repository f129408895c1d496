"""Dropout by counter: an element's fate follows from where it is, so that no mask is kept."""

from __future__ import annotations

import torch

# Constants of MurmurHash3's 32-bit finaliser (Appleby, 2011), as signed numbers.
_FIRST, _SECOND = -2048144789, -1028477387
# Elements that are decided on at a time, so that their numbers are no buffer.
_AT_ONCE = 1 << 24


def drop_(rows: torch.Tensor, nodes: torch.Tensor, key: int, rate: float) -> None:
    """Set elements to 0 with a chance of ``rate``, and raise the others so that means stay.

    Parameters
    ----------
    rows : Tensor, shape (num_nodes, width)
        Changed in place.
    nodes : Tensor, int64, shape (num_nodes,)
        Which elements are taken depends on these, on the column and on ``key`` alone.
    key : int
        Signed, 64 bits.
    rate : float
        In [0, 1).
    """
    width = rows.shape[1]
    low, high = _signed(key), _signed(key >> 32)
    columns = _mix_(torch.arange(width, dtype=torch.int32, device=rows.device).bitwise_xor_(high))
    highest = min(int(rate * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    at_once = max(1, _AT_ONCE // width)
    for some, ids in zip(rows.split(at_once), nodes.split(at_once), strict=True):
        words = _mix_(ids.to(torch.int32).bitwise_xor_(low)).unsqueeze(1) + columns
        some.masked_fill_(_mix_(words) < highest, 0)
    rows *= 1 / (1 - rate)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of every int32, in place (MurmurHash3's finaliser)."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _FIRST
    words ^= (words >> 13).bitwise_and_(0x7FFFF)
    words *= _SECOND
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words
