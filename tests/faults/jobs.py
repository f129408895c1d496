"""Whole training jobs to be killed, stopped and resumed, and what is to be looked for after."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing as mp
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dgl_mgpu.cli import main
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint, checkpoints, has_checkpoint
from tests.forkserver import forkserver
from tests.pictures import nothing_drawn
from tests.train.jobs import SMALL, equal_states, fork_ranks

#: For a job to end after a fault: `timeouts.CAUSE`, `timeouts.END` and a machine that is busy.
END_SECONDS = 45.0
#: For the last process of a job, after its command: torch's workers look every 5 s for their rank.
LEFT_SECONDS = 20.0
#: For a whole run: longer means that it hangs.
RUN_SECONDS = 150.0
ROOT = Path(__file__).parents[2]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Member:
    """A process of a job."""

    pid: int
    parent: int
    session: int
    started: int


def processes() -> list[Member]:
    """All processes of the machine but those that have ended and are yet to be waited for."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue
        state, *fields = text.rpartition(")")[2].split()
        if state not in "ZX":
            found.append(Member(int(name), int(fields[0]), int(fields[2]), int(fields[18])))
    return found


class Job:
    """``dgl-mgpu train`` with a session, a TMPDIR and files for its output of its own.

    Parameters
    ----------
    place : Path
        Where jobs that follow each other have these, and the run its folder, ``run``.
    overrides : str
    start : str
        ``console``: the command, as a shell starts it.  ``forked``: from a process that has
        imported what the command needs, so that its ranks begin within moments.  ``torchrun``.
        ``stores``: no training, but the program ``gpu_stores``.
    folder : str
        Of the run.
    """

    def __init__(
        self, place: Path, *overrides: str, start: str = "forked", folder: str = "run"
    ) -> None:
        self.folder = place / folder
        place.mkdir(parents=True, exist_ok=True)
        # Sockets in it have short names; those of a test's own folder may be too long.
        self.temporary = Path(f"/tmp/faults-{os.getpid()}-{zlib.crc32(bytes(place)):08x}")
        self.temporary.mkdir(exist_ok=True)
        self._number = len(list(place.glob("output-*")))
        self.output = place / f"output-{self._number}"
        self.overrides = overrides
        self.began = time.monotonic()
        # Sessions of torchrun's ranks are their own.
        self._mark = f"DGL_MGPU_FAULTS_JOB={place}/{self._number}"
        words = ["train", *overrides, f"hydra.run.dir={self.folder}"]
        if start == "stores":
            words = [*overrides, str(self.folder)]
        self._process = _start(start, words, self.temporary, self.output, self._mark)
        self.pid: int = self._process.pid
        self.seen: set[int] = {self.pid}

    def members(self) -> list[Member]:
        """Its processes that run, the first one first."""
        mark = self._mark.encode()
        found = [each for each in processes() if each.session == self.pid or _has(each.pid, mark)]
        self.seen |= {each.pid for each in found}
        return sorted(found, key=lambda each: (each.pid != self.pid, each.started, each.pid))

    def roles(self, ranks: int) -> dict[str, list[int]]:
        """Its processes by what they are; a rank's number is its place in the list.

        Parameters
        ----------
        ranks : int
            How many the job has.
        """
        members = [each for each in self.members() if not _is_tracker(each.pid)]
        found: dict[str, list[int]] = {"launcher": [], "rank": [], "worker": []}
        for each in members:
            if each.pid == self.pid:
                found["launcher"].append(each.pid)
            elif ranks > 1 and each.parent == self.pid:
                found["rank"].append(each.pid)
            else:
                found["worker"].append(each.pid)
        return {role: pids for role, pids in found.items() if pids}

    def ended(self, seconds: float) -> bool:
        """Whether it ends within these seconds."""
        if isinstance(self._process, subprocess.Popen):
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            return True
        self._process.join(seconds)
        return self._process.exitcode is not None

    def code(self, seconds: float = RUN_SECONDS) -> int:
        """Its exit status, which it is to have within these seconds."""
        assert self.ended(seconds), f"it runs on for {seconds:g} s: {self.told()}"
        if isinstance(self._process, subprocess.Popen):
            return self._process.returncode
        return self._process.exitcode

    def require_no_process(self, seconds: float = LEFT_SECONDS) -> None:
        """See that no process of it is left after these seconds."""
        until(lambda: not self.members(), seconds, lambda: f"{self.members()} left: {self.told()}")

    def require_no_file(self) -> None:
        """See that none of its files is in shared memory or where temporary files are."""

        def left() -> list[str]:
            # torch's cache of what it compiles is for all programs of a user, and stays.
            if not self.temporary.exists():
                return self.shared()
            others = (x for x in os.listdir(self.temporary) if not x.startswith("torchinductor_"))
            return [*others, *self.shared()]

        until(lambda: not left(), 2.0, lambda: f"{left()} left: {self.told()}")

    def shared(self) -> list[str]:
        """Files in /dev/shm of its processes, and of the temporary folders it may have."""
        own = re.compile(rf"torch_({'|'.join(map(str, self.seen))})_.*")
        folders = [f"sem.{path.name}-" for path in self.temporary.glob("dgl-mgpu-*")]
        return [
            name
            for name in os.listdir("/dev/shm")
            if own.fullmatch(name) or any(map(name.startswith, folders))
        ]

    def errors(self) -> str:
        """What it has written so far, to stdout and stderr."""
        return self.output.read_text(errors="replace")

    def shows_traceback(self) -> bool:
        """Whether it does, but for that of a worker whose rank left before it took a batch."""
        return "Traceback" in self.errors() and "resource_sharer" not in self.errors()

    def told(self) -> str:
        """What to say of it when something is wrong."""
        words = " ".join(self.overrides)
        return f"job {self._number}: {words}\n{self.errors()[-6000:]}"

    def clear(self) -> None:
        """Kill whatever is left of it."""
        for each in self.members():
            send(each.pid, signal.SIGKILL)
        self.ended(END_SECONDS)
        if not any_of(self.temporary, "dgl-mgpu-*"):  # which the next one is to take away
            shutil.rmtree(self.temporary, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()


def _start(start: str, words: list[str], temporary: Path, output: Path, mark: str):
    if start == "forked":
        command = forkserver().Process(target=_forked, args=(words, temporary, output))
        command.start()
        return command
    program = {
        "console": ["dgl_mgpu.cli"],
        "torchrun": [
            "torch.distributed.run", "--standalone", f"--nproc-per-node={_ranks_of(words)}", "-m",
            "dgl_mgpu.cli",
        ],
        "stores": ["tests.faults.gpu_stores"],
    }[start]  # fmt: skip
    name, _, value = mark.partition("=")
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", name: value}
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *program, *words],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_default_signals,
        )  # fmt: skip


def _ranks_of(words: Sequence[str]) -> str:
    said = [word for word in words if word.startswith("trainer.ranks=")]
    return said[-1].partition("=")[2] if said else "1"


def _default_signals() -> None:
    """Also where a shell runs the tests in the background, which ignores some then."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _forked(words: list[str], temporary: Path, output: Path) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    _default_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(TMPDIR=str(temporary), CUDA_VISIBLE_DEVICES="")
    tempfile.tempdir = None
    # As in a process that a shell has started, and not one that belongs to a job already.
    config = mp.current_process()._config
    config.pop("tempdir", None)
    config["semprefix"] = "/mp"
    fork_ranks()
    mp.set_start_method("fork", force=True)
    with nothing_drawn():
        sys.exit(main(words))


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def send(pid: int, signum: int) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def until(condition: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
    """Wait for something, which is an error where it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def moment(job: Job, rng: random.Random, usual_seconds: float) -> str:
    """Wait for a random moment of a job, or its end; say in words which kind it is."""
    partial_file = partial(any_of, job.folder / "checkpoints", "*.partial")
    if rng.random() < 0.3:
        # While a checkpoint is written, which takes a small share of the time.
        number = rng.randrange(1, 5)
        for _ in range(number):
            while not partial_file() and not job.ended(0):
                pass
            while partial_file() and _ < number - 1 and not job.ended(0):
                pass
        return "while a checkpoint is written"
    job.ended(max(0.0, job.began + rng.uniform(0, 1.1 * usual_seconds) - time.monotonic()))
    return "at a random moment"


def any_of(folder: Path, pattern: str) -> bool:
    return folder.is_dir() and any(folder.glob(pattern))


def goes_on(folder: Path, options: Sequence[str]) -> list[str]:
    """What to say to a run that was killed: resume it, or start it anew without a checkpoint."""
    if has_checkpoint(folder):
        return [*options, f"trainer.resume={folder}"]
    # It may have told of epochs, of which nothing is kept with a larger trainer.checkpoint_every.
    shutil.rmtree(folder, ignore_errors=True)
    return list(options)


def is_complete(folder: Path) -> bool:
    """Whether a run has written all that a run writes, and has only to leave."""
    file = folder / "metrics.jsonl"
    return file.exists() and read_metrics(file)[1] is not None


def require_checkpoints_load(folder: Path) -> int:
    """See that every checkpoint that is there can be read; how many these are."""
    found = checkpoints(folder / "checkpoints")
    for each in found:
        assert Checkpoint.load(each).epoch == int(each.stem.partition("-")[2])
    return len(found)


def require_same(ours: Path, theirs: Path) -> None:
    """See that two runs have the same weights, and the same figures of each epoch and of all."""
    left, right = (Checkpoint.load(each) for each in (ours, theirs))
    assert equal_states(left.model, right.model)
    assert equal_states(left.best_model, right.best_model)
    (reports, summary), (expected, others) = (
        read_metrics(each / "metrics.jsonl") for each in (ours, theirs)
    )
    assert len(reports) == len(expected)
    for mine, other in zip(reports, expected, strict=True):
        assert dataclasses.replace(mine, seconds=other.seconds) == other
    assert summary is not None and others is not None
    assert {**summary, "restarts": 0} == {**others, "restarts": 0}


class Runs:
    """Runs that nothing interrupts, each made once, and how long they take.

    Parameters
    ----------
    place : Path
    data : str
        The option that says where data are.
    """

    def __init__(self, place: Path, data: str) -> None:
        self._place, self._data = place, data
        self._made: dict[tuple[str, ...], tuple[Path, float]] = {}

    def options(self, *others: str) -> list[str]:
        """Of a small run on the CPU."""
        return [*SMALL, self._data, *others]

    def whole(self, *others: str) -> tuple[Path, float]:
        """The folder of a run that nothing interrupts, and the seconds that it took."""
        if others not in self._made:
            place = self._place / str(len(self._made))
            with Job(place, *self.options(*others)) as job:
                assert job.code() == 0, job.told()
                self._made[others] = job.folder, time.monotonic() - job.began
                job.require_no_process()
                job.require_no_file()
        return self._made[others]
