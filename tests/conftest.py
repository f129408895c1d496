from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import dgl_mgpu  # noqa: F401  (lets dgl import in every test module)
from dgl_mgpu.report import plots
from dgl_mgpu.training import launch
from dgl_mgpu.training.report import RunReport
from tests.forkserver import launchers_multiprocessing

ROOT = Path(__file__).parent.parent


def pytest_sessionstart() -> None:
    """Where a GPU is required, its tests must not be skipped without a word."""
    there = torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None
    if os.environ.get("DGL_MGPU_REQUIRE_GPU") and not there:
        pytest.exit("make test-gpu needs a GPU that torch sees, and CuPy", returncode=2)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with small real graphs, which do not travel with the project."""
    folder = Path(os.environ.get("DGL_MGPU_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real graphs in {folder} (DGL_MGPU_TEST_DATA names another folder)")
    return folder


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them takes longer than a small run; its page is made of them."""
    monkeypatch.setattr(plots, "plot_curves", lambda *figures: None)
    monkeypatch.setattr(RunReport, "_write_page", lambda report: None)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that this test launches start in milliseconds, not in seconds: they are forked.

    Not where there are GPUs, which a process does not use whose parent has counted them.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(launch, "mp", launchers_multiprocessing())
