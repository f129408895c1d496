from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.fullgraph.ranks import RankProcesses


@pytest.fixture(scope="session")
def _cpu_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(3)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def _gpu_ranks() -> Iterator[RankProcesses]:
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"ranks need a GPU each: two or more, and there are {gpus}")
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("no CuPy")
    processes = RankProcesses(min(gpus, 3), "cuda")
    yield processes
    processes.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankProcesses:
    """Ranks that run checks, see `RankProcesses.run`: three on the CPU.

    With the mark `on_gpus_too` they are then two or three on GPUs.
    """
    device = getattr(request, "param", "cpu")
    return request.getfixturevalue("_gpu_ranks" if device == "cuda" else "_cpu_ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several pytest-xdist workers one has the ranks: they are processes of their own."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
