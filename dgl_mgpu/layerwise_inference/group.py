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
    """Ranks that infer the nodes of one graph together; by default this one alone.

    Attributes
    ----------
    everyone : Communicator
    machine : Communicator
        Those of them that are on this machine, which share its memory.
    firsts : Communicator
        The first ones of all machines.
    machines : tuple of int
        Of each rank, the number of its machine, which is that of its first one in ``firsts``.
    """

    everyone: Communicator = field(default_factory=Communicator)
    machine: Communicator = field(default_factory=Communicator)
    firsts: Communicator = field(default_factory=Communicator)
    machines: tuple[int, ...] = (0,)

    @classmethod
    def of_job(cls) -> InferenceGroup:
        """All ranks of the job, each of which must call this."""
        everyone, machine = Communicator.of_all_machines(), Communicator.of_this_machine()
        firsts = Communicator.of_first_ranks()
        number = machine.broadcast_from_rank0(ASKED, lambda: firsts.rank)
        return cls(everyone, machine, firsts, tuple(everyone.all_gather(number)))

    @property
    def size(self) -> int:
        return self.everyone.size

    def batches(self, length: int, step: int) -> list[tuple[int, int]]:
        """Ranges of ``step`` numbers below ``length``, which ranks take in turn: this rank's."""
        return self._every_batch(length, step)[self.everyone.rank :: self.size]

    def room(self, nbytes: int, folder: str | os.PathLike | None) -> Segment:
        """Memory that the ranks of a machine share, all of which call this.

        Raises
        ------
        OutputError
            If there is too little of it, in shared memory or in the folder.
        RankFailedError
            On the other ranks, if so.
        """
        place = SHARED_MEMORY if folder is None else Path(folder)
        made: list[Segment] = []

        def make() -> Path:
            try:
                made.append(Segment.create(nbytes, place))
            except SharedMemoryError as error:
                fix = "free space there, or pass another folder"
                if folder is None:
                    fix = f"{error.fix}; or use one rank alone, or pass a folder with room"
                raise OutputError(f"keep results in {place}", error.found, fix) from error
            return made[0].path

        path = self.machine.broadcast_from_rank0(ASKED, make)
        attach = partial(Segment.attach, path, nbytes)
        return self.machine.run_all(ASKED, lambda: made[0] if made else attach())

    def bring(self, rows: torch.Tensor, length: int, step: int) -> None:
        """Have on every machine what the ranks of all of them have written; all call this.

        Parameters
        ----------
        rows : Tensor
            That of this machine; each batch of ``length`` has the same share of it.
        """
        if self.firsts.size == 1:
            return
        for number, (low, high) in enumerate(self._every_batch(length, step)):
            part = share(len(rows), low, high, length)
            self.firsts.send(self.machines[number % self.size], rows[slice(*part)])

    def collected(self, batches: Iterator[torch.Tensor], length: int, step: int) -> torch.Tensor:
        """Rows of ``length`` nodes, of which this rank has those of its `batches`; all call this.

        Parameters
        ----------
        batches : iterator of Tensor, float32, shape (nodes of a batch, width)

        Returns
        -------
        Tensor, float32, shape (length, width)
            In the host's memory, which the ranks of a machine share.
        """
        first = self.everyone.run_all(ASKED, lambda: next(batches, None))
        widths = self.everyone.all_gather(0 if first is None else first.shape[1])
        shape = length, max(widths)  # a rank may have no batch
        memory = None
        if self.machine.size > 1:
            memory = self.room(math.prod(shape) * torch.float32.itemsize, None)
            rows = torch.from_numpy(memory.array(np.float32, shape))
        else:
            rows = torch.empty(shape)

        def fill() -> None:
            ranges = self.batches(length, step)
            given = itertools.chain([] if first is None else [first], batches)
            for (low, high), of_batch in zip(ranges, given, strict=True):
                rows[low:high] = of_batch

        self.everyone.run_all(ASKED, fill)
        # Others of a machine wait for its first rank, which is sent the rows.
        self.everyone.run_all(ASKED, partial(self.bring, rows, length, step))
        return Column("", rows, None, memory).own_rows()

    @contextmanager
    def first_ones_buffers(self, model: nn.Module) -> Iterator[None]:
        """Have the first rank's buffers, as DistributedDataParallel has, and then one's own.

        Running means of a batch norm are each rank's, where ranks train on batches of their own.
        """
        if self.size == 1:
            yield
            return
        buffers = list(model.buffers())
        own = [each.clone() for each in buffers]
        firsts = self.everyone.broadcast_from_rank0(ASKED, lambda: [each.cpu() for each in buffers])
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
    shapes, wanted = ([tuple(each.shape) for each in some] for some in (buffers, firsts))
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
