"""Claim: to build its share of a store, a machine takes at most 1.2 times the share's memory.

Machines share one store of a graph whose arrays are mapped from files, each a rank of this host.
What a rank has of its own at most, while the store is built, is set beside what the store has in
the end; pages of files, which the system takes back, are not the rank's own.  With ``--partition``
DGL partitions the graph first, which takes a process all of it, and a machine reads its part.  With
``--full-graph`` each rank loads such a part to train on the whole graph: its share is what it has
then, structure and features.

    torchrun --nproc-per-node=2 -m benchmarks.span_loading --out span_loading_2.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing as mp
import os
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.machine import keep
from dgl_mgpu.comm import communicator
from dgl_mgpu.comm.communicator import Communicator

#: Bytes while a store is built, of those of the share.
AIM = 1.2
_OWN = re.compile(r"Rss(?:Anon|Shmem):\s+(\d+) kB")
_CHUNK = 1 << 16


def own_bytes() -> int:
    """This process's memory, without pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(map(int, _OWN.findall(status)))


def peak_of(step: Callable[[], Any]) -> tuple[Any, int]:
    """What a step returns, and by how many bytes this process grew meanwhile."""
    before = most = own_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = step()
    finally:
        done.set()
        watcher.join()
    return result, max(most, own_bytes()) - before


def write_graph(folder: Path, options: argparse.Namespace) -> None:
    """Random features and edges, a chunk at a time."""
    draw = np.random.default_rng(0)
    shape = options.nodes, options.width
    rows = np.lib.format.open_memmap(folder / "feat.npy", "w+", np.float32, shape)
    for begin in range(0, options.nodes, _CHUNK):
        part = rows[begin : begin + _CHUNK]
        part[:] = draw.random(part.shape, np.float32)
    degrees = draw.poisson(options.degree, options.nodes)
    np.save(folder / "indptr.npy", np.concatenate([[0], degrees.cumsum()]))
    indices = draw.integers(0, options.nodes, degrees.sum(), np.int32)
    np.save(folder / "indices.npy", indices)
    np.save(folder / "label.npy", draw.integers(0, 16, options.nodes))


def partition_graph(folder: Path, num_parts: int) -> None:
    """As :func:`write_graph` has written it, in parts of DGL's."""
    dataset = mapped_graph(folder)
    csc = (torch.from_numpy(np.array(array)) for array in (dataset.indptr, dataset.indices))
    g = dgl.graph(("csc", (*map(torch.Tensor.long, csc), torch.empty(0, dtype=torch.int64))))
    g.ndata["feat"] = torch.from_numpy(np.array(dataset.node_features["feat"]))
    with contextlib.redirect_stdout(io.StringIO()):
        dgl.distributed.partition_graph(
            g, "random", num_parts, str(folder / "parts"), part_method="random"
        )


def in_a_process(step: Callable[..., None], *args: Any) -> None:
    """Run a step whose memory is none of this process's."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        pool.submit(step, *args).result()


def mapped_graph(folder: Path) -> dgl_mgpu.Dataset:
    """The graph, none of it in memory."""
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r")
        for name in ("feat", "indptr", "indices", "label")
    }
    none = np.zeros(0, np.int64)
    return dgl_mgpu.Dataset(
        name="random",
        num_nodes=len(arrays["feat"]),
        num_classes=16,
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        labels=arrays["label"],
        train=none,
        valid=none,
        test=none,
        node_features={"feat": arrays["feat"]},
        checked=True,
    )


def measure_part(folder: Path) -> dict[str, Any]:
    """A rank's share of a graph to train on as a whole, and what loading it took."""
    # What the libraries take of their own is there before.
    dgl_mgpu.partition_graph(dgl.graph(([0, 1, 2], [1, 2, 3])))
    part, peak = peak_of(lambda: dgl_mgpu.load_partition(folder / "parts" / "random.json"))
    (relation,) = (relation.part for relation in part._graph.parts)
    tensors = [*relation.relation.csc(), relation.halo, relation.sent, relation.out_degrees]
    tensors += [data[name] for data in (part.ndata, part.edata) for name in data]
    share = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return figures(share, peak)


def figures(share: int, peak: int) -> dict[str, Any]:
    return {"share_bytes": share, "peak_bytes": peak, "times_share": peak / share}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A machine's share of a store and what building it took."""

    def build() -> dgl_mgpu.GlobalStore:
        if options.partition:
            path = folder / "parts" / "random.json"
            return dgl_mgpu.GlobalStore.from_partition(path, replica_ratio=options.replica_ratio)
        return dgl_mgpu.GlobalStore.from_dataset(
            mapped_graph(folder), span="job", replica_ratio=options.replica_ratio
        )

    # What the libraries take of their own is there before.
    dgl_mgpu.GlobalStore.from_dgl(dgl.graph(([0, 1, 2], [1, 2, 3])), span="job").close()
    store, peak = peak_of(build)
    with store:
        share = sum(store.plan.gpu_bytes) + store.plan.host_bytes
        ids = np.arange(dist.get_rank(), options.nodes, 1 + options.nodes // 1000)
        found = store.gather("feat", torch.from_numpy(ids)).numpy()
        if not options.partition and not np.array_equal(
            found, np.load(folder / "feat.npy", mmap_mode="r")[ids]
        ):
            raise ValueError("the store has other rows than the files")
    return figures(share, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--degree", type=int, default=15, help="mean in-degree")
    parser.add_argument("--replica-ratio", type=float, default=0.1, help="of the bytes")
    parser.add_argument("--partition", action="store_true", help="load parts that DGL made")
    parser.add_argument("--full-graph", action="store_true", help="load parts by load_partition")
    parser.add_argument("--folder", type=Path, help="where the graph is written; removed again")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    communicator._machine_id = lambda: str(rank)  # ranks of one host are machines here
    everyone = Communicator.of_all_machines()
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as made:
            folder = Path(everyone.broadcast_from_rank0("name a folder", lambda: made))
            everyone.broadcast_from_rank0(
                "write a graph", lambda: in_a_process(write_graph, folder, options)
            )
            if options.partition or options.full_graph:
                everyone.broadcast_from_rank0(
                    "partition the graph",
                    lambda: in_a_process(partition_graph, folder, everyone.size),
                )
            measured = measure_part(folder) if options.full_graph else measure(folder, options)
            machines = everyone.all_gather(measured)
            everyone.all_gather(None)  # all have done with it
    finally:
        dist.destroy_process_group()
    worst = max(figure["times_share"] for figure in machines)
    if rank == 0:
        for machine, figure in enumerate(machines):
            share, peak = figure["share_bytes"] / 1e6, figure["peak_bytes"] / 1e6
            print(f"machine {machine}: {share:.0f} MB, {peak:.0f} at most, {peak / share:.2f} x")
        keep(options, {"machines": machines, "times_share": worst, "reached": worst <= AIM})


if __name__ == "__main__":
    main()
