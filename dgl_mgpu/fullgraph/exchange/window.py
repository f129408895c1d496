"""Memory of every rank that the others' GPUs read directly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

# Bytes up to which a window is made larger than asked for: growing is collective.
_SLACK = 1 << 20


class Window:
    """What a rank lends to the GPUs of the others, for one exchange at a time.

    An exchange writes to this rank's memory and then waits for all ranks to have done so; no
    waiting on the host.  Two halves are used in turn, so that the next exchange may write while
    slower ranks still read: they have read all of the one before the last when the last one's
    waiting is over.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Ranks on one machine, each with a GPU of its own.
    device : torch.device
        This rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._half = 0
        self._bytes = 0
        self._halves: list[list[torch.Tensor]] = [[], []]
        self._handle: object = None

    def turn(self, nbytes: int) -> Sequence[torch.Tensor]:
        """The ranks' memory for the next exchange; collective.

        Parameters
        ----------
        nbytes : int
            The most that any rank writes; the same on all ranks.

        Returns
        -------
        list of Tensor, uint8, shape (at least nbytes,)
            By rank.  This rank writes its own, on torch's current stream.
        """
        if nbytes > self._bytes or self._handle is None:
            self._grow(max(nbytes, 1))
        self._half = 1 - self._half
        return self._halves[self._half]

    def wait_for_all(self) -> None:
        """Have torch's current stream wait until all ranks' streams have come to this point."""
        self._handle.barrier()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def aside(self, *used: torch.Tensor) -> Iterator[None]:
        """Work with some tensors on the window's own stream, after all that is under way."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in used:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def done(self) -> Callable[[], None]:
        """What has torch's current stream wait for all that :meth:`aside` began so far."""
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def _grow(self, nbytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        # Nobody reads the old halves any more when all have come here.
        torch.cuda.synchronize(self._device)
        dist.barrier(self.group)
        self._halves, self._handle = [[], []], None
        self._bytes = -(-nbytes // _SLACK) * _SLACK
        room = symmetric.empty(2 * self._bytes, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(room, self.group)
        ranks = [
            handle.get_buffer(rank, (2 * self._bytes,), torch.uint8)
            for rank in range(self.num_ranks)
        ]
        self._halves = [
            [memory[half * self._bytes : (half + 1) * self._bytes] for memory in ranks]
            for half in range(2)
        ]
        self._handle = handle


def reaches_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether each rank of a group has a GPU of its own that can read those of all others."""
    if device.type != "cuda":
        return False
    from dgl_mgpu.store import Ranks

    own = torch.cuda.current_device() if device.index is None else device.index
    everyone = Ranks.of_all_machines()
    machine = Ranks.of_this_machine()
    found = everyone.all_gather((own, str(torch.cuda.get_device_properties(own).uuid)))
    one_each = len({uuid for _, uuid in found}) == len(found)
    reaches = all(
        other == own or torch.cuda.can_device_access_peer(own, other) for other, _ in found
    )
    alone = machine.size == everyone.size == dist.get_world_size(group)
    return all(everyone.all_gather(one_each and alone and reaches))
