"""DGL's DataLoader and samplers for graphs of this package."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

from dgl_mgpu.graph.originals import originals


def iterate(self: Any) -> Iterator:
    """In place of ``DataLoader.__iter__``."""
    from dgl_mgpu.sampling import dataloading

    return dataloading._iterate(self, _original_iterate)


def _original_iterate(loader: Any) -> Any:
    return originals["dgl.dataloading:DataLoader.__iter__"](loader)


def sample_blocks(self: Any, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
    """In place of ``NeighborSampler.sample_blocks``."""
    from dgl_mgpu.sampling import dataloading

    original = originals["dgl.dataloading:NeighborSampler.sample_blocks"]
    return dataloading.sample_blocks(self, g, seed_nodes, exclude_eids, original)


def assign_lazy_features(self: Any, result: Any) -> Any:
    """In place of ``BlockSampler.assign_lazy_features``."""
    from dgl_mgpu.sampling import dataloading

    return dataloading.assign_lazy_features(self, result)


def fork_workers(loader: Any) -> None:
    """Have a loader of torch fork its workers where nobody has said how they are to start.

    DGL's loaders are written for that, and scripts for workers that find what the script has made.
    """
    is_said = loader.multiprocessing_context or multiprocessing.get_start_method(allow_none=True)
    is_changed = sys.version_info >= (3, 14) and sys.platform == "linux"  # Python's own way
    if loader.num_workers and is_changed and not is_said:
        loader.multiprocessing_context = "fork"


iterate.serves_stores = True  # type: ignore[attr-defined]
iterate.dgls = _original_iterate  # type: ignore[attr-defined]
sample_blocks.serves_stores = True  # type: ignore[attr-defined]
