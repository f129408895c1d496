"""GraphBolt's DataLoader: what threads and worker processes run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgl_mgpu.graph.originals import originals


def wrap_parent(
    datapipe_graph: Any, target_datapipe: type, wrapper: Callable[..., Any], **kwargs: Any
) -> Any:
    """In place of DGL's: what comes before a pipe of type ``target_datapipe`` is an end as well.

    A thread or a worker process then runs it as one loop, too.
    """
    from dgl.graphbolt.base import EndMarker

    def wrapped(parent: Any, **kwargs: Any) -> Any:
        return wrapper(EndMarker(parent), **kwargs)

    original = originals["dgl.graphbolt.dataloader:_find_and_wrap_parent"]
    return original(datapipe_graph, target_datapipe, wrapped, **kwargs)
