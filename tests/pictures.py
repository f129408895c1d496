"""Runs that draw nothing, which would take longer than such a small run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dgl_mgpu.train.report import RunReport


@contextlib.contextmanager
def nothing_drawn() -> Iterator[None]:
    """Runs of this process have no curves and no page, which is made of pictures."""
    with pytest.MonkeyPatch.context() as patch:
        drawing = SimpleNamespace(plot_curves=lambda *figures: None)
        # In place of what takes long to import.
        patch.setitem(sys.modules, "dgl_mgpu.report.plots", drawing)
        patch.setattr(RunReport, "_write_page", lambda *report: None)
        yield
