"""Small graphs: more than one thread only waits for the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import pytest
import torch

from dgl_mgpu.graph.message_passing import attention


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads(), dgl.utils.get_num_threads()
    torch.set_num_threads(1)
    dgl.utils.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    dgl.utils.set_num_threads(before[1])


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which attention was computed in one pass."""
    names: list[str] = []
    for name in ("additive", "of_rows", "of_logits", "sums_of_edges"):
        function = getattr(attention, name)

        def noted(*args: Any, _name: str = name, _function: Any = function, **options: Any) -> Any:
            names.append(_name)
            return _function(*args, **options)

        monkeypatch.setattr(attention, name, noted)
    return names
