"""Training on too little of something: one typed error that names it, or a run as any other.

Limits of a shell's (``ulimit``), ``/dev/shm``, disks, folders that cannot be written, a standard
output that takes nothing.  Whatever comes of a run, it ends in time, shows no traceback, leaves
nothing in shared memory or among temporary files, and the checkpoints of before as they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing as mp
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import dgl_mgpu.errors
from dgl_mgpu.cli import main
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint, checkpoints
from tests.faults.users import become, forget_job, needs_root
from tests.forkserver import forkserver
from tests.pictures import nothing_drawn
from tests.train import jobs
from tests.train.jobs import SMALL, shared_memory, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: A run takes two seconds; a machine that has other things to do, and waits that end in an error.
_BOUND_SECONDS = 120.0
_MIB = 1 << 20
_NEWNS, _PRIVATE, _REC, _RDONLY, _REMOUNT = 0x20000, 1 << 18, 1 << 14, 1, 32
_LIBC = ctypes.CDLL(None, use_errno=True)
_NOBODY = 65533  # no other test's, so that its processes can be counted


@dataclass(frozen=True)
class End:
    """How a command has ended."""

    status: int
    shown: str
    errors: str
    seconds: float

    @property
    def of_libgomp(self) -> bool:
        return "libgomp: Thread creation failed" in self.errors

    @property
    def error(self) -> str:
        """The line of the typed error, or "" if it has ended well."""
        lines = re.findall(r"^dgl-mgpu train: \w+: .*$", self.errors, re.MULTILINE)
        # Above, a signal has ended it; and libgomp ends a process itself that has no thread left.
        is_failure = 0 < self.status < 128 and not (self.of_libgomp and not lines)
        assert len(lines) == is_failure, f"{self.status}: {self.errors}"
        return lines[0] if lines else ""


# -- a command in a process of its own -------------------------------------------------------------


def _command(folder: Path, words: list[str], before: Callable[[], None], stdout: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TMPDIR"] = str(folder / "tmp")
    for number, place in ((1, stdout), (2, str(folder / "errors"))):
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    forget_job()
    jobs.fork_ranks()
    mp.set_start_method("fork", force=True)
    before()
    with nothing_drawn():
        status = main(["train", *words])
    sys.exit(status)


def nothing() -> None:
    """Before a command that has all it needs."""


@contextlib.contextmanager
def started(
    folder: Path, *words: str, before: Callable[[], None] = nothing, stdout: str = ""
) -> Iterator[mp.process.BaseProcess]:
    """A command that trains in ``folder / "run"``; its process is gone afterwards."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    (folder / "tmp").chmod(0o777)
    for name in ("errors", "shown"):
        (folder / name).write_text("")
        (folder / name).chmod(0o666)
    options = [*SMALL, f"hydra.run.dir={folder / 'run'}", *words]
    command = forkserver().Process(
        target=_command, args=(folder, options, before, stdout or str(folder / "shown"))
    )
    command.start()
    try:
        yield command
    finally:
        if command.is_alive():
            command.kill()
        command.join()


def ended(command: mp.process.BaseProcess, folder: Path, since: float | None = None) -> End:
    """How it has ended, and how long after a moment, now if it is not told, it did."""
    start = time.monotonic() if since is None else since
    command.join(_BOUND_SECONDS)
    assert not command.is_alive(), f"it hangs: {(folder / 'errors').read_text()}"
    found = End(
        command.exitcode or 0,
        (folder / "shown").read_text(),
        (folder / "errors").read_text(),
        time.monotonic() - start,
    )
    require_typed(found)
    left = [each for each in (folder / "tmp").rglob("*") if each.name != "owner"]
    assert found.status < 0 or not left, left
    return found


def require_typed(end: End) -> None:
    """No traceback, and one line of an error of this package's, unless a signal has ended it."""
    if end.status >= 0:
        # multiprocessing shows that of a worker, which the typed error is of.
        is_of_worker = "can't start new thread" in end.errors and "WorkerFailedError" in end.error
        # Torch's handler of SIGCHLD raises wherever it is called, also in a callback of a fork,
        # where Python shows the error and drops it.
        shown = re.sub(
            r"Exception ignored in: [\s\S]*?RuntimeError: DataLoader worker .*\n", "", end.errors
        )
        assert "Traceback" not in shown or is_of_worker, end.errors
        if end.error:
            kind = end.error.split()[2].rstrip(":")
            assert issubclass(getattr(dgl_mgpu.errors, kind), dgl_mgpu.errors.DGLMGPUError)


def run(folder: Path, *words: str, **how) -> End:
    with started(folder, *words, **how) as command:
        return ended(command, folder)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    shared = shared_memory()
    yield
    left = shared_memory() - shared  # also of tests that run at the same time
    until(lambda: not left & shared_memory())


@pytest.fixture(scope="module")
def losses(data, tmp_path_factory) -> Callable[..., list[float]]:
    """The losses of an undisturbed run with so many ranks."""
    found: dict[tuple[str, ...], list[float]] = {}

    def of(*words: str) -> list[float]:
        if words not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            assert run(folder, data, *words).error == ""
            found[words] = losses_of(folder)
        return found[words]

    return of


def losses_of(folder: Path) -> list[float]:
    reports, summary = read_metrics(folder / "run" / "metrics.jsonl")
    assert summary is not None
    return [each.loss for each in reports]


def came(end: End) -> str:
    """An outcome to count."""
    if end.status < 0:
        return f"ended by {signal.Signals(-end.status).name}"
    if end.status and not end.error:
        return "ended by libgomp, which says so"
    return end.error.split()[2].rstrip(":") if end.error else "as undisturbed"


# -- limits of a shell -----------------------------------------------------------------------------


def limit_memory(mib: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + mib * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, value))


def limit_processes(more: int) -> None:
    """As another user, for the superuser's are not limited, and the only one who has processes."""
    os.environ["HOME"] = os.environ["TMPDIR"]
    become(_NOBODY)
    limit(resource.RLIMIT_NPROC, 1 + more)


#: By the letter of ulimit: how it is limited, from what to what, and what errors say of it.
LIMITS: dict[str, tuple[Callable[[int], None], tuple[int, int], str]] = {
    "-v": (limit_memory, (0, 700), "ulimit -v|allocate|memory"),
    "-n": (partial(limit, resource.RLIMIT_NOFILE), (6, 60), "Too many open files|ulimit -n"),
    "-t": (partial(limit, resource.RLIMIT_CPU), (1, 4), "ulimit -t"),
    "-u": (limit_processes, (0, 12), "ulimit -u|temporarily unavailable|DataLoader worker"),
    "-f": (partial(limit, resource.RLIMIT_FSIZE), (0, 60_000), "File too large|ulimit -f"),
    "-l": (partial(limit, resource.RLIMIT_MEMLOCK), (0, 65_536), "ulimit -l"),
}


@pytest.mark.parametrize(
    "letter", [pytest.param(each, marks=[needs_root] * (each == "-u")) for each in LIMITS]
)
def test_a_limit_of_the_shell(letter, tmp_path, data, losses, outcomes, rounds, rng):
    set_limit, (least, most), told = LIMITS[letter]
    wrong = []
    for number in range(rounds(2, 20)):
        value = rng.randint(least, most)
        words = (f"trainer.ranks={rng.choice([1, 2])}", f"sampler.num_workers={rng.choice([0, 2])}")
        folder = tmp_path / str(number)
        folder.mkdir()
        folder.chmod(0o777)
        expected = losses(*words)  # before, for it generates the data, which another user cannot
        try:
            end = run(folder, data, *words, before=partial(set_limit, value))
            outcomes.longest("until it has ended", end.seconds)
            outcomes.add(came(end))
            if end.error:
                assert re.search(told, end.error), end.error
            elif end.status == 0:
                assert losses_of(folder) == expected
            elif end.of_libgomp:
                assert letter == "-u"
            else:  # the kernel ends a process that has used its time
                assert letter == "-t" and end.status in (-signal.SIGKILL, -signal.SIGXCPU)
        except AssertionError as error:
            wrong.append(f"ulimit {letter} {value}, {words}: {error}")
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


# -- shared memory ---------------------------------------------------------------------------------


def in_small_shared_memory(kib: int) -> None:
    """Of this process and its children alone, in a mount namespace of its own."""
    in_own_mounts()
    mount("tmpfs", "/dev/shm", 0, f"size={kib}k,mode=1777")


def in_own_mounts() -> None:
    if _LIBC.unshare(_NEWNS) or _LIBC.mount(b"none", b"/", None, _REC | _PRIVATE, None):
        raise OSError(ctypes.get_errno(), "unshare")


def mount(kind: str, place: str, flags: int, options: str) -> None:
    if _LIBC.mount(kind.encode(), place.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {place}")


@pytest.fixture
def own_mounts() -> None:
    probe = forkserver().Process(target=in_small_shared_memory, args=(64,))
    probe.start()
    probe.join()
    if probe.exitcode:
        pytest.skip("no mount namespace may be made here")


SHM = r"/dev/shm|shared memory|DataLoader worker|sampler\.num_workers"


@pytest.mark.usefixtures("own_mounts")
def test_a_small_shared_memory(tmp_path, data, losses, outcomes, rounds, rng):
    wrong = []
    for number in range(rounds(4, 40)):
        kib = rng.choice([4, 64, 256, 1024, 2048, 4096, 16384, 65536])
        words = (f"trainer.ranks={rng.choice([1, 2])}", f"sampler.num_workers={rng.choice([0, 2])}")
        folder = tmp_path / str(number)
        try:
            end = run(folder, data, *words, before=partial(in_small_shared_memory, kib))
            outcomes.longest("until it has ended", end.seconds)
            outcomes.add(came(end))
            assert end.status >= 0
            if end.error:
                assert re.search(SHM, end.error), end.error
            else:
                assert losses_of(folder) == losses(*words)
        except AssertionError as error:
            wrong.append(f"/dev/shm of {kib} KiB, {words}: {error}")
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


@pytest.mark.usefixtures("own_mounts")
def test_shared_memory_that_is_full_during_a_run(tmp_path, data, outcomes, rounds, rng):
    """A worker can hand no batch over, on one rank or on several."""
    wrong = []
    for number in range(rounds(4, 30)):
        ranks = 1 + number % 2
        words = (f"trainer.ranks={ranks}", "sampler.num_workers=2", "trainer.epochs=2000")
        folder = tmp_path / str(number)
        before = partial(in_small_shared_memory, 32 * 1024)
        try:
            with started(folder, data, *words, before=before) as command:
                until((folder / "run" / "checkpoints" / "epoch-0001.pt").exists)
                time.sleep(rng.random())
                begin = time.monotonic()
                while command.is_alive() and time.monotonic() < begin + _BOUND_SECONDS:
                    # Mini-batches on their way give room back.
                    fill(Path(f"/proc/{command.pid}/root/dev/shm"))
                    command.join(0.05)
                end = ended(command, folder, begin)
            outcomes.longest("until it has ended", end.seconds)
            outcomes.add(f"{came(end)}, of {ranks} ranks")
            assert end.status == 1 and re.search(SHM, end.error), end
            assert Checkpoint.load(folder / "run").epoch >= 1
        except AssertionError as error:
            wrong.append(f"of {ranks} ranks: {error}")
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def fill(folder: Path) -> None:
    """Take all that is left there, to the last page."""
    with contextlib.suppress(OSError), (folder / "full").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


# -- disks and folders -----------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, kib: int, read_only: bool = False) -> Iterator[Path]:
    """A file system of its own, of this size."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mount("tmpfs", str(folder), 0, f"size={kib}k,mode=1777")
    except OSError:
        pytest.skip("file systems are root's to mount")
    try:
        if read_only:
            mount("tmpfs", str(folder), _REMOUNT | _RDONLY, "")
        yield folder
    finally:
        os.system(f"umount -l {folder}")


def digests(folder: Path) -> dict[str, str]:
    files = [each for each in checkpoints(folder / "checkpoints")]
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def set_tmpdir(folder: Path) -> None:
    os.environ["TMPDIR"] = str(folder)


#: What lies on the disk, and the options that say so.
DISKS: dict[str, Callable[[Path], list[str]]] = {
    "the run's folder": lambda disk: [f"hydra.run.dir={disk / 'run'}"],
    "temporary files": lambda disk: [],
    "data": lambda disk: [f"data.root={disk / 'data'}"],
    "the store's rows": lambda disk: [
        f"store.disk_path={disk}", "store.gpu_memory=1KiB", "store.host_memory=100KiB",
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", DISKS)
def test_a_small_disk(what, tmp_path, data, losses, outcomes, rounds, rng):
    wrong = []
    for number in range(rounds(2, 20)):
        read_only, kib = rng.random() < 0.3, rng.choice([4, 16, 40, 64, 100, 150, 200, 400, 4096])
        ranks = (f"trainer.ranks={rng.choice([1, 2])}",)
        workers = f"sampler.num_workers={rng.choice([0, 2])}"
        folder, disk = tmp_path / str(number), tmp_path / f"disk {number}".replace(" ", "-")
        with mounted(disk, kib, read_only):
            words = [data, *ranks, workers, *DISKS[what](disk)]
            before = partial(set_tmpdir, disk) if what == "temporary files" else nothing
            try:
                end = run(folder, *words, before=before)
                outcomes.longest("until it has ended", end.seconds)
                outcomes.add(came(end))
                assert end.status >= 0
                if end.error:
                    assert re.search(rf"{disk}|No space|Read-only|free", end.error), end.error
                    if (disk / "run" / "checkpoints").exists():
                        for each in checkpoints(disk / "run" / "checkpoints"):
                            Checkpoint.load(each)
                    assert not list(disk.rglob("*.partial"))
                elif what != "the run's folder":
                    assert losses_of(folder) == losses(*ranks)
                left = [] if what in ("the run's folder", "data") else os.listdir(disk)
                assert not left, left
            except AssertionError as error:
                wrong.append(f"{what} on {kib} KiB{' read-only' * read_only}, {words}: {error}")
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def test_a_disk_that_is_full_where_a_run_goes_on(tmp_path, data, outcomes, rounds, rng):
    """The checkpoint that it goes on from stays as it was."""
    for number in range(rounds(2, 15)):
        folder = tmp_path / str(number)
        with mounted(folder / "run", 4096):
            assert run(folder, data, "trainer.epochs=2").error == ""
            before = digests(folder / "run")
            kib = rng.choice([0, 4, 12, 24, 48])
            fill(folder / "run")
            with (folder / "run" / "full").open("r+b") as full:
                full.truncate(max(0, os.path.getsize(full.name) - kib * 1024))
            words = [f"trainer.resume={folder / 'run'}", "trainer.epochs=6"]
            end = run(folder, data, *words)
            outcomes.add(came(end))
            assert end.status == 0 or re.search("No space left|free", end.error), end
            after = digests(folder / "run")
            # One that was written whole comes in the place of those before.
            assert before.items() <= after.items() or max(after) > max(before), (before, after)
            Checkpoint.load(folder / "run")


# -- what a command writes to, and where it is at home ---------------------------------------------


def without_stdout() -> None:
    os.close(1)
    sys.stdout = None  # as Python has it then


def without_home(how: str) -> None:
    if how == "none":
        del os.environ["HOME"]
    else:
        os.environ["HOME"] = how
    os.environ.pop("XDG_CACHE_HOME", None)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stdout", ["/dev/full", "closed"])
def test_a_standard_output_that_takes_nothing(tmp_path, data, losses, outcomes, stdout, ranks):
    words = (f"trainer.ranks={ranks}",)
    how = {"before": without_stdout} if stdout == "closed" else {"stdout": stdout}
    end = run(tmp_path, data, *words, **how)
    outcomes.add(came(end))
    assert end.error == "" and losses_of(tmp_path) == losses(*words)


@pytest.mark.parametrize("home", ["none", "/nonexistent", "/proc"])
def test_a_user_without_a_home(tmp_path, data, losses, outcomes, home):
    end = run(tmp_path, data, "trainer.ranks=2", before=partial(without_home, home))
    outcomes.add(came(end))
    assert end.error == "" and losses_of(tmp_path) == losses("trainer.ranks=2")


def await_epochs(folder: Path, more: int) -> None:
    written = len(jobs.reports_of(folder))
    until(lambda: len(jobs.reports_of(folder)) >= written + more)


def test_the_system_is_out_of_memory_for_a_process(tmp_path, data, outcomes, rounds, rng):
    """It kills one, of a run of two ranks with two workers each."""
    import psutil

    for number in range(rounds(3, 30)):
        folder = tmp_path / str(number)
        words = ("trainer.ranks=2", "sampler.num_workers=2", "trainer.epochs=2000")
        with started(folder, data, *words) as command:
            until((folder / "run" / "checkpoints" / "epoch-0001.pt").exists)
            time.sleep(rng.random())
            rng.choice(psutil.Process(command.pid).children(recursive=True)).kill()
            begin = time.monotonic()
            command.join(20)
            if is_needless := command.is_alive():  # a worker that had done all its work
                await_epochs(folder / "run", 2)
                os.kill(command.pid, signal.SIGTERM)
                begin = time.monotonic()
            end = ended(command, folder, begin)
        outcomes.longest("until it has ended", end.seconds)
        if is_needless:
            outcomes.add("it was not needed any more")
            assert end.status == 128 + signal.SIGTERM, end
            continue
        outcomes.add(came(end))
        assert re.search("SIGKILL|killed|out of memory|was lost", end.error), end
        assert Checkpoint.load(folder / "run").epoch >= 1
