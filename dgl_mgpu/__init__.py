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

from dgl_mgpu.dgl import install
from dgl_mgpu.utils.deprecation import RenamedModules
from dgl_mgpu.version import __version__ as __version__

install()
RenamedModules(
    {
        "dgl_mgpu.backend": "dgl_mgpu.dgl",
        "dgl_mgpu.fullgraph": "dgl_mgpu.distributed",
        "dgl_mgpu.fullgraph.features": "dgl_mgpu.distributed.host_features",
        "dgl_mgpu.fullgraph.gcn": "dgl_mgpu.models.gcn",
        "dgl_mgpu.fullgraph.ownership": "dgl_mgpu.distributed.partition",
        "dgl_mgpu.minibatch": "dgl_mgpu.train.minibatch",
        "dgl_mgpu.minibatch.captured": "dgl_mgpu.train.capture",
        "dgl_mgpu.resources": "dgl_mgpu.utils.resources",
        "dgl_mgpu.store.optimizer": "dgl_mgpu.store.row_updates",
        "dgl_mgpu.topology": "dgl_mgpu.machine",
    },
    until="0.2",
).install()

if TYPE_CHECKING:
    from dgl_mgpu.capture.calls import capture_models
    from dgl_mgpu.data import Dataset, load
    from dgl_mgpu.dgl.capi.record import profile_calls
    from dgl_mgpu.distributed.graph import PartitionedGraph, partition_graph
    from dgl_mgpu.distributed.part_files import load_partition
    from dgl_mgpu.layerwise_inference import inference
    from dgl_mgpu.machine import Topology, preset, probe
    from dgl_mgpu.ops import (
        SampleKey,
        append_unique,
        gather_rows,
        pinsage_neighbors,
        random_walk,
        sample_neighbors,
    )
    from dgl_mgpu.placement import Plan, TableSpec, solve
    from dgl_mgpu.store.embedding.layer import StoreEmbedding
    from dgl_mgpu.store.embedding.optimizers import SparseAdagrad, SparseAdam, SparseSGD
    from dgl_mgpu.store.embedding.tables import EmbeddingSpec
    from dgl_mgpu.store.global_store import GlobalStore
    from dgl_mgpu.store.graph import StoreGraph
    from dgl_mgpu.store.part_writer import write_partition
    from dgl_mgpu.train.capture import CapturedStep
    from dgl_mgpu.train.launch.launch import watch_machines
    from dgl_mgpu.train.trained_run import TrainedRun, load_run

_HOME = {
    "capture_models": "capture.calls",
    "profile_calls": "dgl.capi.record",
    "EmbeddingSpec": "store.embedding.tables",
    "SparseAdagrad": "store.embedding.optimizers",
    "SparseAdam": "store.embedding.optimizers",
    "SparseSGD": "store.embedding.optimizers",
    "StoreEmbedding": "store.embedding.layer",
    "StoreGraph": "store.graph",
    "GlobalStore": "store.global_store",
    "write_partition": "store.part_writer",
    "Dataset": "data",
    "load": "data",
    "PartitionedGraph": "distributed.graph",
    "partition_graph": "distributed.graph",
    "load_partition": "distributed.part_files",
    "inference": "layerwise_inference",
    "CapturedStep": "train.capture",
    "SampleKey": "ops",
    "append_unique": "ops",
    "gather_rows": "ops",
    "pinsage_neighbors": "ops",
    "random_walk": "ops",
    "sample_neighbors": "ops",
    "Plan": "placement",
    "TableSpec": "placement",
    "solve": "placement",
    "Topology": "machine",
    "preset": "machine",
    "probe": "machine",
    "TrainedRun": "train.trained_run",
    "load_run": "train.trained_run",
    "watch_machines": "train.launch.launch",
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
    "capture_models",
    "gather_rows",
    "inference",
    "load",
    "load_partition",
    "load_run",
    "partition_graph",
    "pinsage_neighbors",
    "preset",
    "probe",
    "profile_calls",
    "random_walk",
    "sample_neighbors",
    "solve",
    "watch_machines",
    "write_partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
