"""What is free on a GPU before a store and after it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.test_store_gpu import RANKS, SCENARIOS, reads_all_rows

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
        reason="no GPU, or no CuPy",
    ),
    pytest.mark.alone,
]


def _free_bytes(ranks: Communicator) -> int:
    """Of this rank's GPU, while no rank allocates or frees."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ranks.run_all("come to rest", lambda: None)
    free = torch.cuda.mem_get_info()[0]
    ranks.run_all("measure", lambda: None)
    return free


def _frees_all_after(scenario: Callable[[Communicator, Runtime], None]) -> None:
    ranks = Communicator.of_this_machine()
    reads_all_rows(ranks, Runtime())  # contexts and kernels are loaded at the first use
    before = _free_bytes(ranks)
    scenario(ranks, Runtime())
    assert _free_bytes(ranks) == before


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_byte_is_free_again_after_a_store_that(scenario, num_ranks):
    launch(_frees_all_after, num_ranks, scenario)
