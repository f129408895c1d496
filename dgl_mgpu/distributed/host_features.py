"""Features of nodes that stay in the host's memory while models train on GPUs."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from dgl import DGLGraph

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.memory import free_bytes
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.pinning.pinning import pin_memory_inplace
from dgl_mgpu.ops.check import check_integer

#: Bytes of columns that are brought to a device together: two such slabs are there at a time.
_SLAB_BYTES = 256 << 20
#: Fewer columns are not brought: sums of narrower rows read as much memory.
_MIN_COLUMNS = 16
#: Slabs are so many columns wide, or a multiple, that kernels read them in large pieces.
_ALIGNED_COLUMNS = 8
_ACTION = "keep rows in the host's memory"

#: Makes other rows of a slab's, given its columns; it may change the slab itself.
Change = Callable[[torch.Tensor, slice], torch.Tensor]


class HostRows:
    """Rows of nodes in the host's memory, to be multiplied on a device that cannot hold them all.

    They are kept in slabs of columns, pinned where the device is a GPU.  One slab after the other
    is brought to the device, on a stream of its own, the next one while one is read: two are there
    at a time.  So rows can be summed over edges, which takes all rows of a column, as well as
    multiplied.

    Parameters
    ----------
    rows : Tensor, floating point, shape (num_rows, width)
        On the CPU, with 1 column or more.  Copied: it may be let go of, and no change of it shows.
    device : torch.device
    slab_width : int
        Columns of a slab.  Where slabs are summed over the edges of a `PartitionedGraph`, the same
        on all ranks.

    Attributes
    ----------
    shape : torch.Size
    dtype : torch.dtype
    device : torch.device
        Where slabs are brought to.

    Raises
    ------
    InvalidInputError
        If ``rows`` are not as above, or require a gradient, which they get none of.
    DeviceMemoryError
        If the driver refuses to pin so much.
    """

    def __init__(self, rows: torch.Tensor, device: torch.device | str, slab_width: int) -> None:
        _check(rows)
        check_integer(slab_width, "slab_width", 1, _ACTION)
        bounds = [*range(0, rows.shape[1], slab_width), rows.shape[1]]
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._columns = [slice(*ends) for ends in pairwise(bounds)]
        self._changes: tuple[Change, ...] = ()
        self._memory = _Memory(
            [
                rows[:, columns].clone(memory_format=torch.contiguous_format)
                for columns in self._columns
            ],
            self.device,
        )

    @classmethod
    def of_nodes(cls, g: DGLGraph, rows: torch.Tensor, ntype: str | None = None) -> HostRows:
        """Rows of a graph's nodes, to be brought to where the graph is.

        Parameters
        ----------
        g : DGLGraph
        rows : Tensor, floating point, shape (num_nodes, width)
        ntype : str, optional
            May be left out where there is one.
        """
        _check(rows)
        most = g.num_nodes(ntype)
        if isinstance(g, PartitionedGraph):
            owned = g.ownership[g.ntypes[g.get_ntype_id(ntype)]]
            most = max(owned.count(rank) for rank in range(owned.num_ranks))
        return cls(rows, g.device, _slab_width(most * rows.element_size(), rows.shape[1]))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._memory.num_rows, self._columns[-1].stop))

    @property
    def dtype(self) -> torch.dtype:
        return self._memory.slabs[0].dtype

    def __len__(self) -> int:
        return self._memory.num_rows

    def slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The columns of each slab, and it on the device, until the next one is asked for."""
        for columns, slab in zip(self._columns, self._memory.bring(), strict=True):
            for change in self._changes:
                slab = change(slab, columns)
            yield columns, slab

    def changed(self, change: Change) -> HostRows:
        """What ``change`` makes of the rows, of each slab whenever it is brought to the device."""
        changed = copy.copy(self)
        changed._changes = (*self._changes, change)
        return changed

    def kept(self) -> HostRows:
        """The same with all changes made: in other memory of the host's."""
        kept = copy.copy(self)
        slabs = [torch.empty_like(slab, device="cpu").copy_(slab) for _, slab in self.slabs()]
        kept._memory, kept._changes = _Memory(slabs, self.device), ()
        return kept

    def times(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product with ``weight``, and ``bias`` added.

        Half types are added up in float32, and rounded once: until then there are twice the bytes.

        Parameters
        ----------
        weight : Tensor, shape (width, m)
        bias : Tensor, shape (m,), optional

        Returns
        -------
        Tensor, dtype of ``weight``, shape (num_rows, m)
        """
        precise = torch.promote_types(weight.dtype, torch.float32)
        wide = weight.to(precise)
        out: torch.Tensor | None = None
        for columns, slab in self.slabs():
            slab = slab.to(precise)
            if out is not None:
                out.addmm_(slab, wide[columns])
            elif bias is None:
                out = slab.mm(wide[columns])
            else:
                out = torch.addmm(bias.to(precise), slab, wide[columns])
        assert out is not None  # there is a column
        return out.to(weight.dtype)

    def transposed_times(self, gradient: torch.Tensor) -> torch.Tensor:
        """The product of the transpose with ``gradient``.

        Parameters
        ----------
        gradient : Tensor, shape (num_rows, m)

        Returns
        -------
        Tensor, dtype of ``gradient``, shape (width, m)
        """
        return torch.cat([slab.to(gradient.dtype).t().mm(gradient) for _, slab in self.slabs()])

    def whole(self) -> torch.Tensor:
        """All columns on the device."""
        out: torch.Tensor | None = None
        for columns, slab in self.slabs():
            if out is None:
                out = slab.new_empty(self.shape)
            out[:, columns] = slab
        assert out is not None  # there is a column
        return out


class _Memory:
    """Slabs in the host's memory, pinned where there is a GPU, and the way to the device."""

    def __init__(self, slabs: Sequence[torch.Tensor], device: torch.device) -> None:
        self.slabs = slabs
        self.num_rows = len(slabs[0])
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._pins = [pin_memory_inplace(slab) for slab in slabs]
            self._stream = torch.cuda.Stream(device)
            # The host may be far ahead of a GPU that still reads.
            waiting = weakref.finalize(self, self._stream.synchronize)
            waiting.atexit = False

    def bring(self) -> Iterator[torch.Tensor]:
        """Each slab on the device, in one of two buffers: the next but one overwrites it."""
        buffers = [torch.empty_like(slab, device=self._device) for slab in self.slabs[:2]]

        def start(number: int) -> tuple[torch.Tensor, Callable[[], None]]:
            slab = self.slabs[number]
            room = buffers[number % 2].view(-1)[: slab.numel()].view(slab.shape)
            return room, self._copy(room, slab)

        try:
            following = start(0)
            for number in range(len(self.slabs)):
                arriving, wait = following
                if number + 1 < len(self.slabs):
                    following = start(number + 1)
                wait()
                yield arriving
        finally:
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, out: torch.Tensor, slab: torch.Tensor) -> Callable[[], None]:
        """Begin to copy, after all that is under way; what has torch's current stream wait."""
        if self._stream is None:
            out.copy_(slab)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            out.copy_(slab, non_blocking=True)
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)


def _slab_width(column_bytes: int, width: int) -> int:
    """Columns of a slab, such that all but the last have as many."""
    most = max(_MIN_COLUMNS, _SLAB_BYTES // max(column_bytes, 1))
    of_each = -(-width // -(-width // most))
    return -(-of_each // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def _check(rows: torch.Tensor) -> None:
    if rows.device.type != "cpu":
        raise InvalidInputError(_ACTION, f"the rows are on '{rows.device}'", "pass rows.cpu()")
    if rows.dim() != 2 or not rows.shape[1] or not rows.is_floating_point():
        raise InvalidInputError(
            _ACTION,
            f"the rows have dtype {rows.dtype} and shape {tuple(rows.shape)}",
            "pass floating-point numbers, a row for each node, with 1 column or more",
        )
    if rows.requires_grad:
        raise InvalidInputError(
            _ACTION,
            "the rows require a gradient, and rows in the host's memory get none",
            "pass rows.detach(), or keep them on the graph's device",
        )


#: Share of a GPU's free memory that features may take.  Sums of them, where they are kept, take as
#: much; the rest is for what a model makes of them.
_MAX_SHARE_OF_FREE = 0.25

log = logging.getLogger(__name__)


def are_for_host(place: str, nbytes: int, device: torch.device) -> bool:
    """Whether this rank's features stay in the host's memory; collective, the same on all ranks.

    ``place`` is 'gpu', 'host' or 'auto', which keeps them there if on some rank they would take
    more than a quarter of what is free on the GPU.
    """
    if place != "auto":
        return place == "host"
    ranks = Communicator.of_all_machines()
    everyone = ranks.all_gather((nbytes, free_bytes(device)))
    on_host = any(needed > _MAX_SHARE_OF_FREE * free for needed, free in everyone)
    if on_host and ranks.rank == 0:
        needed, free = max(everyone, key=lambda needs: needs[0] / max(needs[1], 1))
        # Ranks that were launched show warnings alone.
        log.warning(
            "features stay in the host's memory: they take %.1f GB, and %.1f GB are free on a GPU"
            " (fullgraph.features=gpu moves them there)",
            needed / 1e9,
            free / 1e9,
        )
    return on_host


@contextlib.contextmanager
def offloaded_rows(inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A model's inputs for a forward pass, with tensors in place of `HostRows`, also in nested
    dicts.

    All of the rows are brought to the device whenever one is looked up, and again in the backward
    pass where an operation has saved them: in between, neither autograd nor ``inputs`` holds them.
    So they take memory while the model itself does, as a rule in the first layer's forward pass,
    and while that layer goes backward.  What it makes of them and saves, such as sums as wide as
    they are, or rows of which some are dropped out, stays from the one to the other.
    """
    if not _any_host_rows(inputs):
        yield inputs
        return
    inside = _SharedRows(inputs)
    with torch.autograd.graph.saved_tensors_hooks(inside.pack, inside.unpack):
        yield inside


def _any_host_rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_any_host_rows(item) for item in value.values())
    return isinstance(value, HostRows)


class _View:
    """What an operation has saved of rows that were lent to it."""

    def __init__(self, rows: HostRows, tensor: torch.Tensor) -> None:
        self._rows = rows
        self._as = tensor.size(), tensor.stride(), tensor.storage_offset()

    def bring(self) -> torch.Tensor:
        return self._rows.whole().as_strided(*self._as)


class _SharedRows(Mapping[str, Any]):
    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        #: What was lent, as long as somebody has it, and its version then.
        self._out: list[tuple[weakref.ref[torch.Tensor], int, HostRows]] = []

    def __getitem__(self, key: str) -> Any:
        return self._lend(self._inputs[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def _lend(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._lend(item) for key, item in value.items()}
        if not isinstance(value, HostRows):
            return value
        whole = value.whole()
        self._out.append((weakref.ref(whole), whole._version, value))
        return whole

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _View:
        """What autograd keeps of a tensor."""
        for reference, version, rows in self._out:
            whole = reference()
            # What a model has changed in place is no longer what could be brought again.
            is_unchanged = saved._version == version
            if whole is not None and saved.numel() and is_unchanged and _shares(saved, whole):
                return _View(rows, saved)
        return saved

    def unpack(self, packed: torch.Tensor | _View) -> torch.Tensor:
        return packed.bring() if isinstance(packed, _View) else packed


def _shares(saved: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor is a view of another's memory."""
    same = saved.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same and saved.dtype == whole.dtype
