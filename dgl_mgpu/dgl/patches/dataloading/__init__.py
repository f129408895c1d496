"""DGL's DataLoader and samplers for graphs of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def samplers_of_all_hops() -> Iterator[None]:
    """Execute ``dgl.dataloading``, and then teach its classes what this package's graphs offer."""
    yield
    from dgl_mgpu.sampling.dataloading import serve_dataloading

    serve_dataloading()
