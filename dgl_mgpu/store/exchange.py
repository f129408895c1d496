"""How the ranks of one machine tell each other where their segments are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dgl_mgpu.errors import RankFailedError

T = TypeVar("T")


class Ranks:
    """A group of ranks: those that share one store, or all of a job.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        A gloo group; ``None`` for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._lost = ""
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of_all_machines(cls) -> Ranks:
        """All ranks of the job; every one of them must call this."""
        return _known_groups()[0]

    @classmethod
    def of_this_machine(cls) -> Ranks:
        """The ranks of this process's machine, if torch.distributed is initialised.

        Every rank of the job must call this.  Each machine holds its own replica of the
        store (WholeGraph, section III-D).
        """
        return _known_groups()[1]

    def all_gather(self, value: T) -> list[T]:
        """What every rank passed, by rank.

        Raises
        ------
        RankFailedError
            If a rank is gone.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._exchange(lambda group: dist.all_gather_object(values, value, group=group))
        return values

    def from_first(self, asked: str, step: Callable[[], T]) -> T:
        """Run ``step`` on the first rank and return its result on every rank.

        Raises
        ------
        RankFailedError
            On the other ranks, when it failed; on the first, the original error.  On all, if a
            rank is gone.
        """
        if self.size == 1:
            return step()
        outcome: list[Any] = [None, ""]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = step()
            except Exception as error:
                failure, outcome[1] = error, error_text(error)
        self._exchange(
            lambda group: dist.broadcast_object_list(
                outcome, src=dist.get_global_rank(group, 0), group=group
            )
        )
        if failure is not None:
            raise failure
        if outcome[1]:
            raise rank_failed(asked, 0, outcome[1])
        return outcome[0]

    def together(self, asked: str, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank and return this rank's result, or raise on every rank.

        A rank whose step raises still takes part in the exchange, so that the others learn
        the reason instead of waiting for it.

        Raises
        ------
        RankFailedError
            On the ranks whose own step went well, when another's did not; where it failed,
            the original error.  On all, if a rank is gone.
        """
        try:
            result = step()
        except Exception as error:
            self.all_gather(error_text(error))
            raise
        for rank, reason in enumerate(self.all_gather("")):
            if reason:
                raise rank_failed(asked, rank, reason)
        return result

    def _exchange(self, collective: Callable[[dist.ProcessGroup], None]) -> None:
        if self._group is not None:
            try:
                return collective(self._group)
            except RuntimeError as error:  # gloo's, when a connection is lost
                self._lost = str(error).splitlines()[0]
                error.__traceback__ = None  # its frames hold the group
            # Only the neighbours of a rank that is gone see its connection close.  They close
            # theirs, which the last reference to a group does, so that no rank waits for ever.
            dist.destroy_process_group(self._group)
            self._group = None
        raise RankFailedError(
            "exchange with the machine's other ranks",
            f"one of them is gone ({self._lost})",
            "see why it ended, and start the run again",
        )


_groups: tuple[object, Ranks, Ranks] | None = None


def _known_groups() -> tuple[Ranks, Ranks]:
    """Groups of all ranks and of this machine's, made once for a job: each costs connections."""
    global _groups
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(), Ranks()
    if _groups is None or _groups[0] is not dist.group.WORLD:
        everyone = Ranks(dist.new_group(backend="gloo"))
        machines = everyone.all_gather(_machine_id())
        mine = None
        for machine in dict.fromkeys(machines):
            members = [rank for rank, other in enumerate(machines) if other == machine]
            group = dist.new_group(members, backend="gloo")
            if machine == machines[dist.get_rank()]:
                mine = group
        _groups = dist.group.WORLD, everyone, Ranks(mine)
    return _groups[1:]


def rank_failed(asked: str, rank: int, reason: str) -> RankFailedError:
    """What the other ranks raise when one failed."""
    return RankFailedError(
        asked, f"rank {rank} failed with {reason}", f"mend the cause on rank {rank}"
    )


def error_text(error: Exception) -> str:
    """An error as the other ranks hear of it."""
    return f"{type(error).__name__}: {error}"


def _machine_id() -> str:
    # Two containers of one host do not share /dev/shm: its device number tells them apart.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/dev/shm').stat().st_dev}"
