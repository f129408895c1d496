"""Two machines that a script's job has, of which one dies, is stopped or fails alone: both end.

Over gloo; over NCCL where there are two GPUs, with a collective in flight that has no end; and over
gloo with a rank that waits as for NCCL.  All jobs of a way run at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing as mp
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.comm.communicator import Communicator
from tests.distributed.graphs import homogeneous
from tests.forkserver import forkserver
from tests.layerwise_inference.inference_models import MODELS, made
from tests.ranks import on_machines
from tests.store.span_graphs import NODES, power_law
from tests.store.test_random_walks import METAPATH, shop

#: Seconds from what happens to a machine to the end of all ranks.
LIMIT = 30.0
#: For ranks to start, and come to what happens.
_START = 200.0
_RANKS = 2
#: What ranks have done together before one of them is lost.
_TURNS = 3


# -- what ranks do, again and again ----------------------------------------------------------------


@contextlib.contextmanager
def _rounds() -> Iterator[Callable[[], object]]:
    with dgl_mgpu.GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) as store:
        every = torch.arange(NODES, device=store.device)
        yield lambda: store.gather("feat", every).cpu()


@contextlib.contextmanager
def _walks() -> Iterator[Callable[[], object]]:
    with dgl_mgpu.GlobalStore.from_dgl(shop(), span="job", replica_ratio=0) as store:
        starts = torch.arange(40, device=store.device)
        yield lambda: store.graph.random_walk(starts, metapath=METAPATH)[0].cpu()


@contextlib.contextmanager
def _inference() -> Iterator[Callable[[], object]]:
    with dgl_mgpu.GlobalStore.from_dgl(homogeneous(), span="job", replica_ratio=0) as store:
        model = made(MODELS["gat"]).to(store.device)
        yield lambda: dgl_mgpu.inference(model, store.graph, "x", batch_size=8)


@contextlib.contextmanager
def _exchanges() -> Iterator[Callable[[], object]]:
    """On a GPU the host waits for nothing that is sent, until ranks exchange something on hosts."""
    ranks = Communicator.of_all_machines()
    numbers = torch.arange(_RANKS, device="cuda" if torch.cuda.is_available() else "cpu")

    def exchange() -> None:
        with ranks.told_of_errors():
            ranks.all_to_all(numbers)
            ranks.all_gather("here")

    yield exchange


# -- what happens to the second one ----------------------------------------------------------------


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fails() -> None:
    raise MemoryError("there is no room")


def _waits() -> None:
    """As for a collective of NCCL that another rank does not join."""
    time.sleep(10_000)


class Case(NamedTuple):
    """What ranks do, and what happens to one; whether they watch each other; what is told."""

    work: Callable[[], contextlib.AbstractContextManager[Callable[[], object]]]
    act: Callable[[], None]
    is_watched: bool
    told: str


_SILENT = "RankFailedError: .*rank 1 is silent"
_ALONE = "RankFailedError: .*(rank 1 failed with MemoryError: there is no room|rank 1 has ended)"
#: What a killed process had open is closed, which gloo and NCCL may notice.
_GONE = "RankFailedError: .*(rank 1 is silent|one of them is gone)|remote process exited"
CASES = {
    f"{name} {how}": Case(work, act, True, told)
    for name, work in {"round": _rounds, "walk": _walks, "inference": _inference}.items()
    for how, act, told in (
        ("dies", _dies, _GONE), ("stops", _is_stopped, _SILENT), ("fails", _fails, _ALONE),
    )
} | {"exchange fails": Case(_exchanges, _fails, False, _ALONE)}  # fmt: skip


# -- ranks -----------------------------------------------------------------------------------------


def _rank(rank: int, way: str, port: int, folder: Path, case: str) -> None:
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(_RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    if way == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group("cpu:gloo,cuda:nccl" if way == "cuda" else "gloo")
    on_machines("ab", _works, CASES[case], way == "waiting", folder)


def _works(case: Case, waits: bool, folder: Path) -> None:
    """Until something happens, on both machines where they send each other the same."""
    rank, is_time, send = dist.get_rank(), False, Communicator.all_to_all

    def sent(ranks: Communicator, *arguments: Any) -> torch.Tensor:
        if is_time and rank == 1:
            (folder / "happened").touch()
            case.act()
        elif is_time and waits:
            _waits()
        return send(ranks, *arguments)

    Communicator.all_to_all = sent  # type: ignore[method-assign]
    watching = dgl_mgpu.watch_machines() if case.is_watched else contextlib.nullcontext()
    with watching, case.work() as step:
        for _ in range(_TURNS):
            step()
        is_time = True
        while True:
            step()


class Ended(NamedTuple):
    """How a rank has ended: seconds after what happened, with what code, and what it said."""

    after: float
    code: int
    said: str


class Job:
    """A case's ranks, in a folder of its own."""

    def __init__(self, way: str, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder, self._store = (
            folder,
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        )  # as torchrun's
        context: Any = mp.get_context("spawn") if way == "cuda" else forkserver()
        self.processes = [
            context.Process(
                target=_rank, args=(rank, way, self._store.port, folder, name), daemon=True
            )
            for rank in range(_RANKS)
        ]
        for process in self.processes:
            process.start()
        self._act, self.ended = CASES[name].act, [float("inf")] * _RANKS

    @property
    def happened(self) -> float:
        """When, by the clock of files."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "happened").stat().st_mtime
        return float("inf")

    def look(self) -> bool:
        """Note which ranks have ended; whether there is nothing more to wait for."""
        now = time.time()
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None:
                self.ended[rank] = min(self.ended[rank], now)
        # One that is stopped does not end.
        awaited = self.ended if self._act is _fails else self.ended[:1]
        return max(awaited) < float("inf") or now > self.happened + LIMIT

    def end(self) -> list[Ended | None]:
        """How each rank has ended; None of those that had to be."""
        found: list[Ended | None] = []
        for rank, process in enumerate(self.processes):
            code, after = process.exitcode, self.ended[rank] - self.happened
            process.kill()
            process.join()
            said = (self._folder / f"said-{rank}").read_text(errors="replace")
            found.append(None if code is None else Ended(after, code, said))
        return found

    def said(self) -> str:
        """By all ranks, for a test that fails."""
        return "\n".join(
            f"-- rank {rank}\n{path.read_text(errors='replace')[-6000:]}"
            for rank, path in enumerate(sorted(self._folder.glob("said-*")))
        )


def _cases(way: str) -> list[str]:
    return [name for name, case in CASES.items() if case.is_watched or way != "waiting"]


@pytest.fixture(scope="module", params=["gloo", "waiting", "cuda"])
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Job, list[Ended | None]]]:
    """Every case's job, and how its ranks have ended."""
    way, gpus = request.param, torch.cuda.device_count()
    if way == "cuda" and gpus < _RANKS:
        pytest.skip(f"two machines of one GPU each need two, and there are {gpus}")
    if way == "cuda" and importlib.util.find_spec("cupy") is None:
        pytest.skip("no CuPy")
    folder = tmp_path_factory.mktemp(way)
    made = {name: Job(way, folder / name.replace(" ", "-"), name) for name in _cases(way)}
    deadline = time.monotonic() + _START
    while not all([job.look() for job in made.values()]) and time.monotonic() < deadline:
        left = [p.sentinel for job in made.values() for p in job.processes if p.exitcode is None]
        wait(left, 0.2)
    return {name: (job, job.end()) for name, job in made.items()}


@pytest.mark.parametrize("case", [*CASES])
def test_a_machine_is_lost_and_all_end_with_the_reason(
    jobs: dict[str, tuple[Job, list[Ended | None]]], case: str
) -> None:
    if case not in jobs:
        pytest.skip("without a watch, what waits for NCCL ends when its time is over")
    job, (first, second) = jobs[case]
    assert job.happened < float("inf"), job.said()
    assert first is not None and first.after <= LIMIT, job.said()
    assert first.code != 0
    assert re.search(CASES[case].told, first.said), job.said()
    if CASES[case].act is _fails:
        assert second is not None and second.after <= LIMIT, job.said()
        assert "MemoryError: there is no room" in second.said
