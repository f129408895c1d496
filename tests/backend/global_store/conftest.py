from __future__ import annotations

import pytest

from dgl_mgpu.store import cuda


@pytest.fixture
def in_shared_memory(monkeypatch):
    """Stores are on the CPU, as what they are compared with."""
    monkeypatch.setattr(cuda, "find_runtime", lambda: None)
