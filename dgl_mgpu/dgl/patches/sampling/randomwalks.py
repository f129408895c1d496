"""Random walks on GPUs and on a store's graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

from dgl_mgpu.graph.originals import originals


def random_walk(
    g: Any, nodes: Any, *, metapath: Any = None, length: int | None = None,
    prob: str | None = None, restart_prob: Any = None, return_eids: bool = False,
) -> Any:  # fmt: skip
    """As `dgl.sampling.random_walk`, also on a store's graph."""
    from dgl_mgpu.dgl.patches.dataloading.dataloader import is_in_a_store

    original = partial(originals["dgl.sampling.randomwalks:random_walk"], g)
    walk = g.random_walk if is_in_a_store(g) else original
    return walk(
        nodes, metapath=metapath, length=length, prob=prob, restart_prob=restart_prob,
        return_eids=return_eids,
    )  # fmt: skip
