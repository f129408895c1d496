"""Detects machines that are lost silently: by a failure of power, a cable or a switch, or stopped.

Connections to such a machine stay open, and ranks that wait for its tensors go on waiting: gloo and
NCCL for many minutes.  So a thread of each rank writes to torchrun's store every second: that is
its beat.  The first rank looks at all others' beats, the others at the first one's.  Who finds one
missing writes a report, with which all ranks end; so does a rank that fails alone where others may
not hear of it.

In a stage of any length a rank may hold Python's lock for long; there its beats may be missing for
as long as it may hang.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator, own_failure, rank_failed
from dgl_mgpu.comm.signing import job_secret
from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.train.launch.preemption import Stopped
from dgl_mgpu.train.launch.torchrun_store import job_store
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.stages import Heartbeat

_BEAT_SECONDS = 1.0
#: For how long a rank's beats may be missing, or the store may not answer.
SILENT_SECONDS = 15.0
# A look that comes later than this was delayed, as beats may have been: a suspended job.
_LATE_SECONDS = 2.0
# How long the other ranks get to report the end of a rank themselves, and to read a report.
_OWN_REPORT_SECONDS, _TELL_SECONDS = 5.0, 5.0
#: What a beat says of its rank: whether it is in a step, in a stage of any length, has read the
#: report, or is at its end, well or not.
_STEP, _STAGE, _TOLD, _DONE, _FAILED = "step", "stage", "told", "done", "failed"
_REPORT, _NO_REPORT = "report", "-"
_ACTION = "train with ranks on other machines"
# Characters of a report's signature, and those quoted of what is none.
_SIGNATURE, _QUOTED_BYTES = 64, 80


class _Read(NamedTuple):
    """What this rank has read of the store after so many beats of its own, and their last state."""

    after: int
    state: str
    report: bytes
    beats: dict[int, str]


class PeerMonitor:
    """Watches the ranks of the job on other machines, while it is used as a context manager.

    Collective over ``ranks``, all of the job.  ``own`` is this rank's heartbeat, and ``hang_after``
    the seconds for which a rank may hang in a stage of any length, or None for ever.  ``on_loss``
    is called on a thread of its own, on all ranks that can still be reached, with the error that
    names the lost rank.  Raises RankFailedError if a rank cannot reach torchrun's store.
    """

    def __init__(
        self,
        ranks: Communicator,
        own: Heartbeat,
        hang_after: float | None,
        on_loss: Callable[[RankFailedError], Any],
    ) -> None:
        self._rank, self._own, self._on_loss = ranks.rank, own, on_loss
        self._longest = max(SILENT_SECONDS, math.inf if hang_after is None else hang_after)
        action = "watch the other ranks"
        token = ranks.broadcast_from_rank0(action, lambda: secrets.token_hex(32))
        # The token has crossed the network; the job's secret, if there is one, has not.
        self._key = hmac.digest(job_secret(), token.encode(), "sha256")
        self._address = os.environ["MASTER_ADDR"]
        self._store = ranks.run_all(action, partial(_connect, f"watch/{token}"))
        #: For how many seconds the last beat of each rank that is watched has been its last.
        self._silent = dict.fromkeys(range(1, ranks.size) if ranks.rank == 0 else (0,), 0.0)
        # One thread waits for the store, another one looks at what it has read.
        self._wake = threading.Event()
        self._end = ""
        self._own_report = b""
        self._count = 0
        self._lost_store: RuntimeError | None = None
        if ranks.rank == 0:
            self._store.set(_REPORT, _NO_REPORT)
        state = self._write()
        ranks.run_all(action, lambda: None)  # everybody's first beat is there to be read
        self._read = self._read_store(state)
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._beating.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def __enter__(self) -> PeerMonitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        is_well = kind is None or issubclass(kind, Stopped)
        self._end = self._end or (_DONE if is_well else _FAILED)
        self._wake.set()
        self._beating.join(_TELL_SECONDS)

    def report(self, error: RankFailedError) -> None:
        """Have all other ranks end with an error; waits until they know it."""
        parts = json.dumps([error.asked, error.found, error.fix]).encode()
        self._own_report = hmac.digest(self._key, parts, "sha256").hex().encode() + parts
        self._tell()

    # -- a thread that writes and reads ------------------------------------------------------------

    def _beat(self) -> None:
        try:
            while True:
                self._wake.wait(_BEAT_SECONDS)
                self._wake.clear()
                state = self._write()
                if state in (_DONE, _FAILED):
                    return
                self._read = self._read_store(state)
        except RuntimeError as error:
            self._lost_store = error

    def _write(self) -> str:
        """Write a beat, and this rank's report if it has one; return the state that it told."""
        state = self._end or (_STEP if self._own.in_step else _STAGE)
        self._count += 1
        self._store.set(f"beat {self._rank}", f"{state} {self._count}")
        if self._own_report:  # the first one counts
            self._store.compare_set(_REPORT, _NO_REPORT, self._own_report.decode())
        return state

    def _read_store(self, state: str) -> _Read:
        report, *beats = self._store.multi_get([_REPORT, *(f"beat {n}" for n in self._silent)])
        texts = (beat.decode(errors="replace") for beat in beats)
        return _Read(self._count, state, report, dict(zip(self._silent, texts, strict=True)))

    # -- a thread that looks at what was read ------------------------------------------------------

    def _watch(self) -> None:
        before, looked, unanswered, failed = self._read, time.monotonic(), 0.0, 0.0
        while True:
            time.sleep(_BEAT_SECONDS)
            now, read = time.monotonic(), self._read
            seconds, looked = min(now - looked, _LATE_SECONDS), now
            unanswered = unanswered + seconds if read.after == before.after else 0.0
            if self._lost_store is not None:
                time.sleep(_OWN_REPORT_SECONDS)  # ranks that hear of it otherwise say more
            if self._end:
                return
            if self._lost_store is not None or unanswered >= SILENT_SECONDS:
                self._on_loss(self._store_is_lost())
                return
            if read.report != _NO_REPORT.encode():
                error = self._reported(read.report)
                self._tell()
                self._on_loss(error)
                return
            failure = own_failure()
            failed += seconds if failure is not None else 0.0
            if failure is not None and failed >= _OWN_REPORT_SECONDS:
                # This rank cannot end before others do, which wait for NCCL.
                self.report(rank_failed(_ACTION, self._rank, failure))
                return
            if read.after > before.after:
                for rank, beat in read.beats.items():
                    is_new = beat != before.beats[rank]
                    self._silent[rank] = 0.0 if is_new else self._silent[rank] + seconds
                before = read
                lost = self._lost_rank(read)
                if lost is not None:
                    self.report(lost)
                    self._on_loss(lost)
                    return

    def _lost_rank(self, read: _Read) -> RankFailedError | None:
        for rank, beat in read.beats.items():
            state, silent = beat.partition(" ")[0], self._silent[rank]
            if state == _FAILED and silent >= _OWN_REPORT_SECONDS:
                # Ranks that exchange tensors with it over TCP raise by themselves; over NCCL they
                # wait.
                return _loss(f"rank {rank} has ended before its work was done")
            if state in (_DONE, _FAILED, _TOLD):
                continue
            if silent >= (SILENT_SECONDS if state == _STEP else self._longest):
                return _loss(
                    f"rank {rank} is silent for {silent:.0f} s: it is stopped, or its machine, or "
                    "the way to it, is lost"
                )
        return None

    def _store_is_lost(self) -> RankFailedError:
        error = self._lost_store
        how = (
            f"does not answer for {SILENT_SECONDS:g} s"
            if error is None
            else f"is gone ({str(error).partition(chr(10))[0]})"
        )
        return _loss(
            f"torchrun's store at {self._address} {how}: its machine has ended or is stopped, or "
            "it, or the way to it, is lost"
        )

    def _tell(self) -> None:
        """Say that this rank knows the report, and wait until those that it watches do."""
        self._end = _TOLD
        self._wake.set()
        deadline = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < deadline and self._lost_store is None:
            read = self._read
            awaited = [n for n, silent in self._silent.items() if silent < SILENT_SECONDS]
            states = {read.beats[rank].partition(" ")[0] for rank in awaited}
            if read.state == _TOLD and states <= {_TOLD, _DONE, _FAILED}:
                return
            time.sleep(_BEAT_SECONDS / 10)

    def _reported(self, report: bytes) -> RankFailedError:
        """The error that a rank reports."""
        signature, text = report[:_SIGNATURE], report[_SIGNATURE:]
        with contextlib.suppress(ValueError):
            if hmac.compare_digest(
                signature, hmac.digest(self._key, text, "sha256").hex().encode()
            ):
                parts = safe_json.loads(text)
                if isinstance(parts, list) and [type(part) for part in parts] == [str] * 3:
                    return RankFailedError(*parts)
        return _loss(f"torchrun's store has a report that is no rank's: {report[:_QUOTED_BYTES]!r}")


def _connect(name: str) -> dist.Store:
    try:
        return job_store(name)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
        raise RankFailedError(
            f"connect to torchrun's store at {address}",
            str(error).partition("\n")[0],
            "let all machines connect to that port (MASTER_ADDR, --master-port)",
        ) from error


def _loss(problem: str) -> RankFailedError:
    return RankFailedError(
        _ACTION,
        problem,
        "see why, or start on fewer machines; trainer.resume goes on from the last checkpoint",
    )
