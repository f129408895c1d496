"""Memory of every rank that the others' GPUs read directly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import DeviceMemoryError
from dgl_mgpu.utils.stages import stage

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory

_ACTION = "lend rows to the other GPUs"
# Bytes up to which a window is made larger than asked for: growing is collective.
_SLACK = 1 << 20
# How long a GPU waits for others that may be gone; as long as torch waits for NCCL.
_TIMEOUT_MS = 600_000


class Window:
    """Memory that a rank lends to the GPUs of the others, for one exchange at a time.

    An exchange writes to this rank's memory and then waits for all ranks to have done so; no
    waiting on the host.  Two halves are used in turn, so that the next exchange may write while
    slower ranks still read: they have read all of the one before the last when the last one's
    waiting is over. The ranks of ``group`` are on one machine, each with a GPU of its own.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        # What waits for others is one block: it is not to queue behind all blocks of a sum.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = self._stream.device
        #: Exchanges so far.
        self.turns = 0
        self._bytes = 0
        self._halves: list[list[torch.Tensor]] = [[], []]
        #: This rank's own memory: torch may lend it to others once nobody holds it.
        self._room: torch.Tensor | None = None
        self._handle: _SymmetricMemory | None = None

    def turn(self, nbytes: int) -> Sequence[torch.Tensor]:
        """The ranks' memory for the next exchange, uint8, by rank; collective.

        Any rank writes ``nbytes`` at most, the same number on all ranks, to its own memory on
        torch's current stream.
        """
        if nbytes > self._bytes or self._handle is None:
            self._grow(max(nbytes, 1))
        self.turns += 1
        return self._halves[self.turns % 2]

    def wait_for_all(self) -> None:
        """Have torch's current stream wait until all ranks' streams have come to this point.

        Where a rank does not come for ten minutes, the GPU stops with an error, which torch raises
        when it is next waited for.
        """
        assert self._handle is not None  # it is this exchange's turn
        self._handle.barrier(timeout_ms=_TIMEOUT_MS)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the window's own stream, after all that is under way: the stage "exchange"."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), stage("exchange"):
            yield

    def done(self, *used: torch.Tensor) -> Callable[[], None]:
        """A function that has torch's current stream wait for all that `aside` began so far.

        That is the stage "waiting".  It holds the tensors that are used there, so that nobody else
        gets their memory before.  Recording streams would, too, but keeps memory until the GPU has
        come so far, which the host may be far ahead of.
        """
        return partial(self._wait_for, self._stream.record_event(), used)

    def _wait_for(self, event: torch.cuda.Event, _used: tuple[torch.Tensor, ...]) -> None:
        with stage("waiting"):
            torch.cuda.current_stream(self._device).wait_event(event)

    def _grow(self, nbytes: int) -> None:
        # Copies and plain loads are all that is done with it: torch need not set up multicast.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize(self._device)
        self._halves, self._room, self._handle = [[], []], None, None
        # Memory is free once no rank has it mapped any more, and what torch keeps for itself, once
        # it is told to.
        dist.barrier(self.group)
        torch.cuda.empty_cache()
        self._bytes = -(-nbytes // _SLACK) * _SLACK
        # All ranks learn that one has no room: the others would wait for it to lend its own.
        room = Communicator.of_all_machines().run_all(
            _ACTION, partial(self._allocate, symmetric.empty)
        )
        handle = symmetric.rendezvous(room, self.group)
        ranks = [
            handle.get_buffer(rank, (2 * self._bytes,), torch.uint8)
            for rank in range(self.num_ranks)
        ]
        self._halves = [
            [memory[half * self._bytes : (half + 1) * self._bytes] for memory in ranks]
            for half in range(2)
        ]
        self._room, self._handle = room, handle

    def _allocate(self, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        needed = 2 * self._bytes
        try:
            return empty(needed, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # the driver's: torch gives it no type of its own
            if "out of memory" not in str(error).lower():
                raise
            free = torch.cuda.mem_get_info(self._device)[0]
            raise DeviceMemoryError(
                _ACTION,
                f"it takes {needed:,} bytes on {self._device}, where {free:,} are free",
                "use more ranks, narrower rows, or exchange='broadcast', which lends none",
                needed,
                free,
            ) from error


def reaches_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether each rank of a group has a GPU of its own that can read those of all others.

    Every process must see all of these GPUs (``CUDA_VISIBLE_DEVICES``), no two ranks use theirs by
    the same number.  Collective.
    """
    everyone = Communicator.of_all_machines()
    machine = Communicator.of_this_machine()
    mine = None
    if device.type == "cuda":
        own = torch.cuda.current_device() if device.index is None else device.index
        mine = own, _uuid(own), _readable_from(own)
    gpus = [gpu for gpu in everyone.all_gather(mine) if gpu is not None]
    numbers, uuids = {number for number, _, _ in gpus}, {uuid for _, uuid, _ in gpus}
    return (
        machine.size == everyone.size == dist.get_world_size(group)
        and len(numbers) == len(uuids) == len(gpus) == everyone.size
        and all(readable >= uuids for _, _, readable in gpus)
    )


def _uuid(gpu: int) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _readable_from(gpu: int) -> set[str]:
    """GPUs whose memory one can read, by what they are called in all processes."""
    return {
        _uuid(other)
        for other in range(torch.cuda.device_count())
        if other == gpu or torch.cuda.can_device_access_peer(gpu, other)
    }
