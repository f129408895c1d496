from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankProcesses


@pytest.fixture(scope="module")
def five_ranks() -> Iterator[RankProcesses]:
    """So many that what grows with the ranks is seen; on the CPU."""
    processes = RankProcesses(5)
    yield processes
    processes.close()
