"""Tables in host memory as tensors: of the host, and of a GPU that reads them there."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from dgl_mgpu.ops import RowView


def host_rows(view: RowView) -> torch.Tensor:
    """A table that is in host memory, in the order of its ids, as a tensor over that memory.

    Raises
    ------
    ValueError
        If it is elsewhere, too, or in another order.
    """
    on_gpus = view.pointers.is_cuda and view.host_start != 0
    if len(view.pointers) != 1 or view.position.numel() or on_gpus:
        raise ValueError(f"{view.num_rows} rows are not in one piece of the host's memory")
    # The host and its GPUs know registered memory by the same address.
    memory = (ctypes.c_char * (view.num_rows * view.row_bytes)).from_address(int(view.pointers))
    return torch.frombuffer(memory, dtype=view.dtype).view(view.num_rows, *view.row_shape)


def mapped(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows of the host's memory, which is registered with a GPU, as a tensor of that GPU: its
    kernels read them where they are.  On a CPU, the rows themselves.

    Raises
    ------
    ValueError
        If they were copied.
    """
    if device.type != "cuda":
        return rows
    memory = SimpleNamespace(__cuda_array_interface__=rows.numpy().__array_interface__)
    found = torch.as_tensor(memory, device=device)
    if found.data_ptr() != rows.data_ptr():
        raise ValueError(f"{len(rows)} rows were copied to {device}, not mapped")
    return found
