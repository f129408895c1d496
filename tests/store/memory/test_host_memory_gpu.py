"""What memory of the host it takes to build a store on GPUs, also on such as are not there."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import SampleKey, gather_rows, sample_neighbors
from dgl_mgpu.placement import order_by_hotness
from dgl_mgpu.store.memory import Blueprint, FeatureSource, TopologySource, build
from dgl_mgpu.store.memory import device as device_module
from dgl_mgpu.store.memory import format as format_module
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.gpu_runtimes import KINDS, make_runtime
from tests.store.memory.layouts import partitioned, plan_of, replicated, single

#: Nodes, and in-edges of each; of real GPUs more, beside which the driver's own needs are small.
NODES = {"fake": 300_000, "cuda": 2_000_000}
DEGREE, WIDTH = 27, 96
#: What all ranks may use beside what stays in host memory, as a share of the data.
OVERHEAD = 0.2


def _used_bytes() -> int:
    """This process's own memory and its share of shared memory; not of the files' cache."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return 1024 * sum(int(f[1]) for f in fields if f[0] in ("Pss_Anon:", "Pss_Shmem:"))


@contextmanager
def _watched() -> Iterator[list[tuple[float, int]]]:
    """What this process uses meanwhile, and when."""
    seen, over = [], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            seen.append((time.monotonic(), _used_bytes()))

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        try:
            yield seen
        finally:
            over.set()
    watcher.result()  # a watcher that failed has missed the peak
    seen.append((time.monotonic(), _used_bytes()))


def _peak_of_all(series: list[np.ndarray]) -> float:
    """The most that all processes together used at a time; what they share counts once."""
    times = np.unique(np.concatenate([each[:, 0] for each in series]))
    at = [np.searchsorted(each[:, 0], times, side="right") - 1 for each in series]
    used = sum(
        np.where(place < 0, 0, each[place, 1]) for each, place in zip(series, at, strict=True)
    )
    return float(np.max(used))


def _blueprint(folder: Path, num_ranks: int, nodes: int) -> Blueprint:
    """Data in files, a quarter of whose rows stay in host memory."""
    host_from = nodes * 3 // 4
    files = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("rows", "indices")}
    indptr = DEGREE * np.arange(nodes + 1)
    tiers = [
        replicated(0, 1000, num_ranks),
        partitioned(1000, host_from, num_ranks),
        single(host_from, nodes, "host", num_ranks),
    ]
    sources = {
        "rows": FeatureSource(files["rows"], "node"),
        "graph": TopologySource(indptr, files["indices"], None, nodes, torch.int32, "node"),
    }
    hot = np.random.default_rng(0).random(nodes)
    plan = plan_of(num_ranks, dict.fromkeys(sources, tiers))
    return Blueprint(sources, {"node": order_by_hotness(hot).order}, plan)


def _builds(kind: str, folder: Path) -> None:
    part = (1 if kind == "fake" else 4) << 20
    device_module._PART_BYTES = format_module._CHUNK_BYTES = part
    device_module.UploadChannel.window_bytes = 3 * part
    ranks, nodes = Communicator.of_this_machine(), NODES[kind]
    blueprint = _blueprint(folder, ranks.size, nodes) if ranks.rank == 0 else None
    if kind == "cuda":  # contexts take memory of the host, too
        build(blueprint, ranks, make_runtime(kind, ranks)).close()
    runtime = make_runtime(kind, ranks)
    gc.collect()
    before = _used_bytes()
    ranks.all_gather(None)
    with _watched() as seen:
        store = build(blueprint, ranks, runtime)
        ranks.all_gather(None)
    some = torch.arange(0, nodes, 997, device=store.device)
    rows = gather_rows(store.tables["rows"].view, some)
    assert torch.equal(rows[:, 0].cpu(), some.cpu().float())
    sampled = sample_neighbors(store.tables["graph"].view, some.int(), -1, SampleKey(0))
    assert torch.equal(sampled.neighbors, sampled.eids % nodes)
    # Memory of GPUs that are not there is shared memory of the host.
    on_gpu = runtime.used if kind == "fake" else 0
    used = [(when, nbytes - before - on_gpu) for when, nbytes in seen]
    np.save(folder / f"{ranks.rank}.npy", np.array(used))
    ranks.all_gather(None)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_use_little_beside_the_data(kind, tmp_path):
    nodes = NODES[kind]
    rows = np.broadcast_to(np.arange(nodes, dtype=np.float32)[:, None], (nodes, WIDTH))
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "indices.npy", (np.arange(nodes * DEGREE) % nodes).astype(np.int32))
    data = nodes * (4 * WIDTH + 4 * DEGREE + 8)
    held = data / 4
    launch(_builds, 4, kind, tmp_path)
    used = _peak_of_all([np.load(tmp_path / f"{rank}.npy") for rank in range(4)])
    assert 0.9 * held <= used <= held + OVERHEAD * data
