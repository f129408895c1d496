from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forked(forked_ranks: None) -> None:
    """Ranks are forked, which some tests here start."""
