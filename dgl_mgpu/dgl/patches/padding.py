"""Rows of graphs in a batch padded to one length, and back: right for graphs without rows, too."""

from __future__ import annotations

from typing import Any

import torch


def pad_packed_tensor(
    input: torch.Tensor, lengths: Any, value: float, l_min: int | None = None
) -> torch.Tensor:
    """In place of DGL's, which adds to one place twice where two graphs begin there.

    Parameters
    ----------
    input : Tensor, shape (n, *shape)
        Rows of one graph after the other.
    lengths : Tensor or list of int, shape (batch,)
        How many each has.
    value : float
        What fills the rest.
    l_min : int, optional
        The least length.

    Returns
    -------
    Tensor, shape (batch, longest, *shape)
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=input.device)
    longest = max(int(lengths.max()), l_min or 0)
    padded = input.new_full((len(lengths) * longest, *input.shape[1:]), value)
    padded[_places(lengths, longest, len(input))] = input
    return padded.view(len(lengths), longest, *input.shape[1:])


def pack_padded_tensor(input: torch.Tensor, lengths: Any) -> torch.Tensor:
    """In place of DGL's: of each padded graph its rows.

    Parameters
    ----------
    input : Tensor, shape (batch, longest, *shape)
    lengths : Tensor or list of int, shape (batch,)

    Returns
    -------
    Tensor, shape (sum of lengths, *shape)
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=input.device)
    places = _places(lengths, input.shape[1], int(lengths.sum()))
    return input.reshape(-1, *input.shape[2:])[places]


def _places(lengths: torch.Tensor, longest: int, rows: int) -> torch.Tensor:
    """Where the rows are among padded ones."""
    shift = longest * torch.arange(len(lengths), device=lengths.device) - (
        lengths.cumsum(0) - lengths
    )
    return torch.arange(rows, device=lengths.device) + shift.repeat_interleave(
        lengths, output_size=rows
    )
