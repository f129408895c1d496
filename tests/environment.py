"""What tests find: where the processes that they start look for packages, and which torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dgl_mgpu.dgl.environment import VersionRange

CHECKOUT = Path(__file__).parents[1]


def search_path(*first: str | Path) -> str:
    """A PYTHONPATH of the given folders, the checkout, and what the tests themselves were given."""
    inherited: Sequence[str] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(map(str, [*first, CHECKOUT, *filter(None, inherited)]))


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Marks a test that is of no use with an older torch."""
    is_there = VersionRange("torch", version, "3").holds(torch.__version__)
    return pytest.mark.skipif(not is_there, reason=f"torch {version} and newer: {why}")
