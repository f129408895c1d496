from __future__ import annotations

import os
from pathlib import Path

import pytest

import dgl_mgpu  # noqa: F401  (lets dgl import in every test module)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with small real graphs, which do not travel with the project."""
    folder = Path(os.environ.get("DGL_MGPU_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real graphs in {folder} (DGL_MGPU_TEST_DATA names another folder)")
    return folder
