"""What the functions of `dgl.sparse` ask of their arguments."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError

INDEX_DTYPES = (torch.int32, torch.int64)


def check_indices(asked: str, **indices: torch.Tensor) -> None:
    """Raise unless all are tensors, 1-dimensional, of one index dtype and on one device."""
    for name, index in indices.items():
        if not isinstance(index, torch.Tensor):
            found = f"{name} is of type {type(index).__name__}"
            raise InvalidInputError(asked, found, "pass a tensor")
    dtypes = {index.dtype for index in indices.values()}
    if len(dtypes) > 1 or not dtypes <= set(INDEX_DTYPES):
        found = ", ".join(f"{name} has dtype {index.dtype}" for name, index in indices.items())
        raise InvalidInputError(asked, found, "pass int64 tensors, or int32 tensors")
    for name, index in indices.items():
        if index.dim() != 1:
            found = f"{name} has shape {tuple(index.shape)}"
            raise InvalidInputError(asked, found, "pass a tensor of one dimension")
    if len({index.device for index in indices.values()}) > 1:
        found = ", ".join(f"{name} is on {index.device}" for name, index in indices.items())
        raise InvalidInputError(asked, found, "pass tensors on one device")


def outside(ids: torch.Tensor, bound: int) -> torch.Tensor:
    """Whether an id is not in ``[0, bound)``; a tensor, for which the host need not wait."""
    return ((ids < 0) | (ids >= bound)).any()


def check_range(asked: str, *bounds: tuple[torch.Tensor, int]) -> None:
    """Raise unless all ids of each tensor are in ``[0, bound)``; the host waits once."""
    if not bool(torch.stack([outside(*pair) for pair in bounds]).any()):
        return
    for ids, bound in bounds:
        found = ids[(ids < 0) | (ids >= bound)]
        if found.numel():
            raise IdOutOfRangeError(
                asked,
                f"there is no place for index {int(found[0])}",
                f"pass indices in [0, {bound})",
            )


def check_value(asked: str, value: torch.Tensor, nnz: int, device: torch.device) -> None:
    """Raise unless there is a value for each non-zero, where the indices are."""
    if value.dim() not in (1, 2) or value.shape[0] != nnz:
        raise InvalidInputError(
            asked,
            f"the values have shape {tuple(value.shape)}, but there are {nnz} non-zeros",
            f"pass values of shape ({nnz},) or ({nnz}, D)",
        )
    if value.device != device:
        raise InvalidInputError(
            asked,
            f"the values are on {value.device}, but the indices are on {device}",
            "move one to the other",
        )


def check_dim(asked: str, dim: int) -> None:
    """Raise unless `dim` is 0, for columns, or 1, for rows."""
    if dim not in (0, 1):
        raise InvalidInputError(asked, f"there is no dim={dim}", "use 0 or 1")


def check_places(asked: str, shape: tuple[int, int]) -> None:
    """Raise unless the places of a matrix can be numbered in 64 bits."""
    if shape[0] * shape[1] >= 1 << 63:
        raise InvalidInputError(
            asked, f"the matrix has shape {shape}", "pass one of less than 2^63 places"
        )


def check_same(asked: str, **tensors: torch.Tensor) -> None:
    """Raise unless all have one dtype and are on one device."""
    for what in ("dtype", "device"):
        if len({getattr(tensor, what) for tensor in tensors.values()}) > 1:
            found = ", ".join(
                f"{name} has {what} {getattr(t, what)}" for name, t in tensors.items()
            )
            raise InvalidInputError(asked, found, f"convert them to one {what}")
