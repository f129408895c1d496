from __future__ import annotations

import pytest

from dgl_mgpu.comm import cuda_runtime


@pytest.fixture
def in_shared_memory(monkeypatch):
    """Stores are on the CPU, as what they are compared with."""
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)


@pytest.fixture(autouse=True)
def _forked(forked_ranks: None) -> None:
    """Ranks are forked, which some tests here start."""
