"""Overrides in `dgl.backend.pytorch.tensor`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dgl_mgpu.graph.originals import originals

_TENSOR = "dgl.backend.pytorch.tensor:"


def zerocopy_to_dgl_ndarray(data: torch.Tensor) -> Any:
    """DGL's array of a tensor on the CPU; a tensor on a GPU itself."""
    from dgl_mgpu.graph.dispatch import is_passed_as_tensor

    if is_passed_as_tensor(data):
        return data.byte() if data.dtype == torch.bool else data.contiguous()
    return originals[_TENSOR + "zerocopy_to_dgl_ndarray"](data)


def zerocopy_to_dgl_ndarray_for_write(input: torch.Tensor) -> Any:  # DGL's name
    """The same, for an array that is written to."""
    from dgl_mgpu.graph.dispatch import is_passed_as_tensor

    if is_passed_as_tensor(input):
        return input
    return originals[_TENSOR + "zerocopy_to_dgl_ndarray_for_write"](input)


def zerocopy_from_numpy(np_array: np.ndarray) -> torch.Tensor:  # DGL's name
    """A tensor that shares an array's memory, on the CPU whatever torch's default device is."""
    return torch.as_tensor(np_array, device="cpu")


def zerocopy_from_dgl_ndarray(data: Any) -> torch.Tensor:
    """A tensor of DGL's array; a tensor itself."""
    if isinstance(data, torch.Tensor):
        return data
    return originals[_TENSOR + "zerocopy_from_dgl_ndarray"](data)


def pad_packed_tensor(
    input: torch.Tensor, lengths: Any, value: float, l_min: int | None = None
) -> torch.Tensor:
    """In place of DGL's, which adds to one place twice where two graphs begin there.

    ``input`` has shape (n, *shape), ``lengths`` (batch,); the result (batch, longest, *shape).
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=input.device)
    longest = max(int(lengths.max()), l_min or 0)
    padded = input.new_full((len(lengths) * longest, *input.shape[1:]), value)
    padded[_places(lengths, longest, len(input))] = input
    return padded.view(len(lengths), longest, *input.shape[1:])


def pack_padded_tensor(input: torch.Tensor, lengths: Any) -> torch.Tensor:
    """In place of DGL's: the rows of each padded graph, the inverse of `pad_packed_tensor`."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=input.device)
    places = _places(lengths, input.shape[1], int(lengths.sum()))
    return input.reshape(-1, *input.shape[2:])[places]


def _places(lengths: torch.Tensor, longest: int, rows: int) -> torch.Tensor:
    """Where the rows are among padded ones."""
    starts = longest * torch.arange(len(lengths), device=lengths.device)
    shift = starts - (lengths.cumsum(0) - lengths)
    shift = shift.repeat_interleave(lengths, output_size=rows)
    return torch.arange(rows, device=lengths.device) + shift


def sparse_matrix(
    data: torch.Tensor,
    index: tuple[str, torch.Tensor],
    shape: tuple[int, int],
    force_format: bool = False,
) -> tuple[torch.Tensor, None]:
    """DGL's function of this name, with torch's check of the indices set to what it is.

    Torch warns where nobody has said whether it should check them.
    """
    original = originals["dgl.backend.pytorch.tensor:sparse_matrix"]
    checks = torch.sparse.check_sparse_tensor_invariants
    with checks(enable=checks.is_enabled()):
        return original(data, index, shape, force_format)
