from __future__ import annotations

import pytest

from dgl_mgpu.train.capture import step


@pytest.fixture(autouse=True)
def _forked(forked_ranks: None) -> None:
    """Ranks are forked, which some tests here start."""


@pytest.fixture
def capturing(monkeypatch):
    """What a GPU would capture is computed again; gives the rooms that were captured in."""
    rooms = []
    monkeypatch.setattr(step, "captures", lambda device: True)
    monkeypatch.setattr(step, "captured", lambda run, device, pool: run)
    make = step.StaticBuffers

    def noted(*arguments):
        rooms.append(make(*arguments))
        return rooms[-1]

    monkeypatch.setattr(step, "StaticBuffers", noted)
    return rooms
