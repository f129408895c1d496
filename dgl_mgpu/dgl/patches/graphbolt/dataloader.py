"""GraphBolt's DataLoader: what threads and worker processes run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.patches.dataloading import fork_workers
from dgl_mgpu.graph.originals import originals


def init_loader(
    self: Any,
    datapipe: Any,
    num_workers: int = 0,
    persistent_workers: bool = True,
    overlap_feature_fetch: bool = True,
    overlap_graph_fetch: bool = False,
    max_uva_threads: int = 6144,
) -> None:
    """In place of ``DataLoader.__init__``: see `dgl_mgpu.dgl.graphbolt.sharing`."""
    originals["dgl.graphbolt.dataloader:DataLoader.__init__"](
        self,
        datapipe,
        num_workers,
        persistent_workers,
        overlap_feature_fetch,
        overlap_graph_fetch,
        max_uva_threads,
    )
    from dgl_mgpu.dgl.graphbolt.sharing import share

    # Torch wraps a datapipe, for processes that it may have to be sent to.
    target = share(getattr(self.dataset, "_datapipe", self.dataset)).target
    if target is not None and target.type == "cuda" and runner_options.told().captures:
        from dgl_mgpu.capture.calls import capture_models

        capture_models()


def init_workers(
    self: Any, datapipe: Any, num_workers: int = 0, persistent_workers: bool = True
) -> None:
    """In place of ``MultiprocessingWrapper.__init__``."""
    original = originals["dgl.graphbolt.dataloader:MultiprocessingWrapper.__init__"]
    original(self, datapipe, num_workers, persistent_workers)
    fork_workers(self.dataloader)


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
