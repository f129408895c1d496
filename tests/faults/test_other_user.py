"""A second user of the machine against a job of several ranks, from its first moment to its end.

Both are in a network namespace of the test's own, and have ``/tmp`` and ``/dev/shm`` to themselves.
The attacker connects to all that listens, says what gloo and ranks say, and what runs code where
pickle reads it; plants links and files where anybody may; and reads all that it can.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dgl_mgpu.comm import signing
from dgl_mgpu.comm.serialization import dumps
from dgl_mgpu.errors import DGLMGPUError
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.trainer import Trainer
from tests.faults.conftest import SEED
from tests.faults.users import become, forget_job, needs_root
from tests.forkserver import forkserver
from tests.train import jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), needs_root]

JOB_USER, ATTACKER = 61_111, 65_534
_BOUND_SECONDS = 150.0
_MAX_OPEN = 150
_NEWNS, _NEWNET, _PRIVATE, _REC, _BIND = 0x20000, 0x40000000, 1 << 18, 1 << 14, 1 << 12
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


# -- the place -------------------------------------------------------------------------------------


def enter_arena(folder: Path) -> None:
    """A network of this process's own, with nothing but loopback, and a ``/tmp`` of its own."""
    if _LIBC.unshare(_NEWNS | _NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    mount("none", "/", "", _REC | _PRIVATE)
    mount(str(folder), "/mnt", "", _BIND)  # it lies in /tmp itself
    mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777")
    mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")
    folder.mkdir(parents=True)
    mount("/mnt", str(folder), "", _BIND)
    for each in (folder, *folder.parents):
        each.chmod(each.stat().st_mode | 0o755)


def mount(source: str, place: str, kind: str, flags: int, options: str = "") -> None:
    arguments = source.encode(), place.encode(), kind.encode(), flags, options.encode()
    if _LIBC.mount(*arguments):
        raise OSError(ctypes.get_errno(), f"mount {place}")


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is compiled for good is, where the job's user may not write beside the package."""
    folder = tmp_path_factory.mktemp("compiled")
    for num_ranks, workers in ((2, 0), (2, 2)):
        words = [f"data.root={folder / 'data'}", f"sampler.num_workers={workers}"]
        process = forkserver().Process(
            target=_compile, args=(folder / str(workers), num_ranks, words)
        )
        process.start()
        process.join()
        assert process.exitcode == 0


def _compile(folder: Path, num_ranks: int, words: list[str]) -> None:
    jobs.fork_ranks()
    jobs.train(folder, num_ranks, *words, "trainer.epochs=1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    probe = forkserver().Process(target=enter_arena, args=(tmp_path,))
    probe.start()
    probe.join()
    if probe.exitcode:
        pytest.skip("no namespaces of network and mounts may be made here")
    return tmp_path


# -- the attacker ----------------------------------------------------------------------------------


class Marked:
    """Leaves a mark where its pickle is read by what calls whatever it names."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.open, (str(self.mark), os.O_CREAT | os.O_WRONLY, 0o666)


def words(mark: Path, rng: random.Random) -> bytes:
    """What an attacker says to a listener."""
    planted = pickle.dumps(Marked(mark))
    frame = bytes(32) + struct.pack("!Q", 40) + bytes(32) + dumps(["forged"])
    odd = [
        b"",  # it says nothing, and stays
        rng.randbytes(rng.choice([1, 8, 64, 4096])),
        struct.pack("<Q", rng.randrange(8)),  # gloo: which of the listener's pairs it is for
        struct.pack("<q", -1) + rng.randbytes(56),
        struct.pack("<QiiQQQ", rng.randrange(4), 0, 0, 0, 8, 1 << 60),  # gloo: a preamble
        planted,
        struct.pack("!i", len(planted)) + planted,  # multiprocessing's frame
        struct.pack("!Q", len(planted)) + planted,
        struct.pack("<Q", rng.randrange(8)) + frame.ljust(1024, b"\0"),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    return rng.choice(odd)


def listeners() -> set[tuple[int, str, int]]:
    """Addresses on which anybody on this network listens, as all may read."""
    found = set()
    for table, family, ours in (
        ("tcp", socket.AF_INET, "127.0.0.1"),
        ("tcp6", socket.AF_INET6, "::1"),
    ):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A":
                    found.add((family, ours, int(local.rpartition(":")[2], 16)))
    return found


def connect_to_all(mark: Path, rng: random.Random) -> None:
    """Race for every port, again and again."""
    held: list[socket.socket] = []
    while True:
        for family, address, port in listeners():
            peer = socket.socket(family)
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                peer.connect_ex((address, port))
                peer.send(words(mark, rng))
            held.append(peer)
        for path in abstract_and_other_sockets():
            peer = socket.socket(socket.AF_UNIX)
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                peer.connect(path)
                peer.send(words(mark, rng))
            held.append(peer)
        while len(held) > _MAX_OPEN:
            held.pop(rng.randrange(len(held))).close()


def abstract_and_other_sockets() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    names = [line.split(maxsplit=7)[7] for line in lines if len(line.split(maxsplit=7)) > 7]
    return [name.replace("@", "\0", 1) if name.startswith("@") else name for name in names]


def plant(folders: list[Path], mark: Path, private: Path, rng: random.Random) -> None:
    """Put files, folders and links where the job may look, by names that it has or might have."""
    planted = pickle.dumps(Marked(mark))
    for each in (".libxsmm.{}", ".libxsmm.stdio.{}"):
        with contextlib.suppress(OSError):
            os.symlink(private / "made-by-a-link", f"/tmp/{each.format(JOB_USER)}")
    while True:
        pids = [int(each) for each in os.listdir("/proc") if each.isdigit()]
        for folder in folders:
            there = []
            with contextlib.suppress(OSError):
                there = os.listdir(folder)
            names = [
                f"torch_{rng.choice(pids)}_{rng.randrange(10**6)}_{rng.randrange(9)}",
                f"dgl-mgpu-{rng.choice(there)[-8:] if there else 'x'}", f"pymp-{rng.randrange(99)}",
                f"sem.mp-{rng.randrange(99)}", "state", "owner", "checked.json", ".run.lock",
                *(f"{each}.partial" for each in there[:2]),
                *(f".{each}.lock" for each in there[:2]),
            ]  # fmt: skip
            target = folder / rng.choice(names)
            with contextlib.suppress(OSError):
                kind = rng.randrange(4)
                if kind == 0:
                    target.write_bytes(planted)
                elif kind == 1:
                    target.symlink_to(private / "made-by-a-link")
                elif kind == 2:
                    target.mkdir()
                else:
                    os.mkfifo(target)
            for each in there[:20]:  # what is there already may be in its reach
                with contextlib.suppress(OSError):
                    found = folder / each
                    if found.lstat().st_uid != ATTACKER and found.is_file():
                        found.write_bytes(planted)
        time.sleep(0.002)


def spy(loot: int, folders: list[Path]) -> None:
    """Read all there is to read of other users' processes and files; what it is goes to a file."""
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            files = [process / each for each in ("environ", "cmdline", "maps", "mem", "auxv")]
            with contextlib.suppress(OSError):
                files += (process / "fd").iterdir()
            for each in files:
                keep(loot, each)
        for folder in folders:
            for each in folder.rglob("*"):
                keep(loot, each)
        time.sleep(0.01)


def keep(loot: int, path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        if path.is_fifo():
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if os.fstat(loot).st_size < 64 << 20:
                os.write(loot, os.read(descriptor, 1 << 16))
        finally:
            os.close(descriptor)


def fork_attacker(act: Callable[[], None]) -> int:
    """A process of the attacker's, which does so until it is killed."""
    child = os.fork()
    if child:
        return child
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setgroups([])
        os.setresgid(ATTACKER, ATTACKER, ATTACKER)
        os.setresuid(ATTACKER, ATTACKER, ATTACKER)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # which another id has reset
        act()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


# -- the job ---------------------------------------------------------------------------------------


def keep_secret(private: Path, trainer: Trainer) -> None:
    """Hook: let the test know what no other user may."""
    (private / "secret").write_bytes(signing.job_secret())


def run_job(folder: Path, num_ranks: int, overrides: list[str]) -> None:
    """Train as the job's user; how it ended is in ``folder / "private" / "end"``."""
    private = folder / "private"
    end = {"error": "", "kind": ""}
    become(JOB_USER)
    os.environ.update(HOME=str(private), TMPDIR=str(folder / "temporary"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    forget_job()
    jobs.fork_ranks()
    try:
        hook = partial(keep_secret, private)
        jobs.train(private / "run", num_ranks, *overrides, hook=hook)
    except DGLMGPUError as error:
        end = {"error": str(error), "kind": type(error).__name__}
    except BaseException:
        end = {"error": traceback.format_exc(), "kind": ""}
    (private / "end").write_text(json.dumps(end))


def arena(folder: Path, seed: str, attacks: list[str], num_ranks: int, data: str) -> None:
    enter_arena(folder)
    rng = random.Random(seed)
    private, temporary, root = (folder / each for each in ("private", "temporary", "data"))
    for each, mode, user in (
        (private, 0o700, JOB_USER), (temporary, 0o1777, 0), (root, 0o1777, JOB_USER),
    ):  # fmt: skip
        each.mkdir(exist_ok=True)
        os.chown(each, user, user)
        each.chmod(mode)
    loot = os.open(folder / "loot", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    open_folders = [temporary, Path("/dev/shm"), Path("/tmp"), root]
    mark = Path("/tmp/code-was-run")
    acts: dict[str, Callable[[], None]] = {
        "connects": partial(connect_to_all, mark, random.Random(rng.random())),
        "plants": partial(plant, open_folders, mark, private, random.Random(rng.random())),
        "spies": partial(spy, loot, open_folders),
    }
    # Before the job, and where it is not there yet; or within it.
    late = rng.choice([0.0, rng.random() * 4])
    attackers = [] if late else [fork_attacker(acts[each]) for each in attacks]
    words = [f"data.root={root if data == 'shared' else private / 'data'}"]
    words += [f"sampler.num_workers={rng.choice([0, 2])}", "trainer.epochs=8"]
    job = os.fork()
    if job == 0:
        run_job(folder, num_ranks, words)
        os._exit(0)
    start = time.monotonic()
    if late:
        time.sleep(late)
        attackers = [fork_attacker(acts[each]) for each in attacks]
    is_there, status = 0, 0
    while not is_there and time.monotonic() < start + _BOUND_SECONDS:
        is_there, status = os.waitpid(job, os.WNOHANG)
        time.sleep(0.02)
    if not is_there:
        os.kill(job, signal.SIGKILL)
        os.waitpid(job, 0)
    for each in attackers:
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    found = {
        "seconds": time.monotonic() - start,
        "hangs": not is_there,
        "status": status,
        "mark": mark.exists() or mark.is_symlink(),
        "link": (private / "made-by-a-link").exists(),
    }
    (folder / "found").write_text(json.dumps(found))


def attacked(folder: Path, seed: str, attacks: list[str], num_ranks: int, data: str) -> dict:
    """What came of a job that was attacked so."""
    folder.mkdir()
    process = forkserver().Process(target=arena, args=(folder, seed, attacks, num_ranks, data))
    process.start()
    process.join(_BOUND_SECONDS + 60)
    assert process.exitcode == 0, "see its traceback above"
    found = json.loads((folder / "found").read_text())
    end = folder / "private" / "end"
    return found | (json.loads(end.read_text()) if end.exists() else {"error": "", "kind": ""})


def results(folder: Path) -> tuple:
    reports, summary = read_metrics(folder / "private" / "run" / "metrics.jsonl")
    return [(each.loss, each.train_accuracy, each.valid_accuracy) for each in reports], summary


# -- what is asserted ------------------------------------------------------------------------------

ATTACKS = [["connects"], ["plants"], ["spies"], ["connects", "plants", "spies"]]


def test_a_second_user_against_a_job(place, outcomes, rounds):
    undisturbed: dict[int, tuple] = {}
    wrong = []
    for number in range(rounds(6, 40)):
        seed = f"{SEED} {number}"
        rng = random.Random(seed)
        num_ranks, attacks = rng.choice([2, 3]), ATTACKS[number % len(ATTACKS)]
        if num_ranks not in undisturbed:
            alone = place / f"alone-{num_ranks}"
            found = attacked(alone, seed, [], num_ranks, "own")
            assert not found["kind"] and not found["error"], found
            undisturbed[num_ranks] = results(alone)
        folder = place / str(number)
        found = attacked(folder, seed, attacks, num_ranks, rng.choice(["own", "shared"]))
        outcomes.longest("until it has ended", found["seconds"])
        try:
            assert not found["hangs"], f"it hangs: {found}"
            assert not found["mark"], "code was run"
            assert not found["link"], "a link was followed"
            secret = folder / "private" / "secret"
            if secret.exists() and secret.read_bytes():
                said = (folder / "loot").read_bytes()
                assert secret.read_bytes() not in said, "the secret was read"
                assert secret.read_bytes().hex().encode() not in said, "the secret was read"
            if found["kind"]:
                assert str(ATTACKER) in found["error"], found
                outcomes.add(f"{' '.join(attacks)}: {found['kind']}, which names the user")
            else:
                assert not found["error"], found
                assert results(folder) == undisturbed[num_ranks]
                outcomes.add(f"{' '.join(attacks)}: as undisturbed")
        except AssertionError as error:
            outcomes.add("WRONG")
            wrong.append(f"round {number}, {attacks}, {num_ranks} ranks: {error}")
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)
