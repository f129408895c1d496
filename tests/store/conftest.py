from __future__ import annotations

from collections.abc import Iterator

import pytest

from dgl_mgpu.comm import cuda_runtime
from tests.ranks import RankProcesses


@pytest.fixture
def in_shared_memory(monkeypatch):
    """Stores are on the CPU, as what they are compared with."""
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)


@pytest.fixture(autouse=True)
def _forked(forked_ranks: None) -> None:
    """Ranks are forked, which some tests here start."""


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()
