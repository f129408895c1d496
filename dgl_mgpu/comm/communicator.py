"""Collectives of ranks: plain data, tensors, and steps that succeed or fail on all of them."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import multiprocessing as mp
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dgl_mgpu.comm.loopback import connections_are_ours
from dgl_mgpu.comm.signing import SECRET, SignedGroup, job_secret
from dgl_mgpu.errors import ConfigError, DGLMGPUError, InvalidInputError, RankFailedError
from dgl_mgpu.machine.shared_memory import SHARED_MEMORY, unusable_shared_memory
from dgl_mgpu.utils import timeouts
from dgl_mgpu.utils.rows import as_bytes
from dgl_mgpu.utils.torchrun import under_torchrun

log = logging.getLogger(__name__)
T = TypeVar("T")

_UNSIGNED = (
    "ranks on several machines have no secret to sign by what they tell each other: unless the "
    "network between them is private, give all of them the same %s"
)

_ACTION = "exchange with other ranks"
_INTEGERS = torch.int32, torch.int64, torch.uint8

# How long GPUs wait for each other's tensors, which all ranks were about to send; then NCCL ends
# the process, which cannot be notified in any other way.
_NCCL_TIMEOUT = timedelta(seconds=30)


class Communicator:
    """A group of ranks: those that share one store, or all of a job.

    ``group`` is of gloo, None for a single process, and ``gpu_group`` of NCCL, for tensors on GPUs.
    All methods raise RankFailedError on all ranks if one is gone.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, gpu_group: dist.ProcessGroup | None = None
    ) -> None:
        self._gpu_group = gpu_group
        self._group: SignedGroup | None = None
        self._lost: Exception | None = None
        #: By device of this rank, whether each rank is on a GPU of its own.
        self._own_gpus: dict[torch.device, bool] = {}
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        #: Numbers in the job, by which errors name ranks.
        self._numbers = [0] if group is None else dist.get_process_group_ranks(group)
        #: Whether nobody else uses these connections (:meth:`across_machines`).
        self._is_own = False
        if group is not None:
            self._group = SignedGroup(group)
            self._exchange(SignedGroup.agree)

    @classmethod
    def of_all_machines(cls) -> Communicator:
        """All ranks of the job; every one of them must call this."""
        return _known_groups()[0]

    @classmethod
    def of_this_machine(cls) -> Communicator:
        """The ranks of this process's machine; every rank of the job must call this.

        Each machine holds its own replica of the store (WholeGraph, section III-D).
        """
        return _known_groups()[1]

    @classmethod
    def of_first_ranks(cls) -> Communicator:
        """The first rank of each machine, another rank by itself; all ranks must call this."""
        return _known_groups()[2]

    @classmethod
    def across_machines(cls, own: bool = False) -> Communicator:
        """A rank of each machine: those with this one's place in its machine, by machine.

        Every rank of the job must call this.  With ``own`` over connections that nobody else has,
        and that :meth:`close` ends; but of a job with NCCL, whose groups take memory of GPUs, all
        share those that there are.  Raises ConfigError unless machines have as many ranks each.
        """
        known, places = _ranks_across_machines()
        if not own or known._gpu_group is not None:
            return known
        mine = _connect(places)
        mine._is_own = True
        return mine

    def process_group(self, device: torch.device) -> dist.ProcessGroup:
        """Torch's group of these ranks, for tensors on a device; there is more than one rank."""
        if device.type == "cuda" and self._gpu_group is not None:
            return self._gpu_group
        assert self._group is not None
        return self._group.group

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, plain data (`dgl_mgpu.comm.serialization.dumps`), by rank."""
        if self.size == 1:
            return [value]
        return self._exchange(lambda group: group.all_gather(value))

    def all_gather_cat(self, action: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor with those of the other ranks in its place, one rank after the other.

        From GPU to GPU (NCCL) where every rank's tensors are on a GPU of its own, else over the
        hosts (gloo).  Tensors of shape (n, ...) are on one device, and have the same dtypes and row
        shapes on all ranks; ``n`` may differ, also between tensors, and be 0.  ``asked`` says what
        for, should a rank have too little memory.
        """
        if self.size == 1:
            return list(tensors)
        device = tensors[0].device
        all_ranks = self.all_gather((_gpu_of(device), [len(tensor) for tensor in tensors]))
        # NCCL does not serve two ranks on one GPU.
        gpus = {gpu for gpu, _ in all_ranks}
        direct = self._gpu_group is not None and "" not in gpus and len(gpus) == self.size
        lengths = list(zip(*(of_rank for _, of_rank in all_ranks), strict=True))
        messages = self.run_all(
            action,
            lambda: [
                _Sent(tensor if direct else tensor.cpu(), counts)
                for tensor, counts in zip(tensors, lengths, strict=True)
            ],
        )
        for message in messages:
            if len(message.mine):
                self._exchange(partial(_send, message, self._gpu_group if direct else None))
        return [message.join().to(device) for message in messages]

    def all_to_all(
        self,
        rows: torch.Tensor,
        sending: Sequence[int] | None = None,
        receiving: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send each rank its rows, and return those that the ranks send here, by rank.

        From GPU to GPU (NCCL) where every rank has ``rows`` on a GPU of its own, else over the
        hosts (gloo).  ``rows``, of shape (n, ...), are contiguous and have the same dtype and row
        shape on all ranks.  ``sending`` and ``receiving`` count those for and from each rank; left
        out, they are as many for and from all.  ``out`` are integers as ``rows``, and get what is
        received.
        """
        if self.size == 1:
            return rows
        # Collectives do not know all types.
        numbers = rows if rows.dtype in _INTEGERS else as_bytes(rows)
        count = len(rows) if receiving is None else sum(receiving)
        received = numbers.new_empty(count, *numbers.shape[1:]) if out is None else out
        direct = self._has_own_gpus(rows.device)
        if numbers.shape[1:].numel():
            sent = numbers if direct else numbers.cpu()
            arrived = received if direct else received.cpu()
            self._exchange(
                lambda group: dist.all_to_all_single(
                    arrived,
                    sent,
                    receiving,
                    sending,
                    group=self._gpu_group if direct else group.group,
                )
            )
            if arrived is not received:
                received.copy_(arrived)
        if numbers is rows:
            return received
        return received.view(rows.dtype).reshape(len(received), *rows.shape[1:])

    def broadcast_from_rank0(self, action: str, step: Callable[[], T]) -> T:
        """Run ``step`` on the first rank and return its result, plain data, on every rank.

        When it fails, the first rank raises its error, and the others RankFailedError.
        """
        if self.size == 1:
            return step()
        outcome: Any = [None, ""]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = step()
            except Exception as error:
                failure, outcome[1] = error, error_text(error)
        outcome = self._exchange(lambda group: group.broadcast(outcome))
        if failure is not None:
            raise failure
        if outcome[1]:
            raise self.failed(action, 0, outcome[1])
        return outcome[0]

    def send(self, source: int, rows: torch.Tensor) -> None:
        """Copy the rows of rank ``source`` to those of all others, in place.

        They are contiguous in the host's memory, of the same shape and dtype on all ranks.
        """
        if self.size > 1 and rows.numel():
            numbers = rows.flatten().view(torch.uint8)

            def broadcast(group: SignedGroup) -> None:
                dist.broadcast(numbers, dist.get_global_rank(group.group, source), group.group)

            self._exchange(broadcast)

    def run_all(self, action: str, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank and return this rank's result, or raise on every rank.

        A rank whose step raises still takes part in the exchange, so that the others learn the
        reason instead of waiting for it: they raise RankFailedError.
        """
        try:
            result = step()
        except Exception as error:
            with contextlib.suppress(RankFailedError):  # says less than its own
                self.all_gather(error_text(error))
            raise
        for rank, reason in enumerate(self.all_gather("")):
            if reason:
                raise self.failed(action, rank, reason)
        return result

    def failed(self, action: str, rank: int, reason: str) -> RankFailedError:
        """What others raise when a rank, by its number in this group, has failed."""
        return rank_failed(action, self._numbers[rank], reason)

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Have the other ranks end what they wait for if this one fails alone, between collectives.

        This rank leaves the group, with word of why: the others raise RankFailedError with that, at
        whatever collective they are, and every later call raises.  Over NCCL they do so when the
        host next exchanges something; who waits for NCCL meanwhile ends when its time is over, or
        is ended by what watches the machines.  Not for typed errors, which all ranks raise or have
        been told of.
        """
        try:
            yield
        except DGLMGPUError:
            raise
        except BaseException as error:  # Ctrl-C, too, which another rank need not get
            self._leave(error_text(error))
            raise

    def close(self, reason: str) -> None:
        """Close own connections, with word of why: others that wait for this rank raise that.

        Every later call raises, too.  Those that others use as well stay.  Not collective.
        """
        if self._is_own:
            self._part(reason)

    def _leave(self, reason: str) -> None:
        global _failure
        if self._group is not None:  # else nobody waits for this rank
            _failure = reason
            self._part(reason)

    def _part(self, reason: str) -> None:
        if self._group is None:
            return
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            self._group.say_why(reason)
        self._close(self.failed(_ACTION, self.rank, reason))

    def _close(self, lost: Exception) -> None:
        """Close this rank's connections, which the last reference to the group does."""
        assert self._group is not None
        group, self._group, self._lost = self._group.group, None, lost
        with contextlib.suppress(ValueError):  # all groups of torch's were destroyed before
            dist.destroy_process_group(group)

    def _has_own_gpus(self, device: torch.device) -> bool:
        """Whether each rank is on a GPU of its own, as NCCL wants it; collective."""
        if self._gpu_group is None:
            return False
        if device not in self._own_gpus:
            gpus = self.all_gather(_gpu_of(device))
            self._own_gpus[device] = "" not in gpus and len(set(gpus)) == self.size
        return self._own_gpus[device]

    def _exchange(self, collective: Callable[[SignedGroup], T]) -> T:
        if self._group is not None:
            handled = sys.exception()  # of this rank, which tells the others of it here
            try:
                return collective(self._group)
            # Gloo's, when a connection is lost; torch's, that a DataLoader worker was killed
            # meanwhile; or ours, of a message that is not another rank's.
            except RuntimeError as error:
                lost: Exception = _without_frames(error, handled)  # which hold the group
            except KeyboardInterrupt as stop:
                # Else its frames would keep the connections open that this rank leaves now.
                raise stop.with_traceback(None) from None
            with contextlib.suppress(RuntimeError):
                if why := self._group.why():
                    lost = self.failed(_ACTION, *why)
            # Only the neighbours of a rank that is gone see its connection close.  They close
            # theirs, so that no rank waits for ever.
            self._close(lost)
            if isinstance(lost, RankFailedError):
                # The one that is kept is to hold no frames.
                raise copy.copy(lost) from lost.__cause__
        raise RankFailedError(
            _ACTION,
            f"one of them is gone, or does not answer ({str(self._lost).partition(chr(10))[0]})",
            "see why it ended, and start the run again",
        ) from self._lost


def _without_frames(error: Exception, handled: BaseException | None) -> Exception:
    """The same error without tracebacks, also of what it came of.

    That is not what was being ``handled`` when it was raised, whose frames hold what failed.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        if link.__context__ is handled:
            link.__context__ = None
        link = link.__cause__ or link.__context__
    return error


_groups: tuple[object, Communicator, Communicator, Communicator] | None = None
#: Of those groups, the ranks across machines, and which ranks these are at each place.
_across: tuple[object, Communicator, list[list[int]]] | None = None
#: Why this rank has left a group of its job.
_failure: str | None = None


def forget_groups() -> None:
    """Let go of the groups of a job that ends, before torch's own are destroyed."""
    global _groups, _across, _failure
    _groups = _across = _failure = None


def own_failure() -> str | None:
    """Why this rank has failed alone (:meth:`Communicator.told_of_errors`); None if it has not."""
    return _failure


def _known_groups() -> tuple[Communicator, Communicator, Communicator]:
    """Groups of all ranks, of this machine's and of the first ones of machines.

    They are made once for a job: each costs connections.
    """
    global _groups, _failure
    if not dist.is_initialized():
        _require_one_process()
        return Communicator(), Communicator(), Communicator()
    if dist.get_world_size() == 1:
        return Communicator(), Communicator(), Communicator()
    if _groups is None or _groups[0] is not dist.group.WORLD:
        _failure = None  # was in a job before
        group = _gloo_group(None)
        everyone = Communicator(group)
        here = everyone.run_all("find the ranks of one machine", _machine_id)
        places = everyone.all_gather((here, _has_nccl()))
        machines = [machine for machine, _ in places]
        has_nccl = all(has for _, has in places)
        everyone._gpu_group = _nccl_group(None) if has_nccl else None
        mine, firsts = Communicator(), Communicator()
        for machine in dict.fromkeys(machines):
            members = [rank for rank, other in enumerate(machines) if other == machine]
            group = _gloo_group(members)
            gpu_group = _nccl_group(members) if has_nccl else None
            if machine == machines[dist.get_rank()]:
                mine = Communicator(group, gpu_group)
        members = [machines.index(machine) for machine in dict.fromkeys(machines)]
        if len(members) > 1:
            if everyone.rank == 0 and not job_secret():
                log.warning(_UNSIGNED, SECRET)
            group = _gloo_group(members)
            firsts = Communicator(group) if dist.get_rank() in members else firsts
        _groups = dist.group.WORLD, everyone, mine, firsts
    return _groups[1:]


def _ranks_across_machines() -> tuple[Communicator, list[list[int]]]:
    """The ranks across machines, and which ranks these are at each place.

    They are connected for the jobs that need it, once.
    """
    global _across
    everyone, here, _ = _known_groups()
    if everyone.size == here.size:
        return Communicator(), []
    if _across is None or _across[0] is not _groups:
        places = _places(everyone, here)
        has_nccl = all(everyone.all_gather(everyone._gpu_group is not None))
        mine = _connect(places)
        for members in places if has_nccl else ():
            gpu_group = _nccl_group(members)
            if everyone.rank in members:
                mine._gpu_group = gpu_group
        _across = _groups, mine, places
    return _across[1:]


def _places(everyone: Communicator, here: Communicator) -> list[list[int]]:
    """The ranks at each place of all machines, by machine; or ConfigError."""
    action = "connect the ranks of several machines"
    # A machine goes by the first of its ranks.
    machine = here.broadcast_from_rank0(action, lambda: everyone.rank)
    every = everyone.all_gather((here.rank, machine))
    machines = sorted({of for _, of in every})
    places = []
    for number in range(max(rank for rank, _ in every) + 1):
        members = [rank for rank, (here_rank, _) in enumerate(every) if here_rank == number]
        if [every[rank][1] for rank in members] != machines:
            counts = [sum(of == each for _, of in every) for each in machines]
            raise ConfigError(
                action,
                f"the machines have {counts} ranks, or number them in different orders",
                "start as many ranks on each machine, and number them machine by machine",
            )
        places.append(members)
    return places


def _connect(places: Sequence[list[int]]) -> Communicator:
    """Connect the ranks at each place of all machines; those at this rank's."""
    mine = Communicator()
    for members in places:
        group = _gloo_group(members)
        if dist.get_rank() in members:
            mine = Communicator(group)
    return mine


def _require_one_process() -> None:
    """Raise in a rank of torchrun that has joined no job: it would be one of its own, unnoticed."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    # What a rank starts inherits its environment, but need not be a rank.
    if under_torchrun() and size > 1 and mp.parent_process() is None:
        raise InvalidInputError(
            f"share data with the other ranks of torchrun, {size} in all",
            "torch.distributed is not initialised",
            "call torch.distributed.init_process_group() first; or unset WORLD_SIZE for a job of "
            "each process's own",
        )


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _gloo_group(members: list[int] | None) -> dist.ProcessGroup:
    # Its ranks may wait for one that makes a data set.
    limit = timedelta(seconds=timeouts.BUILD)
    everyone = range(dist.get_world_size()) if members is None else members
    connections = len(everyone) - 1 if dist.get_rank() in everyone else 0
    try:
        with connections_are_ours(connections):
            return dist.new_group(members, backend="gloo", timeout=limit)
    except RankFailedError:
        raise
    except RuntimeError as error:
        if "Resource temporarily unavailable" in str(error):  # for its threads (ulimit -u)
            raise
        raise RankFailedError(
            "connect to the other ranks",
            f"one of them is gone, or did not come within {timeouts.BUILD:g} s "
            f"({str(error).partition(chr(10))[0]})",
            "see why it ended, and start the run again",
        ) from error


def _nccl_group(members: list[int] | None) -> dist.ProcessGroup:
    # Its ranks are connected when it is first used.
    return dist.new_group(members, backend="nccl", timeout=_NCCL_TIMEOUT)


def _gpu_of(device: torch.device) -> str:
    """Which GPU a device is, the same for every process; '' if it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _send(sent: _Sent, gpu_group: dist.ProcessGroup | None, group: SignedGroup) -> None:
    dist.all_gather(list(sent.every), sent.mine, group=gpu_group or group.group)


class _Sent:
    """A tensor of shape (n, …) on its way to all ranks, as bytes; ``lengths`` has all ranks' n.

    ``mine``, uint8 and as long as the longest, is what this rank sends; ``every``, with a row for
    each rank, what it receives.
    """

    def __init__(self, tensor: torch.Tensor, lengths: Sequence[int]) -> None:
        self._dtype, self._row_shape, self._lengths = tensor.dtype, tensor.shape[1:], lengths
        self._row_bytes = math.prod(self._row_shape) * tensor.element_size()
        self.mine = tensor.new_empty(max(lengths) * self._row_bytes, dtype=torch.uint8)
        self.every = self.mine.new_empty(len(lengths), len(self.mine))
        nbytes = tensor.numel() * tensor.element_size()
        self.mine[:nbytes].view(tensor.dtype).copy_(tensor.flatten())

    def join(self) -> torch.Tensor:
        """All ranks' rows."""
        parts = zip(self.every, self._lengths, strict=True)
        rows = torch.cat([part[: length * self._row_bytes] for part, length in parts])
        return rows.view(self._dtype).reshape(sum(self._lengths), *self._row_shape)


def rank_failed(action: str, rank: int, reason: str) -> RankFailedError:
    """What the other ranks raise when one failed, by its number in the job."""
    return RankFailedError(
        action, f"rank {rank} failed with {reason}", f"fix the cause on rank {rank}"
    )


def error_text(error: BaseException) -> str:
    """An error as it is sent to the other ranks."""
    return f"{type(error).__name__}: {error}"


def _machine_id() -> str:
    # Two containers of one host do not share /dev/shm: its device number tells them apart.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        return f"{boot}:{SHARED_MEMORY.stat().st_dev}"
    except OSError as error:
        raise unusable_shared_memory(error.strerror or str(error)) from error
