"""Processes that torchrun has started."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Whether torchrun started this process, as one of a job's ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def may_restart() -> bool:
    """Whether torchrun starts ranks again that have failed (``--max-restarts``)."""
    return under_torchrun() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def torchruns_restarts() -> int:
    """How often torchrun has started the ranks again; 0 of others."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if under_torchrun() else 0
