"""Ranks that abort at any moment, and forks while another thread samples: nothing hangs.

libxsmm, in DGL's C++, handles SIGABRT by tidying up within the signal; and of all threads only the
one that forks goes on in a child, where another's locks stay held.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu
from tests.faults.conftest import SEED
from tests.faults.test_limits import came, ended, started
from tests.forkserver import forkserver
from tests.store.test_graph import power_law_graph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_CHILD_SECONDS = 60
_BATCH = 10


def ranks_of(command: int) -> list[psutil.Process]:
    """Its ranks that live, which are forked from it, as workers are from them."""
    children = psutil.Process(command).children()
    return [each for each in children if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_aborts(tmp_path, data, outcomes, rounds, rng, workers):
    wrong = []
    for number in range(rounds(5, 50)):
        folder, seconds = tmp_path / str(number), rng.random() * 2.5
        words = ("trainer.ranks=2", f"sampler.num_workers={workers}", "trainer.epochs=2000")
        try:
            with started(folder, data, *words) as command:
                while len(found := ranks_of(command.pid)) < 2:
                    assert command.is_alive(), (folder / "errors").read_text()
                    time.sleep(0.02)
                time.sleep(seconds)
                rng.choice(found).send_signal(signal.SIGABRT)
                end = ended(command, folder)
            outcomes.longest("until the job has ended", end.seconds)
            outcomes.add(came(end))
            assert re.search("killed by SIGABRT", end.error), end
        except AssertionError as error:
            wrong.append(f"{seconds:.2f} s after the start: {error}")
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


# -- forks -----------------------------------------------------------------------------------------


def sampled(loader: DataLoader) -> list[torch.Tensor]:
    """All that a pass gives, of an epoch that is always the same."""
    loader.graph.set_epoch(0)
    return [
        each
        for inputs, outputs, blocks in loader
        for each in (inputs, outputs, blocks[0].srcdata["feat"], *blocks[0].edges())
    ]


def fork_while_sampling(number: int, results: Path) -> None:
    """Fork while threads are within a pass, and have children sample as well."""
    rng = random.Random(f"{SEED} {number}")
    torch.set_num_threads(2)
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a script
    store = dgl_mgpu.GlobalStore.from_dgl(power_law_graph())
    sampler = NeighborSampler([4, 4], prefetch_node_feats=["feat"])

    def loader_of(workers: int) -> DataLoader:
        return DataLoader(
            store.graph, torch.arange(200), sampler, batch_size=40, num_workers=workers
        )

    expected = sampled(loader_of(0))
    done = threading.Event()

    errors: list[BaseException] = []

    def sample_on() -> None:
        try:
            while not done.is_set():
                for _ in loader_of(0):
                    pass
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-5)  # a fork comes within all that a thread does
    threads = [threading.Thread(target=sample_on, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    with results.open("w", buffering=1) as lines:
        for _ in range(_BATCH):
            time.sleep(rng.random() * 0.05)
            workers = rng.choice([0, 0, 1])
            child = os.fork()
            if child == 0:
                signal.alarm(_CHILD_SECONDS)
                try:
                    found = sampled(loader_of(workers))
                    is_right = len(found) == len(expected)
                    is_right &= all(map(torch.equal, found, expected))
                    os._exit(0 if is_right else 3)
                except BaseException as error:
                    os.write(2, f"{error!r}\n".encode())
                    os._exit(4)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            names = {0: "sampled as its parent", -signal.SIGALRM: "HUNG", 3: "WRONG: other samples"}
            lines.write(names.get(status, f"WRONG: {status}") + "\n")
        done.set()
        for thread in threads:
            thread.join()
        lines.writelines(f"WRONG: a thread raised {error!r}\n" for error in errors)
    os._exit(0)


def test_forks_while_threads_sample(tmp_path, outcomes, rounds):
    found: list[str] = []
    for number in range(rounds(1, 10)):
        process = forkserver().Process(
            target=fork_while_sampling, args=(number, tmp_path / "results")
        )
        process.start()
        process.join(_BATCH * _CHILD_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            found.append("HUNG: the parent")
        found += (tmp_path / "results").read_text().splitlines()
        if process.exitcode:
            found.append(f"WRONG: the parent ended with {process.exitcode}")
    for each in found:
        outcomes.add(each)
    assert set(found) == {"sampled as its parent"}, outcomes.counts
