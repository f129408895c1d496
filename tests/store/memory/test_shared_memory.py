"""Without GPUs ranks' memory and the host's are one, of which a store takes what there is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import dgl
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import PlanDoesNotFitError, RankFailedError, SharedMemoryError
from dgl_mgpu.machine import shared_memory
from dgl_mgpu.machine.shared_memory import SHARED_MEMORY, SharedMemory
from dgl_mgpu.placement import POLICIES, Plan, TableSpec
from dgl_mgpu.store.memory.machine import machine
from dgl_mgpu.store.planning import StoreOptions, plan_tables
from dgl_mgpu.train.launch.launch import launch
from tests.environment import search_path

MIB = 1 << 20
ROWS, ROW_BYTES = 20_000, 256
NBYTES = ROWS * ROW_BYTES
#: Positions, int32, of rows that lie in several places.
ORDER = 4 * ROWS


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A setter of what is free: bytes of /dev/shm, and of the host's memory."""
    statvfs = os.statvfs

    def set_free(shared: int, ram: int) -> None:
        def told(path: object) -> object:
            if path != SHARED_MEMORY:
                return statvfs(path)
            return SimpleNamespace(f_flag=0, f_bavail=shared, f_frsize=1)

        monkeypatch.setattr(os, "statvfs", told)
        monkeypatch.setattr(shared_memory, "free_host_bytes", lambda: ram)

    return set_free


def plan(num_ranks: int, shared: SharedMemory, disk: Path | None = None, **options) -> Plan:
    reads = np.random.default_rng(0).pareto(1.5, ROWS)
    table = TableSpec.features("feat", ROWS, ROW_BYTES, np.sort(reads)[::-1])
    return plan_tables(
        [table],
        machine("cpu", num_ranks),
        StoreOptions(disk_path=disk, **options),
        [ROWS],
        shared=shared,
    )


def taken(plan: Plan) -> int:
    """Bytes of shared memory that a store takes by a plan, counted copy by copy."""
    tiers = plan.tables["feat"].tiers
    held = 0
    for tier in tiers:
        if tier.memory == "disk":
            continue
        for part in range(tier.parts):
            rows = len(range(tier.start + part, tier.stop, tier.parts))
            held += rows * ROW_BYTES * (len(tier.copies[part]) + tier.on_host(part))
    return held + (ORDER if len(tiers) > 1 else 0)


def on_disk(plan: Plan) -> int:
    return sum(tier.num_rows for tier in plan.tables["feat"].tiers if tier.memory == "disk")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "partitioned"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_memory_is_counted_once(tmp_path, policy, num_ranks):
    rooms = (0, ORDER, NBYTES // 3, NBYTES - 1, NBYTES, NBYTES + ORDER, 2 * NBYTES)
    for room in rooms if policy == "auto" else rooms[1:6:2]:
        for asked in ({}, {"gpu_memory": "1MiB"}, {"host_memory": "1MiB"}):
            found = plan(num_ranks, SharedMemory(room, room), tmp_path, policy=policy, **asked)
            assert taken(found) <= room
            assert sum(found.gpu_budget) + found.host_budget <= room
            assert sum(found.gpu_bytes) <= sum(found.gpu_budget)
            assert found.host_bytes <= found.host_budget
            if policy == "auto" and not asked:  # what is on disk had no room
                missing = 0 if room >= NBYTES else NBYTES - max(room - ORDER, 0)
                assert on_disk(found) * ROW_BYTES <= missing + NBYTES // 50
                assert (on_disk(found) == 0) == (room >= NBYTES)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_was_asked_of_ranks_comes_first(tmp_path, num_ranks):
    room = NBYTES // 2
    found = plan(num_ranks, SharedMemory(room, room), tmp_path, gpu_memory="512KiB")
    assert found.gpu_bytes == pytest.approx((512 << 10,) * num_ranks, abs=ROW_BYTES)
    assert found.host_bytes == pytest.approx(
        room - ORDER - num_ranks * (512 << 10), abs=num_ranks * ROW_BYTES
    )


@pytest.mark.parametrize("policy", ["auto", "replicated", "host"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_just_fits_needs_no_disk(policy, num_ranks):
    assert taken(plan(num_ranks, SharedMemory(NBYTES, NBYTES), policy=policy)) == NBYTES
    with pytest.raises(PlanDoesNotFitError, match=" 1 bytes do not fit") as told:
        plan(num_ranks, SharedMemory(NBYTES - 1, 2 * NBYTES), policy=policy)
    assert (told.value.needed, told.value.available) == (NBYTES, NBYTES - 1)


@pytest.mark.parametrize(
    ("room", "ram", "options", "said", "not_said"),
    [
        (MIB, 2 * NBYTES, {}, ["--shm-size", "store.disk_path", "1,048,576"], "host_memory"),
        (MIB, MIB, {}, ["more memory (1.00 MiB here)", "store.disk_path"], "--shm-size"),
        (
            2 * NBYTES, 2 * NBYTES, {"gpu_memory": "1MiB", "host_memory": "1MiB"},
            ["raise store.host_memory by 3,022,848 bytes", "store.disk_path"], "--shm-size",
        ),
        (MIB, 2 * NBYTES, {"feature_ratio": 1.0}, ["--shm-size", "more on each GPU"], "host_"),
        (MIB, 2 * NBYTES, {"policy": "partitioned"}, ["--shm-size", "'auto'"], "host_memory"),
    ],
)  # fmt: skip
def test_what_is_missing_and_why_is_told(room, ram, options, said, not_said):
    with pytest.raises(PlanDoesNotFitError) as told:
        plan(1, SharedMemory(room, ram), **options)
    assert all(each in str(told.value) for each in said), str(told.value)
    assert not_said not in str(told.value)


# Whole stores


def graph() -> dgl.DGLGraph:
    g = dgl.rand_graph(ROWS, 3 * ROWS)
    g.ndata["feat"] = torch.arange(ROWS * ROW_BYTES // 4, dtype=torch.float32).view(ROWS, -1)
    return g


def gathers(store: dgl_mgpu.GlobalStore) -> bool:
    ids = torch.randperm(ROWS)
    rows = torch.arange(ROWS * ROW_BYTES // 4, dtype=torch.float32).view(ROWS, -1)
    return torch.equal(store.gather("feat", ids), rows[ids])


def shared_bytes() -> int:
    """Of the nameless files that this process has open in shared memory."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        file = f"/proc/self/fd/{name}"
        if os.path.islink(file) and os.readlink(file).startswith(f"{SHARED_MEMORY}/#"):
            found[os.stat(file).st_ino] = os.stat(file).st_size
    return sum(found.values())


def test_a_store_takes_what_is_free(tmp_path, memory):
    memory(4 * MIB, 64 << 30)
    before = shared_bytes()
    with dgl_mgpu.GlobalStore.from_dgl(graph(), device="cpu", disk_path=tmp_path) as store:
        # Segments begin at multiples of some bytes.
        assert 3 * MIB < shared_bytes() - before <= 0.9 * 4 * MIB + 1024
        assert gathers(store)
    with pytest.raises(PlanDoesNotFitError, match=r"--shm-size=…"):
        dgl_mgpu.GlobalStore.from_dgl(graph(), device="cpu")
    memory(64 << 30, 4 * MIB)
    with pytest.raises(PlanDoesNotFitError, match="use a machine or a container with more"):
        dgl_mgpu.GlobalStore.from_dgl(graph(), device="cpu")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EROFS])
def test_no_shared_memory_is_a_typed_error(monkeypatch, code):
    def told(path: object) -> object:
        if code == errno.EROFS:
            return SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=MIB, f_frsize=4096)
        raise FileNotFoundError(code, os.strerror(code))

    monkeypatch.setattr(os, "statvfs", told)
    with pytest.raises(SharedMemoryError, match=r"mount it for all .*dgl-mgpu doctor"):
        dgl_mgpu.GlobalStore.from_dgl(graph(), device="cpu")


# With a /dev/shm of its own, in a namespace


def _in_little_memory(folder: Path) -> None:
    first = Communicator.of_this_machine().rank == 0
    free = shared_memory.free_shared_bytes()
    g = graph() if first else None
    told = PlanDoesNotFitError if first else RankFailedError
    with pytest.raises(told, match=r"docker run --shm-size=…"):
        dgl_mgpu.GlobalStore.from_dgl(g)
    for options in ({}, {"gpu_memory": "1MiB"}, {"host_memory": "1MiB"}, {"policy": "replicated"}):
        with dgl_mgpu.GlobalStore.from_dgl(g, disk_path=folder, **options) as store:
            Communicator.of_this_machine().all_gather(None)
            left = shared_memory.free_shared_bytes()
            assert 0 < left < free - 2 * MIB
            assert gathers(store)
            Communicator.of_this_machine().all_gather(None)


def _without_memory() -> None:
    with pytest.raises(SharedMemoryError, match="it is mounted read-only"):
        dgl_mgpu.GlobalStore.from_dgl(graph())
    with pytest.raises(SharedMemoryError, match="it is mounted read-only"):
        launch(_without_memory, 2)


def run_ranks_in_namespace(options: str, num_ranks: int, step: str, *arguments: Path) -> None:
    """Run a function above where /dev/shm is a file system of its own, mounted with options."""
    script = (
        "import sys, dgl_mgpu;"
        "from tests.store.memory.test_shared_memory import main; main(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, step, str(num_ranks), *map(str, arguments)]
    mount = f'mount -t tmpfs -o {options} tmpfs {SHARED_MEMORY} || exit 99; exec "$@"'
    try:
        ran = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "sh", *command],
            env={**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if ran.returncode == 99 or "unshare failed" in ran.stderr:
        pytest.skip("file systems cannot be mounted here")
    assert ran.returncode == 0, ran.stderr


def main(step: str, num_ranks: str, *folders: str) -> None:
    launch(globals()[step], int(num_ranks), *map(Path, folders))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_in_a_small_shared_memory(tmp_path, num_ranks):
    run_ranks_in_namespace("size=5m", num_ranks, _in_little_memory.__name__, tmp_path)


def test_a_read_only_shared_memory():
    run_ranks_in_namespace("ro", 1, _without_memory.__name__)
