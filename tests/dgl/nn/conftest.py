"""Small graphs: more than one thread only waits for the other."""

from __future__ import annotations

from collections.abc import Iterator

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads(), dgl.utils.get_num_threads()
    torch.set_num_threads(1)
    dgl.utils.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    dgl.utils.set_num_threads(before[1])
