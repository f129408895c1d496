"""Run one function on N ranks of this machine, and end them all when one of them fails."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.loopback import connections_are_ours
from dgl_mgpu.comm.signing import set_job_secret
from dgl_mgpu.errors import DGLMGPUError, InvalidInputError, LimitError, RankFailedError
from dgl_mgpu.machine.shared_memory import free_shared_bytes
from dgl_mgpu.train.launch.hangs import HangMonitor, HangWatch, Heartbeats
from dgl_mgpu.train.launch.peer_monitor import SILENT_SECONDS, PeerMonitor
from dgl_mgpu.train.launch.preemption import DeferredSignals, Stopped, blocked
from dgl_mgpu.train.launch.process_group import (
    children_of,
    kill_group,
    remove_shared,
    wait_for_killed,
)
from dgl_mgpu.train.launch.torchrun_store import store_of_this_start
from dgl_mgpu.train.launch.typed_errors import (
    crash_reasons,
    is_of_processes,
    kill_reasons,
    processes_limit,
    typed_rank_losses,
    typed_worker_losses,
)
from dgl_mgpu.utils import timeouts
from dgl_mgpu.utils.stages import Heartbeat, StageTracker, stage_of
from dgl_mgpu.utils.temporary_folder import keep_together
from dgl_mgpu.utils.torchrun import under_torchrun

log = logging.getLogger(__name__)

# How often ranks are checked.  DataLoader workers inherit a rank's descriptors: while they live,
# neither its pipe nor its connections to other ranks show its end.
_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
# Where ranks of torchrun meet: in the store that their environment names.
_TORCHRUN = "env://"
# Under torchrun all ranks look for one that hangs, the second so much later than the first; those
# of a machine on which all wait leave the others this time to name the rank that they wait for.
_TURN_SECONDS = 5.0
_OTHER_MACHINES_SECONDS = 10.0
# torchrun reports the rank that ended first, by the second.
_EARLIEST_SECONDS = 1.5
# Most characters of an error that are passed on.
_MAX_TEXT = 20_000
# The length of a rank's outcome, which follows.
_LENGTH = struct.Struct("!Q")


def launch(
    work: Callable[..., None], num_ranks: int, *args: Any, hang_after: float | None = None
) -> None:
    """Call ``work(*args)`` on ``num_ranks`` ranks of a torch.distributed job.

    One rank runs here, in this process and without torch.distributed.  Several are processes of
    their own, joined by gloo (NCCL for CUDA tensors).  Under torchrun, which has made the processes
    already, this process is the rank that its environment names.

    SIGTERM, SIGHUP and Ctrl-C are passed to ranks as SIGTERM: they may raise `Stopped` within 25
    seconds; then all are killed.  A rank without a handler yet (`PreemptionHandler`) ends at once.
    A second Ctrl-C kills all ranks, and raises KeyboardInterrupt.

    With ``hang_after``, a job ends in which no rank advances for so many seconds: in the steps of
    an epoch none enters another `stage`, and before and between epochs none uses its cores, reads
    or writes.  A rank that is this process, and hangs in C code that holds Python's lock, is not
    noticed.

    Raises the typed error of a rank as it is, and any error of a rank that is this process; else
    RankFailedError with the reason and the stage of the rank that failed first, or the stack of one
    that hangs.  The other ranks have been killed.  If the rank that hangs is this process, the
    error is printed, and the process exits.  Also raises SharedMemoryError, WorkerFailedError if a
    worker of a rank's DataLoader was killed, and OutputError without a place for temporary files.
    """
    keep_together()
    if under_torchrun():
        rank = int(os.environ["RANK"])
        with _reporting_to_torchrun(rank), typed_rank_losses():
            _join_job(rank, int(os.environ["WORLD_SIZE"]), _TORCHRUN, hang_after)
            try:
                with (
                    _watching_others(hang_after) as heartbeat,
                    typed_worker_losses(),
                    StageTracker(heartbeat),
                ):
                    work(*args)
            finally:
                dist.destroy_process_group()
    elif num_ranks == 1:
        (heartbeat,) = Heartbeats(1).ranks
        monitor = None if hang_after is None else HangMonitor([heartbeat], hang_after)
        with (
            contextlib.nullcontext() if monitor is None else HangWatch(monitor, heartbeat, _leave),
            typed_worker_losses(),
            StageTracker(heartbeat),
        ):
            work(*args)
    else:
        _run_processes(work, num_ranks, args, hang_after)


# -- the process that starts ranks -----------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """The result that a rank reports when it ends."""

    done: bool
    stopped: bool = False
    follows: bool = False  # whether it failed only because another rank did
    when: float = 0.0
    error: Exception | str = ""
    trace: str = ""


@dataclass(frozen=True)
class _Rank:
    """A rank's process, and where its outcome and its last stage are to be read."""

    process: Any
    pipe: Connection
    heartbeat: Heartbeat
    received: bytearray = field(default_factory=bytearray)

    def receive(self) -> bool:
        """Read what there is of its outcome, without waiting for more; whether more may come.

        A rank may be killed while it writes, and its children hold the pipe open.
        """
        os.set_blocking(self.pipe.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.pipe.fileno(), 1 << 16):
                self.received.extend(part)
            return False
        return True

    def outcome(self) -> _Outcome | None:
        """Its outcome, if all of it has been read."""
        content = self.received[_LENGTH.size :]
        is_whole = (
            len(self.received) >= _LENGTH.size
            and len(content) >= _LENGTH.unpack_from(self.received)[0]
        )
        return pickle.loads(content) if is_whole else None

    def has_ended(self, ready: list[Any]) -> bool:
        """Whether it has ended; its sentinel may not show that while children hold it open."""
        return self.process.sentinel in ready or self.process.exitcode is not None


def _run_processes(
    work: Callable[..., None], num_ranks: int, args: tuple, hang_after: float | None
) -> None:
    free_shared_bytes()  # raises without shared memory
    log.info("starting %d ranks", num_ranks)
    context = mp.get_context("spawn")
    heartbeats = Heartbeats(num_ranks)
    monitor = None if hang_after is None else HangMonitor(heartbeats.ranks, hang_after)
    with (
        DeferredSignals() as signals,
        tempfile.TemporaryFile() as file,
        contextlib.ExitStack() as ending,
    ):
        job = _Job(signals)
        ending.callback(job.end)
        # Without a name, so that nothing is left of it however this process ends.
        meeting_point = f"file:///proc/{os.getpid()}/fd/{file.fileno()}"
        # Over a pipe, so that nobody else can read the secret.
        common = num_ranks, meeting_point, os.getpid(), secrets.token_bytes(32)
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(work, rank, *common, sender, heartbeats.path, hang_after, args),
                name=f"rank {rank}",
            )
            signals.check()
            # Ctrl-C is for all processes of a terminal; a rank leaves it to this one, also while it
            # imports what it runs.  The tracker's start, if it is yet to come, would end the block.
            resource_tracker.ensure_running()
            with blocked(signal.SIGINT):
                process.start()
            sender.close()
            heartbeats.ranks[rank].process = process.pid or 0
            job.ranks.append(_Rank(process, receiver, heartbeats.ranks[rank]))
        try:
            end = job.wait(monitor)
        except Stopped as stopped:
            end = job.stop() or stopped
    if end is not None:
        raise end


class _Job:
    """The ranks of a job, and the outcomes of those that have ended: None of one without any."""

    def __init__(self, signals: DeferredSignals) -> None:
        self.ranks: list[_Rank] = []
        self._outcomes: dict[int, _Outcome | None] = {}
        self._signals = signals

    def wait(self, monitor: HangMonitor | None) -> DGLMGPUError | Stopped | None:
        """Wait for all ranks to end well, or for the first to fail."""
        if (hang := self._receive(monitor=monitor)) is not None:
            return hang
        outcomes = self._outcomes.values()
        if len(outcomes) == len(self.ranks) and all(o is not None and o.done for o in outcomes):
            self._wait_for_ends()
            return Stopped() if any(o is not None and o.stopped for o in outcomes) else None
        return self._cause()

    def stop(self) -> DGLMGPUError | None:
        """Ask all ranks to stop; return the error of one that did not."""
        outcomes = self._outcomes
        for rank in self.ranks:
            rank.process.terminate()
        self._receive(time.monotonic() + timeouts.STOP)
        for number, rank in enumerate(self.ranks):
            if number in outcomes and outcomes[number] is None:
                rank.process.join(timeouts.CAUSE)
                # It did not listen yet, and there was nothing to keep; or it was done, and its
                # outcome was being read when SIGTERM came.  SIGHUP may have been sent to all.
                if rank.process.exitcode in (-signal.SIGTERM, -signal.SIGHUP, 0):
                    outcomes[number] = _Outcome(True, stopped=True)
        if any(o is None or not (o.done or o.follows) for o in outcomes.values()):
            return self._cause()
        for number, rank in enumerate(self.ranks):
            if number not in outcomes:
                where = rank.heartbeat.last_stage()
                problem = f"it ran on for {timeouts.STOP:g} s after SIGTERM{where}"
                return _rank_failed(number, problem)
        return None

    def end(self) -> None:
        """Kill ranks that still run, and remove what they leave."""
        killed = [p for rank in self.ranks if rank.process.is_alive() for p in _kill(rank.process)]
        deadline = time.monotonic() + timeouts.END
        for number, rank in enumerate(self.ranks):
            wait_for_killed(rank.process, f"rank {number}", deadline)
        remove_shared(killed)

    def _receive(
        self, deadline: float | None = None, monitor: HangMonitor | None = None
    ) -> RankFailedError | None:
        """Receive outcomes until all ranks have ended, one fails, or the deadline; or ranks hang,
        of which the error is returned."""
        end = math.inf if deadline is None else deadline
        outcomes = self._outcomes
        while len(outcomes) < len(self.ranks):
            running = {n: rank for n, rank in enumerate(self.ranks) if n not in outcomes}
            left = end - time.monotonic()
            signs = [s for rank in running.values() for s in (rank.pipe, rank.process.sentinel)]
            ready = wait([*signs, *self._signals.sign], min(max(left, 0.0), _LOOK_SECONDS))
            self._signals.check()
            for number, rank in running.items():
                # Asked first: all that a rank has written that has ended is there to be read.
                has_ended = rank.has_ended(ready)
                # Read at once, since a rank's outcome may fill the pipe.
                if rank.pipe in ready or has_ended:
                    may_send_more = rank.receive() and not has_ended
                    outcome = rank.outcome()
                    if outcome is not None or not may_send_more:
                        outcomes[number] = outcome
            if not ready and left <= 0:
                break
            if monitor is not None and (hang := monitor.look()) is not None:
                return hang
            failed = [o for o in outcomes.values() if o is None or not o.done]
            if deadline is None and failed:
                # The others fail of it within moments; the cause is the earliest report, or a rank
                # that was killed before it could write one.
                is_known = any(o is None or not o.follows for o in failed)
                more = timeouts.REPORTS if is_known else timeouts.CAUSE
                end = min(end, time.monotonic() + more)
        return None

    def _wait_for_ends(self) -> None:
        """Wait for the processes of ranks that are done; those that stay are killed later."""
        running = {rank.process.sentinel: (n, rank) for n, rank in enumerate(self.ranks)}
        deadline = time.monotonic() + timeouts.LEAVE
        while running and time.monotonic() < deadline:
            ready = wait([*running, *self._signals.sign], _LOOK_SECONDS)
            self._signals.check()
            running = {s: item for s, item in running.items() if not item[1].has_ended(ready)}
        for number, rank in running.values():
            log.warning(
                "rank %d (process %d) was done %g s ago and has not ended%s: it is killed",
                number, rank.process.pid, timeouts.LEAVE, rank.heartbeat.last_stage(),
            )  # fmt: skip

    def _cause(self) -> DGLMGPUError:
        silent = {n: self.ranks[n] for n, outcome in self._outcomes.items() if outcome is None}
        for number, rank in silent.items():
            rank.process.join(timeouts.CAUSE)
            code = rank.process.exitcode
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                hint = f" ({kill_reasons()})" if name == "SIGKILL" else crash_reasons()
                problem = f"it was killed by {name}{rank.heartbeat.last_stage()}{hint}"
                return _rank_failed(number, problem)
        for number, rank in silent.items():
            problem = (
                f"it left before its work was done{rank.heartbeat.last_stage()}, with exit code"
            )
            # libgomp leaves so without a thread.
            return _rank_failed(number, f"{problem} {rank.process.exitcode}{crash_reasons()}")
        failed = [(o, n) for n, o in self._outcomes.items() if o and not o.done]
        # A rank that failed only because another did may report first.
        first, number = min(failed, key=lambda item: (item[0].follows, item[0].when))
        if isinstance(first.error, DGLMGPUError):
            return first.error
        if not first.follows:  # whose typed error needs no traceback
            print(first.trace, file=sys.stderr, end="")
        return _rank_failed(number, f"it raised {first.error}")


def _rank_failed(rank: int, problem: str) -> RankFailedError:
    return RankFailedError(
        f"run rank {rank}",
        problem,
        "fix the cause; training continues from its last epoch with trainer.resume",
    )


def _kill(process: Any) -> list[int]:
    # With its children: a DataLoader worker that is handing a batch to a rank just gone
    # complains of the broken connection.
    try:
        return kill_group(process.pid)
    except ProcessLookupError:  # it has not come to lead its group yet, and has no children
        process.kill()
        return []


# -- ranks that this package has started -----------------------------------------------------------


def _rank_main(
    work: Callable[..., None],
    rank: int,
    num_ranks: int,
    meeting_point: str,
    parent: int,
    secret: bytes,
    sender: Connection,
    heartbeats: Path,
    hang_after: float | None,
    args: tuple,
) -> None:
    # The parent hears Ctrl-C and ends its ranks; and they do not outlive it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    # A rank's own children, DataLoader workers, start as they do anywhere else on Linux.
    mp.set_start_method("fork", force=True)
    stopped = False
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        with typed_rank_losses():
            set_job_secret(secret)
            # From here on its stage is visible, also of a rank that does not come to join.
            with StageTracker(Heartbeats(num_ranks, heartbeats).ranks[rank]):
                _join_job(rank, num_ranks, meeting_point, hang_after)
                try:
                    with typed_worker_losses():
                        work(*args)
                except Stopped:
                    stopped = True
                dist.destroy_process_group()
    except Exception as error:
        follows = isinstance(error, RankFailedError)
        trace = traceback.format_exc()[-_MAX_TEXT:]
        when = time.monotonic()
        _send(sender, _Outcome(False, False, follows, when, _portable(error), trace))
        sender.close()
        # Without the interpreter's shutdown, which may wait for ranks that are gone.
        os._exit(1)
    _send(sender, _Outcome(True, stopped))


def _send(sender: Connection, outcome: _Outcome) -> None:
    content = pickle.dumps(outcome)
    with open(sender.fileno(), "wb", closefd=False) as pipe:
        pipe.write(_LENGTH.pack(len(content)) + content)


def _portable(error: Exception) -> Exception | str:
    """The error itself if it is one of ours and survives the trip, else its text."""
    if isinstance(error, DGLMGPUError) and not isinstance(error, RankFailedError):
        try:
            return pickle.loads(pickle.dumps(error))
        except (pickle.PicklingError, TypeError, AttributeError):
            return str(error)
    return _text(error)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT] + stage_of(error)


def _join_job(
    rank: int, num_ranks: int, meeting_point: str, hang_after: float | None = None
) -> None:
    backend = "gloo"
    # A rank that waits for one that hangs is ended by the monitor, which names that one.
    limit = max(timeouts.JOIN, 2 * (hang_after or 0.0))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if meeting_point.startswith("file:"):
        # All ranks are on this machine, whose name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet: dict[str, Any] = {"init_method": meeting_point}
    try:
        if meeting_point == _TORCHRUN:
            store, rank, num_ranks = next(dist.rendezvous(meeting_point))
            meet = {"store": store_of_this_start(store, rank, num_ranks, limit)}
        with connections_are_ours(num_ranks - 1):
            dist.init_process_group(
                backend,
                **meet,
                timeout=timedelta(seconds=limit),
                rank=rank,
                world_size=num_ranks,
            )
        # A rank that is done at once would close connections that others have yet to look at.
        dist.all_reduce(torch.zeros(1, device="cpu"))
    except RankFailedError:
        raise
    except RuntimeError as error:
        if is_of_processes(error):  # gloo's threads
            raise LimitError(
                f"join {num_ranks} ranks as rank {rank}",
                f"{str(error).partition(chr(10))[0]}; {processes_limit()}",
                "raise it (ulimit -u, ulimit -v), or use fewer ranks",
            ) from error
        raise RankFailedError(
            f"join {num_ranks} ranks as rank {rank}",
            f"not all of them came within {limit:g} s, or one is gone "
            f"({str(error).partition(chr(10))[0]})",
            "see why the others did not start, and start the run again",
        ) from error


# -- ranks of torchrun -----------------------------------------------------------------------------


@contextlib.contextmanager
def _watching_others(hang_after: float | None) -> Iterator[Heartbeat]:
    """Leave at once when another machine is lost, or a rank hangs: nothing else ends the wait.

    Yields this rank's heartbeat.
    """
    everyone, here = Communicator.of_all_machines(), Communicator.of_this_machine()
    action = "share heartbeats"
    first = here.run_all(action, lambda: Heartbeats(here.size) if here.rank == 0 else None)
    path = here.all_gather(None if first is None else first.path)[0]
    heartbeats = here.run_all(action, lambda: first or Heartbeats(here.size, path))
    own = heartbeats.ranks[here.rank]
    numbers = here.all_gather(everyone.rank)
    peers: PeerMonitor | None = None
    with contextlib.ExitStack() as watching:
        if here.size < everyone.size:
            peers = watching.enter_context(PeerMonitor(everyone, own, hang_after, _leave))
        if hang_after is not None:
            # Another rank watches in case the first itself hangs, for example holding the GIL.
            after = hang_after + _TURN_SECONDS * here.rank
            monitor = HangMonitor(heartbeats.ranks, after, numbers)

            def end_all(error: RankFailedError) -> None:
                if peers is not None and monitor.all_wait:
                    time.sleep(_OTHER_MACHINES_SECONDS)  # they name the rank, and all leave
                if peers is not None:
                    peers.report(error)
                # Where a rank is done, another process may have its number.
                running = {heartbeat.process for heartbeat in heartbeats.ranks if heartbeat.stacks}
                _leave(error, running - {os.getpid()})

            watching.enter_context(HangWatch(monitor, own, end_all))
        yield own


@contextlib.contextmanager
def watch_machines(silent_after: float = 15.0) -> Iterator[None]:
    """End this process when another rank of its job is lost: for scripts that torchrun has started.

    Collective: every rank uses it as a context manager, around all that ranks do together.  A rank
    that raises, or is killed, closes its connections, by which gloo knows; but those to a machine
    that loses power or the network, or is stopped, stay open, and NCCL waits in any case.  So a
    thread of each rank writes to torchrun's store every second, and looks for the others' word.
    Who misses some ends with a RankFailedError on stderr and status 1, and so do all who can still
    be reached, whatever they wait for.  So do all where one fails alone in what this package does,
    and others wait for it by NCCL.  ``dgl-mgpu train`` does this by itself.

    Parameters
    ----------
    silent_after : float
        Seconds, at least 15, without word of a rank after which it is lost.  One that holds
        Python's lock for so long, in a function of C that keeps it, is taken for lost, too.

    Raises
    ------
    InvalidInputError
        If torchrun has not started this process, ``torch.distributed`` is not initialised, or
        ``silent_after`` is less.
    RankFailedError
        If torchrun's store cannot be reached.

    Examples
    --------
    >>> torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    >>> with dgl_mgpu.watch_machines():
    ...     store = dgl_mgpu.GlobalStore.from_partition("parts/mine.json")
    ...     train(store)
    """
    action = "watch the machines of a job"
    if not under_torchrun():
        raise InvalidInputError(
            action, "torchrun has not started this process", "start the script by torchrun"
        )
    if not silent_after >= SILENT_SECONDS:
        raise InvalidInputError(
            action,
            f"silent_after is {silent_after!r}",
            f"pass {SILENT_SECONDS:g} seconds or more",
        )
    everyone = Communicator.of_all_machines()
    if everyone.size == 1:
        yield
        return
    with PeerMonitor(everyone, Heartbeat(), silent_after, _leave):
        yield


@contextlib.contextmanager
def _reporting_to_torchrun(rank: int) -> Iterator[None]:
    """Raise what a rank raises as a typed error that names it, and have torchrun report it.

    A rank that failed only because another did leaves the report to that one.
    """
    try:
        yield
    except RankFailedError:
        raise
    except DGLMGPUError as error:
        _record(error)
        raise
    except Exception as error:
        traceback.print_exc()  # the typed error is shown in a line
        failure = _rank_failed(rank, f"it raised {_text(error)}")
        _record(failure)
        raise failure from error


def _record(error: DGLMGPUError) -> None:
    """Write an error where torchrun looks for it, if that has room."""
    try:
        raise error from None  # what is written is what is being handled
    except DGLMGPUError:
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def _leave(error: RankFailedError, ranks: Collection[int] = ()) -> NoReturn:
    """End this process now, whatever its threads wait for, and the processes of other ranks."""
    _record(error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    workers = children_of(os.getpid())
    _kill_each(workers)
    remove_shared(workers)
    if ranks:
        time.sleep(_EARLIEST_SECONDS)
        # From here on no other thread runs: the main one would record that the others are gone.
        sys.setswitchinterval(timeouts.END)
        _kill_each(ranks)
    os._exit(1)


def _kill_each(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
