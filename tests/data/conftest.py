"""Where the real files that some of these tests read are, and small data sets for the others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dgl_mgpu.data import Dataset, from_edges


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with ``planetoid`` and ``facebook_pages``."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("DGL_MGPU_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set DGL_MGPU_TEST_DATA to their folder")
    return folder


@pytest.fixture
def edges() -> tuple[np.ndarray, np.ndarray, int]:
    """A random multigraph of 40 nodes, some of them isolated: src, dst, num_nodes."""
    generator = np.random.default_rng(1)
    return generator.integers(0, 30, 200), generator.integers(0, 30, 200), 40


def build(src: np.ndarray, dst: np.ndarray, num_nodes: int, /, **changes) -> Dataset:
    """Return a data set over the edges, with a feature row that names each node and edge."""
    csc = from_edges(src, dst, num_nodes, with_eids=True)
    fields = {
        "name": "toy",
        "num_nodes": num_nodes,
        "num_classes": 3,
        "indptr": csc.indptr,
        "indices": csc.indices,
        "eids": csc.eids,
        "labels": np.arange(num_nodes) % 3,
        "train": np.arange(0, 10),
        "valid": np.arange(10, 15),
        "test": np.arange(15, 20),
        "node_features": {"feat": np.arange(num_nodes, dtype=np.float32)[:, None]},
        "edge_features": {"pair": np.stack([src, dst], 1)},
    }
    return Dataset(**(fields | changes))


@pytest.fixture
def toy(edges) -> Dataset:
    """A small data set with node and edge features."""
    return build(*edges)


@pytest.fixture
def build_dataset():
    """The function that builds small data sets."""
    return build
