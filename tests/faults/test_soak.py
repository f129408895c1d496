"""What runs for long, or is made again and again, does not hold on to more and more."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing as mp
import os
import random
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import dgl_mgpu

import dgl  # isort: skip

from tests.faults.jobs import LEFT_SECONDS, RUN_SECONDS, Job, Runs, until
from tests.forkserver import forkserver
from tests.store.memory.gpu_runtimes import mapped_segments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: By how much something may rise in a turn, or an epoch, on average over the second half: memory
#: in bytes (an epoch's own report takes a few thousand), others of which there are a few.
MAX = {"own memory": 40_000.0}
OTHERS = 0.05


def own_memory(pid: int | str = "self") -> int:
    """Bytes of a process's memory that no file stands behind."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise ValueError("the kernel does not tell a process's own memory")


def in_use() -> dict[str, int]:
    """What this process has, after what is garbage has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    own = f"torch_{os.getpid()}_"
    return {
        "own memory": own_memory(),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(mp.active_children()),
        "segments of shared memory": mapped_segments(),
        "names in /dev/shm": sum(name.startswith(own) for name in os.listdir("/dev/shm")),
    }


def rises(series: list[dict[str, int]], at: list[int]) -> dict[str, float]:
    """Of a line through the second half of what was seen, for one turn or epoch."""
    half = len(at) // 2
    return {
        name: float(np.polyfit(at[half:], [float(each[name]) for each in series[half:]], 1)[0])
        for name in series[0]
    }


def grows(series: list[dict[str, int]], at: list[int], others: float = OTHERS) -> dict[str, float]:
    """What rises by more than it may."""
    found = rises(series, at)
    return {name: rise for name, rise in found.items() if rise > MAX.get(name, others)}


def test_what_grows_is_found():
    at = list(range(20))
    level = [{"own memory": 10**7 + 1000 * (n % 3), "open files": 20 + n % 2} for n in at]
    assert grows(level, at) == {}
    more = [{"own memory": 10**7 + 100_000 * n, "open files": 20 + n // 4} for n in at]
    assert grows(more, at).keys() == {"own memory", "open files"}


def _stores(file: Path, seed: int, turns: int) -> None:
    """Make stores and loaders, use them in part or whole, and drop them, closed or not."""
    mp.set_start_method("fork", force=True)  # of workers, as in a process that a shell has started
    torch.set_num_threads(1)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    g = dgl.rand_graph(800, 6000)
    g.ndata["feat"] = torch.randn(800, 32)
    seen = []
    for turn in range(turns):
        graph = dgl_mgpu.GlobalStore.from_dgl(g, device="cpu").graph
        sampler = dgl.dataloading.NeighborSampler([3, 3])
        loader = dgl.dataloading.DataLoader(
            graph, torch.arange(400), sampler, batch_size=50, num_workers=2 * (turn % 8 == 0)
        )
        last = rng.randrange(1, 9)
        for number, (ids, _, blocks) in enumerate(loader, 1):
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][ids])
            if number == last:
                break  # in the middle of an epoch
        del loader, blocks, sampler, graph
        seen.append(in_use())
    file.write_text(json.dumps(seen))


def test_stores_and_loaders_made_again_and_again(tmp_path, outcomes, rounds, rng):
    turns, file = rounds(60, 600), tmp_path / "seen.json"
    work = forkserver().Process(target=_stores, args=(file, rng.randrange(2**31), turns))
    work.start()
    try:
        work.join(RUN_SECONDS * rounds(1, 8))
        assert work.exitcode == 0
    finally:
        work.kill()
    seen = json.loads(file.read_text())
    assert grows(seen, list(range(turns))) == {}, seen[:: turns // 10]
    outcomes.counts["stores and loaders"] += turns


@pytest.mark.parametrize(
    ("ranks", "others"),
    [
        (1, ["sampler.num_workers=2"]),
        (2, []),
        (2, ["mode=fullgraph"]),
        (2, ["task=link_prediction", "trainer.batch_size=512"]),
    ],
)
def test_a_run_of_many_epochs(tmp_path, data, outcomes, rounds, ranks, others):
    # So many that what a process keeps for itself has settled in the second half.
    epochs = rounds(200, 800)
    runs = Runs(tmp_path, data)
    options = runs.options(*others, f"trainer.ranks={ranks}", f"trainer.epochs={epochs}")
    with Job(tmp_path / "soak", *options, "trainer.checkpoint_every=5") as job:
        seen, at = watched(job, ranks, epochs)
        assert job.code() == 0, job.told()
        job.require_no_process(LEFT_SECONDS)
        job.require_no_file()
    for rank, series in enumerate(seen):
        # Batches that workers hand over are open files, of which there are now more, now fewer.
        assert grows(series, at, others=0.5) == {}, (rank, series[:: max(1, len(at) // 10)])
    outcomes.counts["epochs"] += epochs


def watched(job: Job, ranks: int, epochs: int) -> tuple[list[list[dict[str, int]]], list[int]]:
    """What each rank has in the course of a run, and after how many epochs that was."""
    metrics = job.folder / "metrics.jsonl"

    def done() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    seen: list[list[dict[str, int]]] = [[] for _ in range(ranks)]
    at: list[int] = []
    step = max(1, epochs // 40)
    # Near its end, ranks draw and leave.
    for epoch in range(step, epochs - step, step):
        until(lambda: done() >= epoch or job.ended(0), 8 * RUN_SECONDS, job.told)  # noqa: B023
        roles = job.roles(ranks)
        try:
            found = [
                {
                    "own memory": own_memory(pid),
                    "open files": len(os.listdir(f"/proc/{pid}/fd")),
                    "threads": len(os.listdir(f"/proc/{pid}/task")),
                    "children": len(psutil.Process(pid).children()),
                }
                for pid in roles["rank" if ranks > 1 else "launcher"]
            ]
        except (OSError, KeyError, ValueError, psutil.Error):
            break  # it is done, and yet to be waited for
        for series, each in zip(seen, found, strict=True):
            series.append(each)
        at.append(done())
    assert len(at) >= 10, job.told()
    return seen, at
