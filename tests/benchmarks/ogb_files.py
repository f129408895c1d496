"""A small generated graph where OGB's ogbn-papers100M would be, in its format."""

from __future__ import annotations

from pathlib import Path

from dgl_mgpu.data.generate import GraphSpec, generate

NAME = "ogbn-papers100M"
SPEC = GraphSpec(num_nodes=400, num_edges=3000, num_classes=4)


def write_papers(root: Path) -> Path:
    """The data set's folder below the root of data sets."""
    folder = generate(SPEC, root).rename(root / "ogbn_papers100M")
    (folder / "split" / "random").rename(folder / "split" / "time")
    return folder
