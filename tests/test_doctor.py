"""The doctor on a machine without a GPU, and with limits, devices and failures faked."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
import types
from collections import namedtuple
from multiprocessing.process import BaseProcess

import pytest
import torch
from rich.console import Console

from dgl_mgpu import doctor
from dgl_mgpu.dgl.environment import VersionRange
from dgl_mgpu.errors import SharedMemoryError
from dgl_mgpu.utils import timeouts

GIB = 1 << 30
_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture
def checks():
    return {check.name: check for check in doctor.run_checks()}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 0)


@pytest.fixture
def shared_memory(monkeypatch, tmp_path):
    """A folder in place of /dev/shm, with 16 GiB free; returns a setter of (total, free)."""
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)

    def sized(total, free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(total, total - free, free))

    sized(32 * GIB, 16 * GIB)
    return sized


def _limit(monkeypatch, soft, hard=resource.RLIM_INFINITY):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))


def _printed(checks):
    console = Console(file=io.StringIO(), width=80, _environ={})
    console.print(doctor.checks_table(checks))
    return console.file.getvalue()


def _fake_torch(monkeypatch, cuda, gpus=0):
    fake = types.SimpleNamespace(
        __version__="2.13.0",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            get_device_name=lambda i: "NVIDIA H200" if i else "NVIDIA T4",
            get_device_capability=lambda i: (9, 0) if i else (7, 5),
        ),
    )
    real = doctor.importlib.import_module
    monkeypatch.setattr(
        doctor.importlib, "import_module", lambda name: fake if name == "torch" else real(name)
    )


def test_this_machine_has_no_problem(checks):
    assert list(checks) == list(doctor.CHECKS)
    problems = {name: check.found for name, check in checks.items() if check.status == "problem"}
    assert problems == {}
    assert f"torch {torch.__version__.partition('+')[0]}" in checks["versions"].found
    assert checks["DGL"].status == "ok" and "dgl 2." in checks["DGL"].found
    assert checks["Numba"].status == "ok"
    assert f"{os.cpu_count()} cores" in checks["machine"].found


def test_parts_without_their_libraries_say_what_they_run_on(checks):
    for part in ("dgl.graphbolt", "dgl.sparse"):
        assert (checks[part].status, checks[part].found) == ("ok", "on operators of dgl_mgpu")


def test_main_prints_every_check_and_returns_0_without_problems(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "CHECKS", {"a": lambda: ("ok", "fine", ""), "b": lambda: ("warning", "w", "f")}
    )
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "fine" in out and "fix: f" in out


def test_an_exception_in_a_check_is_reported_and_the_rest_runs(monkeypatch, capsys):
    def raises():
        raise ZeroDivisionError("by [zero]")

    def raises_typed():
        raise SharedMemoryError("map 3 bytes", "only 2", "add one")

    checks = {"a": raises, "b": raises_typed, "c": lambda: ("ok", "still here", "")}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    a, b, c = doctor.run_checks()
    assert (a.status, a.found) == ("problem", "ZeroDivisionError: by [zero]")
    assert a.fix
    assert b == doctor.Check("b", "problem", "map 3 bytes: only 2", "add one")
    assert c.status == "ok"
    assert doctor.main() == 1
    assert "by [zero]" in capsys.readouterr().out


def test_the_table_shows_brackets_and_fits_80_columns():
    check = doctor.Check("CuPy", "absent", "not installed", "pip install 'dgl-mgpu[cuda13]'")
    text = _printed([check, doctor.Check("x", "ok", "word " * 60 + "z" * 200, "")])
    assert "pip install 'dgl-mgpu[cuda13]'" in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("z") == 200  # nothing is cut off


def test_a_version_outside_its_range(monkeypatch):
    monkeypatch.setattr(doctor, "SUPPORTED", (VersionRange("torch", "99", "100"),))
    status, found, fix = doctor._versions()
    assert (status, fix) == ("problem", "pip install 'torch>=99,<100'")
    assert torch.__version__.partition("+")[0] in found


def test_a_missing_package(monkeypatch):
    monkeypatch.setattr(doctor, "SUPPORTED", (VersionRange("no-such-thing", "1", "2"),))
    assert doctor._versions()[:2] == ("problem", "no-such-thing missing")


def test_a_broken_dgl_is_a_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)  # what Python does for "import blocked"
    check = doctor._run("DGL", doctor._dgl)
    assert check.status == "problem" and "dgl" in check.found


# CUDA: driver against runtime


@pytest.mark.parametrize(
    ("driver", "runtime", "gpus", "status", "said"),
    [
        (None, None, 0, "absent", "no NVIDIA driver"),
        (None, "13.0", 0, "absent", "no NVIDIA driver"),
        ((13, 0), None, 0, "warning", "torch built for the CPU"),
        ((12, 8), "13.0", 0, "problem", "driver for CUDA 12.8, torch built for 13.0"),
        ((13, 0), "13.0", 0, "problem", "no usable GPU"),
        ((13, 1), "12.8", 3, "ok", "1 x NVIDIA T4 (sm_75), 2 x NVIDIA H200 (sm_90)"),
        ((13, 0), "13.1", 1, "ok", "driver for CUDA 13.0, torch built for 13.1"),
    ],
)
def test_cuda(monkeypatch, driver, runtime, gpus, status, said):
    monkeypatch.setattr(doctor, "_driver_version", lambda: driver)
    _fake_torch(monkeypatch, runtime, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = doctor._run("CUDA", doctor._cuda)
    assert check.status == status
    assert said in check.found
    assert bool(check.fix) == (status != "ok")


def test_gpus_that_are_hidden_are_no_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_driver_version", lambda: (13, 0))
    _fake_torch(monkeypatch, "13.0", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = doctor._run("CUDA", doctor._cuda)
    assert check.status == "absent" and "GPUs hidden" in check.found


def test_driver_version_is_read_from_the_library(monkeypatch):
    def version(pointer):
        pointer._obj.value = 13010
        return 0

    library = types.SimpleNamespace(cuDriverGetVersion=version)
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: library)
    assert doctor._driver_version() == (13, 1)
    library.cuDriverGetVersion = lambda pointer: 999
    with pytest.raises(OSError, match="999"):
        doctor._driver_version()


@pytest.mark.parametrize(
    ("runtime", "fix"),
    [
        ("13.0", "pip install 'dgl-mgpu[cuda13]'"),
        ("12.8", "pip install 'dgl-mgpu[cuda12]'"),
        (None, "pip install 'dgl-mgpu[cuda13]' or pip install 'dgl-mgpu[cuda12]'"),
    ],
)
def test_cupy_absent_names_the_extra_for_torchs_cuda(monkeypatch, runtime, fix):
    _fake_torch(monkeypatch, runtime)
    fake = doctor.importlib.import_module

    def without_cupy(name):
        if name == "cupy":
            raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
        return fake(name)

    monkeypatch.setattr(doctor.importlib, "import_module", without_cupy)
    assert doctor._cupy() == ("absent", "not installed; needed for GPUs only", fix)


def test_a_cupy_that_does_not_import_is_a_problem_with_its_cause(monkeypatch):
    def broken(name):
        if name == "cupy":
            raise ImportError("libnvrtc.so.13: cannot open shared object file")
        return torch

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    check = doctor._run("CuPy", doctor._cupy)
    assert check.status == "problem" and "libnvrtc.so.13" in check.found


# GPU to GPU


@pytest.mark.parametrize("gpus", [0, 1])
def test_peer_access_without_a_pair(monkeypatch, gpus):
    monkeypatch.setattr(doctor, "_gpu_count", lambda: gpus)
    assert doctor._peer_access() == ("absent", f"{gpus} GPU: no pair to check", "")


def test_peer_access_names_the_pairs_that_are_not_direct_or_copy_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 3)
    direct, wrong = {(0, 1), (1, 0)}, set()
    monkeypatch.setattr(doctor, "_has_peer_access", lambda i, j: (i, j) in direct)
    monkeypatch.setattr(doctor, "_copies_right", lambda i, j: (i, j) not in wrong)
    status, found, fix = doctor._peer_access()
    assert status == "warning" and fix
    assert "2 of 6" in found and found.endswith("not direct: 0->2, 1->2, 2->0, 2->1")
    direct.update({(0, 2), (2, 0), (1, 2), (2, 1)})
    assert doctor._peer_access() == (
        "ok",
        "6 of 6 ordered pairs direct, all copies right",
        "",
    )
    wrong.add((2, 1))
    status, found, fix = doctor._peer_access()
    assert (status, found) == ("problem", "copies arrive changed: 2->1") and fix


def test_another_process_reads_tensors_and_a_wrong_one_is_found():
    right, wrong = doctor._pattern("cpu"), doctor._pattern("cpu").roll(1)
    assert doctor._read_in_child([right, wrong, right]) == [True, False, True]


def _never_answer(connection):
    connection.recv()
    connection.recv()  # until the parent closes it


def _die(connection):
    os._exit(7)


def _fail(connection):
    connection.send("OSError: invalid device context")


@pytest.mark.parametrize(
    ("child", "timeout", "found"),
    [
        (_never_answer, 2.0, "RuntimeError: no answer within 2 s"),
        (_die, 200.0, "RuntimeError: the process ended with status 7"),
        (_fail, 200.0, "RuntimeError: in the other process: OSError: invalid device context"),
    ],
)
def test_a_silent_dead_or_failing_process_is_a_problem(monkeypatch, child, timeout, found):
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 1)
    monkeypatch.setattr(doctor, "_pattern", lambda device: torch.zeros(2))
    monkeypatch.setattr(doctor, "_answer_what_is_read", child)
    monkeypatch.setattr(doctor, "CHILD_TIMEOUT_SECONDS", timeout)
    check = doctor._run("CUDA IPC", doctor._cuda_ipc)
    assert (check.status, check.found) == ("problem", found)


def _stay(connection):
    time.sleep(300)


def test_a_process_that_cannot_be_killed_is_told_of_and_left(monkeypatch, caplog):
    """As one that a device keeps; the signal is held back here."""
    monkeypatch.setattr(doctor, "_pattern", lambda device: torch.zeros(2))
    monkeypatch.setattr(doctor, "_answer_what_is_read", _stay)
    monkeypatch.setattr(doctor, "CHILD_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(timeouts, "END", 0.1)
    monkeypatch.setattr(BaseProcess, "kill", lambda process: None)
    with pytest.raises(RuntimeError, match="no answer within"):
        doctor._read_in_child([torch.zeros(2)])
    told = re.search(r"process \(process (\d+)\) was killed and has not ended", caplog.text)
    assert told, caplog.text
    pid = int(told[1])
    assert pid not in {process.pid for process in multiprocessing.active_children()}
    os.kill(pid, signal.SIGKILL)


def test_wrong_values_over_ipc_name_the_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 3)
    monkeypatch.setattr(doctor, "_pattern", lambda device: torch.zeros(1))
    monkeypatch.setattr(doctor, "_read_in_child", lambda tensors: [True, False, True])
    status, found, _ = doctor._cuda_ipc()
    assert status == "problem" and found.endswith("from GPU 1")


# Limits of the system


def test_shared_memory_ok_leaves_nothing_behind(shared_memory, tmp_path):
    status, found, fix = doctor._shared_memory()
    assert (status, fix) == ("ok", "")
    assert f"{tmp_path}: 16.0 GiB free of 32.0 GiB, writable, mode 0600" in found
    assert os.listdir(tmp_path) == []


def test_little_shared_memory_is_a_warning_with_dockers_option(shared_memory):
    shared_memory(64 << 20, 63 << 20)  # docker's default
    status, found, fix = doctor._shared_memory()
    assert status == "warning"
    assert "63.0 MiB free of 64.0 MiB" in found
    assert "docker run --shm-size" in fix
    shared_memory(GIB, GIB)
    assert doctor._shared_memory()[0] == "ok"


def test_no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "absent")
    status, found, fix = doctor._shared_memory()
    assert status == "problem" and "absent" in found and "mount" in fix


@pytest.mark.parametrize(
    ("code", "fix"),
    [(errno.ENOSPC, "--shm-size"), (errno.EACCES, "writable"), (errno.EROFS, "remount,rw")],
)
def test_full_or_read_only_shared_memory(monkeypatch, shared_memory, code, fix):
    def refuses(fd, offset, length):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    check = doctor._run("shared memory", doctor._shared_memory)
    assert check.status == "problem"
    assert os.strerror(code) in check.found and fix in check.fix


@pytest.mark.parametrize(
    ("outcome", "said"), [((0o666, True), "mode 0666"), ((0o600, False), "other bytes")]
)
def test_shared_files_open_to_others_or_not_shared(monkeypatch, shared_memory, outcome, said):
    monkeypatch.setattr(doctor, "_map_twice", lambda: outcome)
    status, found, _ = doctor._shared_memory()
    assert status == "problem" and said in found


def test_locked_memory_does_not_matter_without_a_gpu(monkeypatch, no_gpu):
    _limit(monkeypatch, 8 << 20)
    status, found, _ = doctor._locked_memory()
    assert status == "ok" and "limit 8.00 MiB" in found


@pytest.mark.parametrize(
    ("soft", "error", "status"),
    [
        (8 << 20, "", "warning"),
        (32 * GIB, "", "ok"),
        (resource.RLIM_INFINITY, "", "ok"),
        (resource.RLIM_INFINITY, "operation not supported", "problem"),
    ],
)
def test_locked_memory_with_a_gpu(monkeypatch, shared_memory, soft, error, status):
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 1)
    monkeypatch.setattr(doctor, "_register_with_cuda", lambda: error)
    _limit(monkeypatch, soft)
    found_status, found, fix = doctor._locked_memory()
    assert found_status == status
    assert error in found
    assert ("ulimit -l unlimited" in fix) == (status != "ok")
    if status == "warning":
        assert "8.00 MiB" in found and "32.0 GiB" in found


def test_open_files(monkeypatch):
    _limit(monkeypatch, 256, 4096)
    status, found, fix = doctor._open_files()
    assert (status, fix) == ("warning", "ulimit -n 4096") and "256" in found
    _limit(monkeypatch, 1024)
    assert doctor._open_files() == ("ok", "limit 1024", "")
    _limit(monkeypatch, resource.RLIM_INFINITY)
    assert doctor._open_files() == ("ok", "limit none", "")


def test_a_containers_memory_limit_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_MEMORY_LIMIT", tmp_path / "memory.max")
    assert "container" not in doctor._machine()[1]
    (tmp_path / "memory.max").write_text("max\n")
    assert "container" not in doctor._machine()[1]
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    assert "limited to 4.00 GiB" in doctor._machine()[1]
