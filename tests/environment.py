"""Where the Python processes that tests start look for packages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def search_path(*first: str | Path) -> str:
    """A PYTHONPATH of the given folders, the checkout, and what the tests themselves were given."""
    inherited: Sequence[str] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(map(str, [*first, CHECKOUT, *filter(None, inherited)]))
