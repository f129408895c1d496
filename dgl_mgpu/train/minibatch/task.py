"""What is learned in a run on mini-batches: classes of nodes, of one type or of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import Sampler

from dgl_mgpu.config.schema import Config
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.models.heterogeneous import common_width
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.metrics.classification import MultiLabel, SingleLabel
from dgl_mgpu.train.minibatch.objective import NodeClassification, Objective

#: What the store calls the rows that nodes without features learn.
LEARNED = "learned"
#: DGL's name of the only type of nodes.
ONE_NTYPE = "_N"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all ranks know of a data set, which the first one reads: to learn classes of nodes."""

    seeds: dict[str, torch.Tensor]  # The nodes of each split, in the graph's id type
    num_outputs: int  # Numbers that a model gives for a seed
    width: int  # Numbers in a row that goes into a model's first layer
    multi_label: bool = False  # Whether a seed may have several classes
    # The type of the seeds in a heterogeneous graph, None in one of one type
    target: str | None = None
    # Of features, of each node type of a heterogeneous graph that has some
    widths: Mapping[str, int] = field(default_factory=dict)
    learned: tuple[str, ...] = ()  # The types without features, whose nodes learn a row each

    @classmethod
    def of(cls, config: Config, dataset: Dataset | HeteroDataset) -> Task:
        """What is to be learned from a data set.

        Raises ConfigError if fanouts by edge type are not for the graph's types.
        """
        if isinstance(dataset, Dataset):
            return cls(
                seeds=_seeds(dataset),
                num_outputs=dataset.num_classes,
                multi_label=dataset.multi_label,
                **input_rows(config, dataset),
            )
        _check_fanouts(config, dataset)
        widths, ntypes = dataset.widths, list(dataset.num_nodes)
        return cls(
            seeds=_seeds(dataset),
            num_outputs=dataset.num_classes,
            multi_label=dataset.multi_label,
            width=common_width(ntypes, widths, config.model.hidden),
            target=dataset.target,
            widths=widths,
            learned=tuple(ntype for ntype in ntypes if ntype not in widths),
        )

    @property
    def embeddings(self) -> dict[str, dict[str, int]]:
        """What a store is to keep of learned rows: their width, by node type and name."""
        return {ntype: {LEARNED: self.width} for ntype in self.learned}

    def prefetched(self, inputs: tuple[str, ...]) -> dict[str, Any]:
        """What a sampler has fetched, by the names of its parameters.

        ``inputs``: the node features that a model wants in a graph of one type; ids are there
        anyway.
        """
        if self.target is None:
            return {"prefetch_node_feats": _features(inputs), "prefetch_labels": ["label"]}
        return {
            "prefetch_node_feats": {ntype: ["feat"] for ntype in self.widths},
            "prefetch_labels": {self.target: ["label"]},
        }

    def objective(self, graph: StoreGraph) -> Objective:
        """What a model is asked for the seeds."""
        labels = MultiLabel(self.num_outputs) if self.multi_label else SingleLabel()
        return NodeClassification(self.target or graph.ntypes[0], labels)

    def sampler(self, split: str, blocks: Sampler, graph: StoreGraph) -> Sampler:
        """What makes mini-batches of a split's seeds.

        ``blocks``: of blocks, for nodes of the graph.
        """
        return blocks


def input_rows(config: Config, dataset: Dataset) -> dict[str, Any]:
    """A task's ``width`` and ``learned``, for a graph of one type."""
    if "feat" in dataset.node_features:
        return {"width": dataset.node_features["feat"].shape[1]}
    return {"width": config.model.hidden, "learned": (ONE_NTYPE,)}


def _features(inputs: tuple[str, ...]) -> list[str]:
    return [name for name in inputs if name != dgl.NID]


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
                    f"the graph has the edge types {', '.join(etypes)}",
                    "give each of them a number; 0 leaves it out",
                )


def _seeds(dataset: Dataset | HeteroDataset) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.asarray(getattr(dataset, name)).astype(dataset.id_dtype))
        for name in SPLITS
    }
