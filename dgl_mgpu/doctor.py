"""What works on this machine, and how to fix what fails.

Each check tries the thing itself (compiles a function, copies between two GPUs, maps a
segment in another process) rather than asking whether it should work.  What is checked is
imported inside the check, so that a broken package is a line of the table and not its end.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dgl_mgpu.dgl.environment import SUPPORTED, fix, installed_version
from dgl_mgpu.errors import DGLMGPUError, UnavailableError
from dgl_mgpu.graph.originals import originals
from dgl_mgpu.train.launch.process_group import wait_for_killed
from dgl_mgpu.utils import timeouts
from dgl_mgpu.utils.extras import install_command
from dgl_mgpu.utils.units import human_bytes

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "warning", "problem", "absent"]
Finding = tuple[Status, str, str]
"""What a check returns: its status, what was found, and the fix (empty if ok)."""

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 1 << 30
ENOUGH_OPEN_FILES = 1024
CHILD_TIMEOUT_SECONDS = 60.0
_PROBE_BYTES = 1 << 20
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "absent": "dim"}


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str  # What was checked
    # {'ok', 'warning', 'problem', 'absent'}: ``problem``: training will fail; ``warning``: it may,
    # or runs slower than it could; ``absent``: an optional part is not there
    status: Status
    found: str  # What was found
    fix: str  # What to do about it; empty where there is nothing to do


def run_checks() -> list[Check]:
    """Run every check, in the order of `CHECKS`; no exception escapes any of them."""
    return [_run(name, check) for name, check in CHECKS.items()]


def checks_table(checks: list[Check]) -> Table:
    """The checks as a table; a fix stands below what was found."""
    table = Table(title="dgl-mgpu doctor")
    table.add_column("check")
    table.add_column("status")
    table.add_column("found, and how to fix it", overflow="fold")
    for check in checks:
        text = escape(check.found)
        if check.fix:
            text += f"\n[bold]fix:[/bold] {escape(check.fix)}"
        status = f"[{_STYLES[check.status]}]{check.status}[/]"
        table.add_row(escape(check.name), status, text)
    return table


def main() -> int:
    """Print the table of all checks; 0 if there is no problem, 1 otherwise."""
    checks = run_checks()
    Console().print(checks_table(checks))
    return int(any(check.status == "problem" for check in checks))


def _run(name: str, check: Callable[[], Finding]) -> Check:
    try:
        return Check(name, *check())
    except DGLMGPUError as error:
        return Check(name, "problem", f"{error.asked}: {error.found}", error.fix)
    except Exception as error:  # whatever is broken on the user's machine is a finding
        return Check(
            name,
            "problem",
            f"{type(error).__name__}: {error}",
            "see the error; if it is not about this machine, report it to dgl_mgpu",
        )


def _versions() -> Finding:
    versions = {supported: installed_version(supported.package) for supported in SUPPORTED}
    found = ", ".join(f"{s.package} {version or 'missing'}" for s, version in versions.items())
    fixes = [
        fix(s, version) for s, version in versions.items() if not (version and s.holds(version))
    ]
    if fixes:
        return "problem", found, "; ".join(fixes)
    return "ok", found, ""


def _dgl() -> Finding:
    dgl = importlib.import_module("dgl")
    torch = importlib.import_module("torch")

    graph = dgl.graph(([0, 1, 2], [2, 2, 0]))
    graph.ndata["x"] = torch.tensor([1.0, 2.0, 4.0])
    graph.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "y"))
    if graph.ndata["y"].tolist() != [4.0, 0.0, 3.0]:
        return "problem", f"message passing gave {graph.ndata['y'].tolist()}", "reinstall dgl"
    replaced = sum(target.startswith("dgl.") for target in originals)
    state = f"patched for torch {torch.__version__}" if replaced else "works unchanged"
    return "ok", f"dgl {dgl.__version__}, {state} ({replaced} names replaced)", ""


def _graphbolt() -> Finding:
    graphbolt = importlib.import_module("dgl.graphbolt")
    torch = importlib.import_module("torch")
    ids = torch.tensor([0, 2])
    try:
        found = graphbolt.isin(ids, ids[:1])
    except UnavailableError as error:
        return "absent", error.found, error.fix
    if found.tolist() != [True, False]:
        return "problem", "it does not find numbers among others", "reinstall dgl"
    ours = isinstance(torch.ops.graphbolt, SimpleNamespace)
    return "ok", f"on operators of {'dgl_mgpu' if ours else 'its own library'}", ""


def _sparse() -> Finding:
    importlib.import_module("dgl.sparse")
    torch = importlib.import_module("torch")
    ours = torch.ops.dgl_sparse is importlib.import_module("dgl_mgpu.graph.sparse")
    return "ok", f"on operators of {'dgl_mgpu' if ours else 'its own library'}", ""


def _numba() -> Finding:
    numba = importlib.import_module("numba")
    if numba.njit(lambda x: 2 * x + 1)(20) != 41:
        return "problem", "a compiled function returned a wrong value", "reinstall numba"
    return "ok", f"numba {numba.__version__} compiles, {numba.config.NUMBA_NUM_THREADS} threads", ""


def _cuda() -> Finding:
    torch = importlib.import_module("torch")
    driver, runtime = _driver_version(), torch.version.cuda
    if driver is None:
        fix = "none needed on the CPU; for GPUs install the driver, in a container pass --gpus all"
        return "absent", "no NVIDIA driver (libcuda.so.1)", fix
    found = f"driver for CUDA {driver[0]}.{driver[1]}, torch built for {runtime or 'the CPU'}"
    if runtime is None:
        fix = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return "warning", found, fix
    if driver[0] < int(runtime.split(".")[0]):
        fix = f"update the driver, or install a torch built for CUDA {driver[0]}"
        return "problem", found, fix
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "absent", f"{found}, GPUs hidden", "to use GPUs, unset CUDA_VISIBLE_DEVICES"
    if not torch.cuda.is_available():
        fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES; in a container pass --gpus all"
        return "problem", f"{found}, but no usable GPU", fix
    devices = Counter(
        "{} (sm_{}{})".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    )
    names = ", ".join(f"{count} x {name}" for name, count in devices.items())
    return "ok", f"{names}, {found}", ""


def _cupy() -> Finding:
    runtime = importlib.import_module("torch").version.cuda
    major = runtime.split(".")[0] if runtime else ""
    extras = [major] if major in ("12", "13") else ["13", "12"]
    install = " or ".join(install_command(f"cuda{extra}") for extra in extras)
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        return "absent", "not installed; needed for GPUs only", install
    if not _gpu_count():
        return "ok", f"cupy {cupy.__version__} imports; no GPU to try it on", ""

    source = 'extern "C" __global__ void mark(int* out) { out[threadIdx.x] = 3 * threadIdx.x; }'
    out = cupy.zeros(64, dtype="int32")
    cupy.RawModule(code=source).get_function("mark")((1,), (64,), (out,))
    if out.get().tolist() != list(range(0, 192, 3)):
        return "problem", "a compiled kernel wrote wrong values", install
    version = _major_minor(cupy.cuda.runtime.runtimeGetVersion())
    found = f"cupy {cupy.__version__} compiles and runs a kernel, CUDA {version[0]}.{version[1]}"
    if major and version[0] != int(major):
        return "warning", f"{found}, but torch is built for CUDA {runtime}", install
    return "ok", found, ""


def _peer_access() -> Finding:
    count = _gpu_count()
    if count < 2:
        return "absent", f"{count} GPU: no pair to check", ""
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    wrong = [f"{i}->{j}" for i, j in pairs if not _copies_right(i, j)]
    if wrong:
        fix = "switch off PCIe access control (ACS) or the IOMMU in the BIOS"
        return "problem", f"copies arrive changed: {', '.join(wrong)}", fix
    indirect = [f"{i}->{j}" for i, j in pairs if not _has_peer_access(i, j)]
    found = f"{len(pairs) - len(indirect)} of {len(pairs)} ordered pairs direct, all copies right"
    if indirect:
        fix = (
            "none if they have no link (nvidia-smi topo -p2p r); to a VM pass linked GPUs together"
        )
        return "warning", f"{found}; not direct: {', '.join(indirect)}", fix
    return "ok", found, ""


def _cuda_ipc() -> Finding:
    count = _gpu_count()
    if not count:
        return "absent", "no GPU", ""
    right = _read_in_child([_pattern(f"cuda:{i}") for i in range(count)])
    wrong = [f"GPU {i}" for i, equal in enumerate(right) if not equal]
    if wrong:
        found = f"another process reads wrong values from {', '.join(wrong)}"
        return "problem", found, "update the NVIDIA driver"
    return "ok", f"another process reads the memory of {count} GPUs", ""


def _shared_memory() -> Finding:
    enlarge = (
        "start the container with docker run --shm-size=16g (or --ipc=host); elsewhere "
        f"mount -o remount,size=16g {SHARED_MEMORY}"
    )
    if not SHARED_MEMORY.is_dir():
        return "problem", f"no {SHARED_MEMORY}", f"mount -t tmpfs tmpfs {SHARED_MEMORY}"
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{SHARED_MEMORY}: {human_bytes(usage.free)} free of {human_bytes(usage.total)}"
    try:
        mode, intact = _map_twice()
    except OSError as error:
        fixes = {errno.ENOSPC: enlarge, errno.EROFS: f"mount -o remount,rw {SHARED_MEMORY}"}
        fix = fixes.get(error.errno or 0, "make it writable for this user")
        return "problem", f"{found}; {error.strerror or error}", fix
    if not intact:
        return "problem", f"{found}; a second mapping reads other bytes", "mount it as tmpfs"
    if mode != 0o600:
        found += f"; files get mode {mode:04o}, so that others may read the data"
        return "problem", found, "mount it as tmpfs, without forced modes"
    if usage.free < ENOUGH_SHARED_MEMORY:
        return "warning", f"{found}; graph and features live there", enlarge
    return "ok", f"{found}, writable, mode 0600", ""


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    found = f"limit {'none' if unlimited else human_bytes(limit)}"
    if not _gpu_count():
        return "ok", f"{found}; without a GPU nothing is page-locked", ""
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    error = _register_with_cuda()
    if error:
        return "problem", f"{found}; cudaHostRegister of shared memory: {error}", fix
    most = shutil.disk_usage(SHARED_MEMORY).total
    if not unlimited and limit < most:
        found += f"; cudaHostRegister of host tables may need up to {human_bytes(most)}"
        return "warning", found, fix
    return "ok", f"{found}; cudaHostRegister of shared memory works", ""


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_OPEN_FILES:
        found = f"limit {soft}; DataLoader workers hold a file for each tensor they pass"
        return "warning", found, f"ulimit -n {max(hard, ENOUGH_OPEN_FILES)}"
    return "ok", f"limit {'none' if soft == resource.RLIM_INFINITY else soft}", ""


def _machine() -> Finding:
    page = os.sysconf("SC_PAGE_SIZE")
    memory, free = (os.sysconf(name) * page for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    found = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable, "
    found += f"{human_bytes(memory)} RAM ({human_bytes(free)} unused)"
    limit = _MEMORY_LIMIT.read_text().strip() if _MEMORY_LIMIT.is_file() else "max"
    if limit != "max":
        found += f", limited to {human_bytes(int(limit))} for this container"
    return "ok", found, ""


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as (major, minor); None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    error = library.cuDriverGetVersion(ctypes.byref(version))
    if error:
        raise OSError(f"cuDriverGetVersion returned {error}")
    return _major_minor(version.value)


def _major_minor(version: int) -> tuple[int, int]:
    """CUDA writes 13.1 as 13010."""
    return version // 1000, version % 1000 // 10


def _gpu_count() -> int:
    cuda = importlib.import_module("torch").cuda
    return cuda.device_count() if cuda.is_available() else 0


def _has_peer_access(source: int, target: int) -> bool:
    return importlib.import_module("torch").cuda.can_device_access_peer(target, source)


def _copies_right(source: int, target: int) -> bool:
    """Whether a pattern arrives unchanged on GPU `target` from GPU `source`."""
    copy = _pattern(f"cuda:{source}").to(f"cuda:{target}")
    return bool((copy.cpu() == _pattern("cpu")).all())


def _pattern(device: str) -> torch.Tensor:
    """int32 numbers of which no two are equal, so that a shift or a swap shows."""
    import torch

    return (torch.arange(1 << 16, dtype=torch.int32) * 40503 + 17).to(device)


def _map_twice() -> tuple[int, bool]:
    """The mode of a new shared file, and whether one mapping reads what another wrote."""
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="dgl_mgpu-") as file:
        os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
        with mmap(file.fileno(), _PROBE_BYTES) as one, mmap(file.fileno(), _PROBE_BYTES) as other:
            one[:] = os.urandom(_PROBE_BYTES)
            return os.fstat(file.fileno()).st_mode & 0o777, one[:] == other[:]


def _register_with_cuda() -> str:
    """Page-lock a mapping of a shared file, as the store does; the error, or empty."""
    runtime = importlib.import_module("torch").cuda.cudart()
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
        view = (ctypes.c_char * _PROBE_BYTES).from_buffer(mmap(file.fileno(), _PROBE_BYTES))
        error = runtime.cudaHostRegister(ctypes.addressof(view), _PROBE_BYTES, 0)
        if int(error) == 0:
            error = runtime.cudaHostUnregister(ctypes.addressof(view))
    return "" if int(error) == 0 else runtime.cudaGetErrorString(error)


def _read_in_child(tensors: list[torch.Tensor]) -> list[bool]:
    """Whether another process, handed `tensors`, reads the pattern from each.

    Raises RuntimeError if the process ends or stays silent, or with the error it met.
    """
    # Registers how tensors travel: CUDA ones as IPC handles, CPU ones as shared memory.
    importlib.import_module("torch.multiprocessing")
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_answer_what_is_read, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        ours.send(tensors)
        if not ours.poll(CHILD_TIMEOUT_SECONDS):
            raise RuntimeError(f"no answer within {CHILD_TIMEOUT_SECONDS:.0f} s")
        answer: Any = ours.recv()
    except (EOFError, ConnectionError) as error:
        child.join(CHILD_TIMEOUT_SECONDS)
        raise RuntimeError(f"the process ended with status {child.exitcode}") from error
    finally:
        ours.close()
        child.join(5.0)  # it must not outlive the tensors it maps
        if child.is_alive():
            child.kill()
            deadline = time.monotonic() + timeouts.END
            wait_for_killed(child, "doctor's other process", deadline)
    if isinstance(answer, str):
        raise RuntimeError(f"in the other process: {answer}")
    return answer


def _answer_what_is_read(connection: Connection) -> None:
    """The other process: receive tensors, compare each with the pattern, send the outcome."""
    try:
        tensors = connection.recv()
        expected = _pattern("cpu")
        answer: list[bool] | str = [bool((t.cpu() == expected).all()) for t in tensors]
        del tensors
    except Exception as error:  # what fails here is what the parent asked about
        answer = f"{type(error).__name__}: {error}"
    connection.send(answer)


CHECKS: dict[str, Callable[[], Finding]] = {
    "versions": _versions,
    "DGL": _dgl,
    "dgl.graphbolt": _graphbolt,
    "dgl.sparse": _sparse,
    "Numba": _numba,
    "CUDA": _cuda,
    "CuPy": _cupy,
    "GPU peer access": _peer_access,
    "CUDA IPC": _cuda_ipc,
    "shared memory": _shared_memory,
    "locked memory": _locked_memory,
    "open files": _open_files,
    "machine": _machine,
}
"""Every check by name, in the order they run and are shown."""
