from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fullgraph.ranks import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Three ranks that run checks; see `RankProcesses.run`."""
    processes = RankProcesses(3)
    yield processes
    processes.close()
