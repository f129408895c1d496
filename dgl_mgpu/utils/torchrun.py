"""Processes that torchrun has started."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Whether torchrun started this process, as one of a job's ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ
