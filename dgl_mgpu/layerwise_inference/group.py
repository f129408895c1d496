"""The ranks that infer together: who does which nodes, and where all find the results."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError, OutputError, SharedMemoryError
from dgl_mgpu.layerwise_inference.rows import ASKED, Column
from dgl_mgpu.machine.shared_memory import SHARED_MEMORY
from dgl_mgpu.store.memory.segment import Segment


@dataclass(frozen=True)
class InferenceGroup:
    """Ranks that infer the nodes of one graph together; by default this one alone."""

    everyone: Communicator = field(default_factory=Communicator)
    machine: Communicator = field(default_factory=Communicator)  # ranks that share its memory
    firsts: Communicator = field(default_factory=Communicator)  # the first ranks of all machines
    machines: tuple[int, ...] = (0,)  # of each rank, the number of its machine in `firsts`
    #: Ranks that ask each other for rows, where each machine has those of the nodes that it owns.
    peers: Communicator | None = None

    @classmethod
    def of_job(cls, peers: Communicator | None = None) -> InferenceGroup:
        """All ranks of the job, each of which must call this.

        With ``peers``, each machine infers the nodes that it owns.
        """
        everyone, machine = Communicator.of_all_machines(), Communicator.of_this_machine()
        firsts = Communicator.of_first_ranks()
        number = machine.broadcast_from_rank0(ASKED, lambda: firsts.rank)
        return cls(everyone, machine, firsts, tuple(everyone.all_gather(number)), peers)

    @property
    def size(self) -> int:
        return self.everyone.size

    def batches(self, length: int, step: int) -> list[tuple[int, int]]:
        """This rank's ranges of ``step`` numbers below ``length``: ranks take them in turn.

        Where ranks ask each other for rows, all have as many: the last ones may be empty.
        """
        every, sharing = self._every_batch(length, step), self.sharing
        if self.peers is not None:
            every += [(length, length)] * (-len(every) % sharing.size)
        return every[sharing.rank :: sharing.size]

    @property
    def sharing(self) -> Communicator:
        """The ranks that share the work on a range of nodes."""
        return self.everyone if self.peers is None else self.machine

    def room(self, nbytes: int, folder: str | os.PathLike | None) -> Segment:
        """Memory that the ranks of a machine share, all of which call this.

        Raises `OutputError` if there is too little of it, in shared memory or in the folder.
        """
        place = SHARED_MEMORY if folder is None else Path(folder)
        segment: Segment | None = None

        def create() -> Path:
            nonlocal segment
            try:
                segment = Segment.create(nbytes, place)
            except SharedMemoryError as error:
                fix = "free space there, or pass another folder"
                if folder is None:
                    fix = f"{error.fix}; or use one rank alone, or pass a folder with room"
                raise OutputError(f"keep results in {place}", error.found, fix) from error
            return segment.path

        path = self.machine.broadcast_from_rank0(ASKED, create)
        return self.machine.run_all(ASKED, lambda: segment or Segment.attach(path, nbytes))

    def bring(self, rows: torch.Tensor, length: int, step: int) -> None:
        """Exchange between machines what their ranks have written to ``rows``; all ranks call this.

        Each batch of ``length`` has the same share of this machine's rows.
        """
        if self.firsts.size == 1 or self.peers is not None:
            return
        for number, (low, high) in enumerate(self._every_batch(length, step)):
            part = share(len(rows), low, high, length)
            self.firsts.send(self.machines[number % self.size], rows[slice(*part)])

    def collected(self, batches: Iterator[torch.Tensor], length: int, step: int) -> torch.Tensor:
        """Float32 rows of ``length`` nodes, of which each rank passes those of its `batches`.

        The result is in the host's memory, which the ranks of a machine share.
        """
        first = self.everyone.run_all(ASKED, lambda: next(batches, None))
        widths = self.everyone.all_gather(0 if first is None else first.shape[1])
        shape = length, max(widths)  # a rank may have no batch
        rows, memory = self._empty(shape)

        def fill() -> None:
            ranges = self.batches(length, step)
            given = itertools.chain([] if first is None else [first], batches)
            for (low, high), of_batch in zip(ranges, given, strict=True):
                rows[low:high] = of_batch

        self.everyone.run_all(ASKED, fill)
        # Others of a machine wait for its first rank, which is sent the rows.
        self.everyone.run_all(ASKED, partial(self.bring, rows, length, step))
        return Column("", rows, None, memory).own_rows()

    def of_all(self, own: torch.Tensor, first: int, num_nodes: int) -> torch.Tensor:
        """Float32 rows of all nodes, of which each machine passes those from its ``first`` on.

        The result is in the host's memory, which the ranks of a machine share.
        """
        rows, memory = self._empty((num_nodes, own.shape[1]))

        def fill() -> None:
            if self.machine.rank == 0:
                rows[first : first + len(own)] = own

        def send() -> None:
            for source, (low, count) in enumerate(self.firsts.all_gather((first, len(own)))):
                self.firsts.send(source, rows[low : low + count])

        self.everyone.run_all(ASKED, fill)
        self.everyone.run_all(ASKED, send)
        return Column("", rows, None, memory).own_rows()

    def _empty(self, shape: tuple[int, int]) -> tuple[torch.Tensor, Segment | None]:
        """Float32 rows that the ranks of a machine share."""
        if self.machine.size == 1:
            return torch.empty(shape), None
        memory = self.room(math.prod(shape) * torch.float32.itemsize, None)
        return torch.from_numpy(memory.array(np.float32, shape)), memory

    @contextmanager
    def rank0_buffers(self, model: nn.Module) -> Iterator[None]:
        """Use the first rank's buffers, as DistributedDataParallel does, and then restore the own
        ones.

        Running means of a batch norm are each rank's, where ranks train on batches of their own.
        """
        if self.size == 1:
            yield
            return
        buffers = list(model.buffers())
        own = [buffer.clone() for buffer in buffers]
        firsts = self.everyone.broadcast_from_rank0(ASKED, lambda: [b.cpu() for b in buffers])
        self.everyone.run_all(ASKED, partial(_check_alike, buffers, firsts))
        try:
            _set(buffers, firsts)
            yield
        finally:
            _set(buffers, own)

    @staticmethod
    def _every_batch(length: int, step: int) -> list[tuple[int, int]]:
        return [(low, min(low + step, length)) for low in range(0, length, step)]


def _check_alike(buffers: list[torch.Tensor], firsts: list[torch.Tensor]) -> None:
    """Raise unless a model has buffers like the first rank's."""
    shapes, wanted = ([tuple(t.shape) for t in tensors] for tensors in (buffers, firsts))
    if shapes != wanted:
        raise InvalidInputError(
            ASKED,
            f"the model's buffers have shapes {shapes}, but {wanted} on the first rank",
            "pass the same model on every rank",
        )


def _set(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def share(count: int, low: int, high: int, length: int) -> tuple[int, int]:
    """Of ``count`` rows, those that belong to a range of ``length`` numbers."""
    return low * count // length, high * count // length
