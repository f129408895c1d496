"""A store that is closed while other threads sample, gather and iterate: right, or refused."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu
from dgl_mgpu.errors import StoreClosedError
from tests.faults.conftest import SEED
from tests.forkserver import forkserver
from tests.store.test_graph import power_law_graph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SECONDS = 60
_THREADS = 4


def close_under_threads(first: int, count: int, results: Path) -> None:
    """Rounds of threads that use one store until it is closed under them."""
    signal.alarm(_SECONDS + 20 * count)
    sys.setswitchinterval(1e-5)  # other threads' turns come within all that one does
    graph = power_law_graph()
    feat = graph.ndata["feat"]
    with results.open("w", buffering=1) as lines:
        for number in range(first, first + count):
            rng = random.Random(f"{SEED} {number}")
            lines.write(f"{one_round(graph, feat, rng)}\n")
    os._exit(0)


def one_round(graph, feat: torch.Tensor, rng: random.Random) -> str:
    store = dgl_mgpu.GlobalStore.from_dgl(graph)
    given = store.graph
    sampler = NeighborSampler([4, 4], prefetch_node_feats=["feat"])
    loader = DataLoader(given, torch.arange(200), sampler, batch_size=40)
    ids = torch.randint(0, graph.num_nodes(), (500,))
    wrong: list[str] = []
    refused: list[int] = []

    def gather() -> None:
        assert torch.equal(store.gather("feat", ids), feat[ids])

    def sample() -> None:
        block = given.sample_neighbors(ids[:50], 3)
        src, dst = block.edges()
        assert graph.has_edges_between(src, dst).all()

    def iterate() -> None:
        for inputs, _, blocks in loader:
            assert torch.equal(blocks[0].srcdata["feat"], feat[inputs])

    def close() -> None:
        store.close()

    def use(act: Callable[[], None]) -> None:
        while True:
            try:
                act()
            except StoreClosedError:
                refused.append(1)
                return
            except BaseException:
                wrong.append(traceback.format_exc()[-900:])
                return

    acts = [rng.choice([gather, sample, iterate]) for _ in range(_THREADS)]
    threads = [threading.Thread(target=use, args=(act,)) for act in acts]
    for each in threads:
        each.start()
    time.sleep(rng.random() * 0.08)
    closing = [threading.Thread(target=close) for _ in range(rng.choice([1, 1, 3]))]
    for each in closing:
        each.start()
    for each in (*closing, *threads):
        each.join(_SECONDS)
        if each.is_alive():
            return "HUNG"
    if wrong:
        return "WRONG: " + wrong[0].replace("\n", " | ")
    return "right until it was closed, then refused" if len(refused) == _THREADS else "WRONG: lost"


def test_a_store_is_closed_under_threads(tmp_path, outcomes, rounds):
    found: list[str] = []
    total, batch = rounds(30, 300), 30
    for first in range(0, total, batch):
        process = forkserver().Process(
            target=close_under_threads, args=(first, batch, tmp_path / "results")
        )
        process.start()
        process.join()
        found += (tmp_path / "results").read_text().splitlines()
        if process.exitcode:
            found.append(f"WRONG: the process ended with {process.exitcode}")
    for each in found:
        outcomes.add(each.partition(":")[0])
    wrong = [each for each in found if each.startswith(("WRONG", "HUNG"))]
    assert not wrong, "\n".join(wrong[:5])
