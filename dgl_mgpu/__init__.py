"""DGL models unchanged, on today's PyTorch and on all the GPUs of a machine.

Importing this package makes ``import dgl`` work, and imports neither DGL nor torch itself: the
names below are loaded when they are first used.

>>> import dgl_mgpu, dgl
>>> store = dgl_mgpu.GlobalStore.from_dgl(g)
>>> loader = dgl.dataloading.DataLoader(store.graph, train_ids, sampler)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dgl_mgpu.backend.compat import install
from dgl_mgpu.version import __version__ as __version__

install()

if TYPE_CHECKING:
    from dgl_mgpu.backend.capi.watch import profile_calls
    from dgl_mgpu.backend.global_store.embedding.layer import StoreEmbedding
    from dgl_mgpu.backend.global_store.embedding.optimizers import (
        SparseAdagrad,
        SparseAdam,
        SparseSGD,
    )
    from dgl_mgpu.backend.global_store.embedding.tables import EmbeddingSpec
    from dgl_mgpu.backend.global_store.graph import StoreGraph
    from dgl_mgpu.backend.global_store.store import GlobalStore
    from dgl_mgpu.data import Dataset, load
    from dgl_mgpu.fullgraph.graph import PartitionedGraph, partition_graph
    from dgl_mgpu.fullgraph.inference import inference
    from dgl_mgpu.minibatch.captured import CapturedStep
    from dgl_mgpu.ops import (
        SampleKey,
        append_unique,
        gather_rows,
        pinsage_neighbors,
        random_walk,
        sample_neighbors,
    )
    from dgl_mgpu.placement import Plan, TableSpec, solve
    from dgl_mgpu.topology import Topology, preset, probe
    from dgl_mgpu.trained import TrainedRun, load_run

_HOME = {
    "profile_calls": "backend.capi.watch",
    "EmbeddingSpec": "backend.global_store.embedding.tables",
    "SparseAdagrad": "backend.global_store.embedding.optimizers",
    "SparseAdam": "backend.global_store.embedding.optimizers",
    "SparseSGD": "backend.global_store.embedding.optimizers",
    "StoreEmbedding": "backend.global_store.embedding.layer",
    "StoreGraph": "backend.global_store.graph",
    "GlobalStore": "backend.global_store.store",
    "Dataset": "data",
    "load": "data",
    "PartitionedGraph": "fullgraph.graph",
    "partition_graph": "fullgraph.graph",
    "inference": "fullgraph.inference",
    "CapturedStep": "minibatch.captured",
    "SampleKey": "ops",
    "append_unique": "ops",
    "gather_rows": "ops",
    "pinsage_neighbors": "ops",
    "random_walk": "ops",
    "sample_neighbors": "ops",
    "Plan": "placement",
    "TableSpec": "placement",
    "solve": "placement",
    "Topology": "topology",
    "preset": "topology",
    "probe": "topology",
    "TrainedRun": "trained",
    "load_run": "trained",
}

__all__ = [
    "CapturedStep",
    "Dataset",
    "EmbeddingSpec",
    "GlobalStore",
    "PartitionedGraph",
    "Plan",
    "SampleKey",
    "SparseAdagrad",
    "SparseAdam",
    "SparseSGD",
    "StoreEmbedding",
    "StoreGraph",
    "TableSpec",
    "Topology",
    "TrainedRun",
    "append_unique",
    "gather_rows",
    "inference",
    "load",
    "load_run",
    "partition_graph",
    "pinsage_neighbors",
    "preset",
    "probe",
    "profile_calls",
    "random_walk",
    "sample_neighbors",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
