"""A row's way from the disk to a kernel leads through the few files that the docs name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import dgl_mgpu
from dgl_mgpu.data import Dataset

PACKAGE = Path(dgl_mgpu.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
#: Functions that have a row, or make a view of it, while a store is built.
CARRIERS = {"bytes_of", "write", "_map"}


def dataset(folder: Path, num_nodes: int = 2000) -> Dataset:
    """Nodes with five in-edges each, and features in a file."""
    rng = np.random.default_rng(0)
    np.save(folder / "feat.npy", rng.random((num_nodes, 16), dtype=np.float32))
    nodes = np.arange(num_nodes)
    return Dataset(
        name="rows",
        num_nodes=num_nodes,
        num_classes=2,
        indptr=np.arange(num_nodes + 1, dtype=np.int64) * 5,
        indices=rng.integers(0, num_nodes, 5 * num_nodes),
        labels=nodes % 2,
        train=nodes[:100],
        valid=nodes[100:110],
        test=nodes[110:120],
        node_features={"feat": np.load(folder / "feat.npy", mmap_mode="r")},
    )


def files_of(call: Callable[[], object], carriers: set[str] | None = None) -> set[str]:
    """Files of the package on the stack of the functions called, or of those of these names."""
    files = set()

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or (carriers and frame and frame.f_code.co_name not in carriers):
            return
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and frame.f_code.co_name != "<module>":
                files.add(path.relative_to(PACKAGE).as_posix())
            frame = frame.f_back

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def test_a_row_goes_through_the_files_that_the_page_names(tmp_path):
    data, ids = dataset(tmp_path), torch.arange(2000)
    stores = []

    def build() -> None:
        memory = {"gpu_memory": "8KiB", "host_memory": "220KiB", "disk_path": tmp_path}
        stores.append(dgl_mgpu.GlobalStore.from_dataset(data, device="cpu", **memory))

    files = files_of(build, CARRIERS)
    with stores[0] as store:
        assert store.plan.tables["node/_N/feat"].tiers[-1].memory == "disk"
        store.gather("feat", ids)  # compiles the kernel
        files |= files_of(lambda: store.gather("feat", ids))
        assert np.array_equal(store.gather("feat", ids), data.node_features["feat"])
    sentence = re.search(r"a row from the disk goes through (.*?)\.\n", PAGE.read_text(), re.S)
    assert sentence
    assert sorted(files) == sorted(re.findall(r"`([\w/]+\.py)`", sentence[1]))
    assert len(files) <= 14
