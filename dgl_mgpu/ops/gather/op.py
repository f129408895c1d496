"""Row gather over tiers: the contract."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids, check_integer
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.view import RowView

library.define(
    "gather_rows(Tensor(a!) out, Tensor ids, Tensor tiers, Tensor pointers, Tensor position,"
    " SymInt num_rows, SymInt host_start=-1, int sms=0) -> ()"
)
library.define(
    "count_tiers(Tensor ids, Tensor tiers, Tensor pointers, Tensor position, SymInt num_rows)"
    " -> Tensor"
)


@torch.library.register_fake("dgl_mgpu::gather_rows", lib=library)
def _gather_rows_fake(
    out: torch.Tensor,
    ids: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    host_start: int = -1,
    sms: int = 0,
) -> None:
    return None


@torch.library.register_fake("dgl_mgpu::count_tiers", lib=library)
def _count_tiers_fake(
    ids: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    return ids.new_empty(pointers.shape[0], dtype=torch.int64)


def gather_rows(
    view: RowView, ids: torch.Tensor, out: torch.Tensor | None = None, *, sms: int = 0
) -> torch.Tensor:
    """Copy rows of a table from wherever they are kept.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids, in any order and with repeats.
    out : Tensor, optional
        Contiguous, of ``view.dtype`` and shape ``(n, *view.row_shape)``; its content is
        undefined if an error is raised.
    sms : int
        Most multiprocessors of a GPU to use; 0 for as many as are free.  A small part of them
        fills a link, and the rest is then left to kernels that run meanwhile.

    Returns
    -------
    Tensor, ``view.dtype``, shape (n, *view.row_shape)
        ``out``, or a new tensor on the device of ``ids``.

    Raises
    ------
    InvalidInputError
        If ``ids`` or ``out`` has the wrong dtype or shape.
    IdOutOfRangeError
        If an id is negative or not smaller than ``view.num_rows``; it names the first one.  On a
        GPU, which nobody waits for here, the row is zero and the error is raised by the next
        operator call on that device or by :func:`dgl_mgpu.ops.device.raise_faults`.

    Notes
    -----
    Global gather of WholeGraph (section III-C) on the modulo layout of XGNN (section 4.3).
    """
    asked = f"gather rows of a table of {view.num_rows} rows"
    ids = check_ids(ids, asked)
    shape = (ids.numel(), *view.row_shape)
    if out is None:
        out = torch.empty(shape, dtype=view.dtype, device=ids.device)
    elif tuple(out.shape) != shape or out.dtype != view.dtype or not out.is_contiguous():
        layout = "contiguous" if out.is_contiguous() else "not contiguous"
        raise InvalidInputError(
            asked,
            f"out has shape {tuple(out.shape)}, dtype {out.dtype} and is {layout}",
            f"pass a contiguous out of shape {shape} and dtype {view.dtype}",
        )
    sms = check_integer(sms, "sms", 0, asked)
    torch.ops.dgl_mgpu.gather_rows.default(
        out, ids, view.tiers, view.pointers, view.position, view.num_rows, view.host_start, sms
    )
    return out


def count_tiers(view: RowView, ids: torch.Tensor) -> torch.Tensor:
    """Count how many of the rows asked for each segment serves.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids, in any order and with repeats.

    Returns
    -------
    Tensor, int64, shape (len(view.pointers),)
        Rows of each segment, in the order of ``view.pointers``: tier ``t`` has the entries
        ``view.tiers[t, FIRST]`` to ``view.tiers[t, FIRST] + view.tiers[t, PARTS]``.  Sums to n.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As :func:`gather_rows`.
    """
    ids = check_ids(ids, f"count tiers of a table of {view.num_rows} rows")
    return torch.ops.dgl_mgpu.count_tiers(
        ids, view.tiers, view.pointers, view.position, view.num_rows
    )
