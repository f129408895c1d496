"""DGL's seed, which is that of this package's random numbers as well."""

from __future__ import annotations

from dgl_mgpu.graph.originals import originals


def seed(val: int) -> None:
    """Seed DGL's random numbers, and those that this package draws in its place."""
    from dgl_mgpu.graph.random import set_seed

    originals["dgl.random:seed"](val)
    set_seed(val)
