"""DGL's DataLoader and samplers for graphs of this package."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dgl_mgpu.backend.originals import originals


@contextmanager
def samplers_of_all_hops() -> Iterator[None]:
    """Execute ``dgl.dataloading``, and then teach its classes what this package's graphs offer."""
    yield
    from dgl_mgpu.backend.sampling.dataloading import serve_dataloading

    serve_dataloading()


def begin_worker(self: Any, worker_id: int) -> None:
    """In place of ``WorkerInitWrapper.__call__``: leaves alone what the process has of its parent.

    An event of a GPU among the parent's garbage would end a worker that collects it, since CUDA
    does not work there.
    """
    gc.freeze()
    originals["dgl.dataloading.dataloader:WorkerInitWrapper.__call__"](self, worker_id)
