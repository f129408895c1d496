"""Row gather over tiers: specifications and public functions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids, check_integer
from dgl_mgpu.ops.host_reads import HostCounters
from dgl_mgpu.ops.library import Operator, Size, Written, call
from dgl_mgpu.ops.view import HOST_SMS, RowView, TieredRows


class GatherTuning(NamedTuple):
    """How a GPU gathers; the fields are those of :class:`RowView`."""

    host_start: Size = -1
    sms: int = 0
    host_sms: int = HOST_SMS
    host_share: float = 1.0


class DiskCache(NamedTuple):
    """The cache of rows on disk (:class:`dgl_mgpu.ops.view.DiskRows`), and what it lacks.

    Attributes
    ----------
    miss_positions : Tensor, int64, shape (n,)
        For each row gathered, its position if it has to be read from disk, else -1.
    """

    tags: torch.Tensor
    cache: torch.Tensor
    miss_positions: Written


@Operator
def gather_rows_op(
    out: Written,
    ids: torch.Tensor,
    table: TieredRows,
    tuning: GatherTuning,
    stored: torch.dtype | None = None,
    disk: DiskCache | None = None,
    counters: HostCounters | None = None,
) -> None:
    return None


@Operator
def count_tiers_op(
    counts: Written, ids: torch.Tensor, tiers: torch.Tensor, position: torch.Tensor, num_rows: Size
) -> None:
    return None


#: Element types that can be cast while rows are gathered, and those they can be cast to.
CASTS_FROM = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
#: ``DiskCache`` and ``HostCounters`` of a gather without them.
_NO_DISK_CACHE = (None, None, None)
_NO_COUNTERS = (None, None)
CASTS_TO = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def gather_rows(
    view: RowView,
    ids: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    sms: int = 0,
) -> torch.Tensor:
    """Copy rows of a table from wherever they are kept.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids, in any order and with repeats.
    out : Tensor, optional
        Contiguous, of the dtype asked for and shape ``(n, *view.row_shape)``; its content is
        undefined if an error is raised.
    dtype : torch.dtype, optional
        float32, float16, bfloat16 or float64: cast the rows on the way, to what torch's
        ``.to(dtype)`` gives.  ``view.dtype`` by default, as stored.
    sms : int
        Most multiprocessors of a GPU to use; 0 for ``view.sms``, and for ``view.host_sms`` where
        rows lie in host memory.  A small part of them fills a link, and the rest is then left to
        kernels that run meanwhile.

    Returns
    -------
    Tensor, ``dtype``, shape (n, *view.row_shape)
        ``out``, or a new tensor on the device of ``ids``.

    Raises
    ------
    InvalidInputError
        If ``ids`` or ``out`` has the wrong dtype, shape or device, or the table's element type
        cannot be cast to ``dtype``.
    IdOutOfRangeError
        If an id is negative or not smaller than ``view.num_rows``; it names the first one.  On a
        GPU, which the host does not wait for, the row is zero and the error is raised by the next
        operator call on that device or by :func:`dgl_mgpu.ops.device.raise_faults`.

    Notes
    -----
    Global gather of WholeGraph (section III-C) on the modulo layout of XGNN (section 4.3).

    A gather from a view with rows on disk (``view.disk``) waits for the GPU: the kernel says
    which rows it lacks, and the CPU reads these.  Such gathers of one table take turns.
    """
    asked = f"gather rows of a table of {view.num_rows} rows"
    ids = check_ids(ids, asked, view.tiers.device)
    dtype = _checked_dtype(view.dtype, dtype, asked)
    shape = (ids.numel(), *view.row_shape)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=ids.device)
    elif (
        tuple(out.shape) != shape
        or out.dtype != dtype
        or out.device != ids.device
        or not out.is_contiguous()
    ):
        layout = "contiguous" if out.is_contiguous() else "not contiguous"
        raise InvalidInputError(
            asked,
            f"out has shape {tuple(out.shape)} and dtype {out.dtype}, and it is {layout} on"
            f" '{out.device}'",
            f"pass a contiguous out of shape {shape} and dtype {dtype} on '{ids.device}'",
        )
    sms = check_integer(sms, "sms", 0, asked)
    # Where all rows are the host's, a limit is meant for them.
    host_sms = sms if sms and view.host_start == 0 else view.host_sms
    tensors = (out, ids, view.tiers, view.pointers, view.position)
    host_share = view.host_share
    counters: tuple[torch.Tensor | None, torch.Tensor | None] = _NO_COUNTERS
    reads = None if torch.compiler.is_compiling() else view.host_reads
    if reads is not None and view.host_start >= 0 and out.is_cuda:
        host_share, counters = reads.share(host_share), reads.counters(out.device)
    others = (
        view.num_rows, view.host_start, sms or view.sms, host_sms, host_share,
        None if dtype == view.dtype else view.dtype,
    )  # fmt: skip
    if view.disk is None or out.numel() == 0:
        call("gather_rows", tensors, *others, *_NO_DISK_CACHE, *counters)
        return out
    with view.disk.lock:
        miss_positions = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        call("gather_rows", tensors, *others, view.disk.tags, view.disk.cache, miss_positions)
        view.disk.fetch(out, miss_positions)
    return out


def _checked_dtype(stored: torch.dtype, wanted: torch.dtype | None, asked: str) -> torch.dtype:
    if wanted is None or wanted == stored:
        return stored
    if wanted not in CASTS_TO or stored not in CASTS_FROM:
        known = CASTS_TO if stored in CASTS_FROM else (stored,)
        raise InvalidInputError(
            asked,
            f"dtype is {wanted}, but the elements are stored as {stored}",
            f"ask for {', '.join(map(str, known))}, or cast what is gathered",
        )
    return wanted


def count_tiers(
    view: RowView, ids: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Count how many of the rows asked for each segment serves.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids, in any order and with repeats.
    counts : Tensor, int64, shape (len(view.pointers),), optional
        What an earlier call has returned, to add to.

    Returns
    -------
    Tensor, int64, shape (len(view.pointers),)
        ``counts``, or a new tensor that sums to n: rows of each segment, in the order of
        ``view.pointers``.  Tier ``t`` has the entries ``view.tiers[t, FIRST]`` to
        ``view.tiers[t, FIRST] + view.tiers[t, PARTS]``.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As :func:`gather_rows`.
    """
    asked = f"count tiers of a table of {view.num_rows} rows"
    ids = check_ids(ids, asked, view.tiers.device)
    num_segments = view.pointers.shape[0]
    if counts is None:
        counts = torch.zeros(num_segments, dtype=torch.int64, device=ids.device)
    elif (
        not isinstance(counts, torch.Tensor)
        or counts.shape != (num_segments,)
        or counts.dtype != torch.int64
        or counts.device != ids.device
        or not counts.is_contiguous()
    ):
        raise InvalidInputError(
            asked,
            f"counts is {counts!r:.200}",
            f"pass what an earlier call has returned: int64, shape ({num_segments},), on"
            f" '{ids.device}'",
        )
    call("count_tiers", (counts, ids, view.tiers, view.position), view.num_rows)
    return counts
