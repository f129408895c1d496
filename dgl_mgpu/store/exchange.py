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
        """What every rank passed, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, asked: str, step: Callable[[], T]) -> T:
        """Run ``step`` on the first rank and return its result on every rank.

        Raises
        ------
        RankFailedError
            On the other ranks, when it failed; on the first, the original error.
        """
        if self._group is None:
            return step()
        outcome: list[Any] = [None, ""]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = step()
            except Exception as error:
                failure, outcome[1] = error, _text(error)
        first = dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(outcome, src=first, group=self._group)
        if failure is not None:
            raise failure
        if outcome[1]:
            raise _failed(asked, 0, outcome[1])
        return outcome[0]

    def together(self, asked: str, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank and return this rank's result, or raise on every rank.

        A rank whose step raises still takes part in the exchange, so that the others learn
        the reason instead of waiting for it.

        Raises
        ------
        RankFailedError
            On the ranks whose own step went well, when another's did not; where it failed,
            the original error.
        """
        try:
            result = step()
        except Exception as error:
            self.all_gather(_text(error))
            raise
        for rank, reason in enumerate(self.all_gather("")):
            if reason:
                raise _failed(asked, rank, reason)
        return result


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


def _failed(asked: str, rank: int, reason: str) -> RankFailedError:
    return RankFailedError(
        asked, f"rank {rank} failed with {reason}", f"mend the cause on rank {rank}"
    )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _machine_id() -> str:
    # Two containers of one host do not share /dev/shm: its device number tells them apart.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/dev/shm').stat().st_dev}"
