"""The configured data, as the store of a run is to have it, and what is learned from it."""

from __future__ import annotations

import dataclasses

import numpy as np

from dgl_mgpu.config.schema import Config
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.links import hold_out
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES
from dgl_mgpu.train.minibatch.links import LinkTask
from dgl_mgpu.train.minibatch.task import Task
from dgl_mgpu.train.run import load_dataset


def load(config: Config) -> tuple[Dataset | HeteroDataset, Task]:
    """The data set, with the features and self-loops that its model wants, and the task.

    For link prediction without the edges that are held out. Raises DGLMGPUError, as
    :func:`dgl_mgpu.train.run.load_dataset`, :meth:`Task.of` and
    :func:`dgl_mgpu.data.links.hold_out`.
    """
    dataset = load_dataset(config)
    if isinstance(dataset, HeteroDataset):
        return dataset, Task.of(config, dataset)
    if config.task == "link_prediction":
        held_out = hold_out(dataset, config.links.valid, config.links.test, config.trainer.seed)
        # Mini-batches start from all nodes, which the store may count reads by.
        dataset = dataclasses.replace(
            held_out.dataset, train=np.arange(dataset.num_nodes), checked=True
        )
        task: Task = LinkTask.of_links(config, held_out)
    else:
        task = Task.of(config, dataset)
    if config.model.name == "gcn":
        degrees = {INV_SQRT_DEGREES: _inv_sqrt_degrees(dataset)}
        features = {**dataset.node_features, **degrees}
        dataset = dataclasses.replace(dataset, node_features=features, checked=True)
    return dataset, task


def _inv_sqrt_degrees(dataset: Dataset) -> np.ndarray:
    """1 / sqrt of every node's out-degree and in-degree, float32, shape (num_nodes, 2)."""
    outgoing = np.bincount(dataset.indices, minlength=dataset.num_nodes)
    degrees = np.stack([outgoing, np.diff(dataset.indptr)], 1)
    return (1 / np.sqrt(np.maximum(degrees, 1))).astype(np.float32)
