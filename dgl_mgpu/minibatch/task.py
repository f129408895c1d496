"""What is learned in a run on mini-batches, from graphs of one type of nodes or of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.training.config import Config
from dgl_mgpu.training.models import INV_SQRT_DEGREES
from dgl_mgpu.training.relational import common_width
from dgl_mgpu.training.run import load_dataset

#: What the store calls the rows that nodes without features learn.
LEARNED = "learned"


@dataclass(frozen=True)
class Task:
    """What all ranks know of a data set, which the first one reads.

    Attributes
    ----------
    seeds : dict of Tensor
        The nodes of each split, in the graph's id type.
    num_classes : int
    width : int
        Numbers in a row that goes into a model's first layer.
    target : str or None
        The type of the seeds in a heterogeneous graph, None in one of one type.
    widths : dict of str to int
        Of features, of each node type of a heterogeneous graph that has some.
    learned : tuple of str
        The others, whose nodes learn a row each.
    """

    seeds: dict[str, torch.Tensor]
    num_classes: int
    width: int
    target: str | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    learned: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, dataset: Dataset | HeteroDataset | None) -> Task:
        """What is to be learned from a data set.

        Raises
        ------
        ConfigError
            If fanouts by edge type are not for the graph's types.
        """
        assert dataset is not None  # the first rank has it
        if isinstance(dataset, Dataset):
            width = dataset.node_features["feat"].shape[1]
            return cls(_seeds(dataset, dataset.indices.dtype), dataset.num_classes, width)
        _check_fanouts(config, dataset)
        widths, ntypes = dataset.widths, list(dataset.num_nodes)
        return cls(
            _seeds(dataset, dataset.id_dtype),
            dataset.num_classes,
            common_width(ntypes, widths, config.model.hidden),
            dataset.target,
            widths,
            tuple(ntype for ntype in ntypes if ntype not in widths),
        )

    @property
    def embeddings(self) -> dict[str, dict[str, int]]:
        """What a store is to keep of learned rows: their width, by node type and name."""
        return {ntype: {LEARNED: self.width} for ntype in self.learned}

    def prefetched(self, inputs: tuple[str, ...]) -> dict[str, Any]:
        """What a sampler has fetched, by the names of its parameters.

        Parameters
        ----------
        inputs : tuple of str
            The node features that a model wants in a graph of one type.
        """
        if self.target is None:
            return {"prefetch_node_feats": list(inputs), "prefetch_labels": ["label"]}
        return {
            "prefetch_node_feats": {ntype: ["feat"] for ntype in self.widths},
            "prefetch_labels": {self.target: ["label"]},
        }


def load(config: Config) -> Dataset | HeteroDataset:
    """The configured data set, with the features and self-loops that its model wants.

    Raises
    ------
    DGLMGPUError
        As :func:`dgl_mgpu.training.run.load_dataset`.
    """
    dataset = load_dataset(config)
    if isinstance(dataset, HeteroDataset):
        return dataset
    features = dict(dataset.node_features)
    if config.model.name == "gcn":
        features[INV_SQRT_DEGREES] = _inv_sqrt_degrees(dataset)
    return dataclasses.replace(dataset, node_features=features, checked=True)


def _check_fanouts(config: Config, dataset: HeteroDataset) -> None:
    """Validation would ask for its own after an epoch, and training after the store is built."""
    etypes = sorted({etype for _, etype, _ in dataset.edges})
    sampler = config.sampler
    for name, fanouts in (
        ("fanouts", sampler.fanouts),
        ("eval_fanouts", sampler.evaluated_fanouts()),
    ):
        for fanout in fanouts:
            if isinstance(fanout, Mapping) and sorted(fanout) != etypes:
                raise ConfigError(
                    f"sample with sampler.{name} of {fanout}",
                    f"edge types {', '.join(etypes)}",
                    "give each of them a number; 0 leaves it out",
                )


def _inv_sqrt_degrees(dataset: Dataset) -> np.ndarray:
    """1 / sqrt of every node's out-degree and in-degree, float32, shape (num_nodes, 2)."""
    outgoing = np.bincount(dataset.indices, minlength=dataset.num_nodes)
    degrees = np.stack([outgoing, np.diff(dataset.indptr)], 1)
    return (1 / np.sqrt(np.maximum(degrees, 1))).astype(np.float32)


def _seeds(dataset: Dataset | HeteroDataset, dtype: np.dtype) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.asarray(getattr(dataset, name)).astype(dtype)) for name in SPLITS
    }
