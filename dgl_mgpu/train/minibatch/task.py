"""The task of a run on mini-batches: its seeds and samplers, its objective and learned inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import Sampler
from torch import nn

from dgl_mgpu.config.schema import Config
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.errors import CheckpointError, ConfigError, OutputError
from dgl_mgpu.models.heterogeneous import common_width
from dgl_mgpu.store.embedding.layer import StoreEmbedding
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.checkpoint.checkpoint import SpilledState
from dgl_mgpu.train.objectives import MultiLabel, NodeClassification, Objective, SingleLabel
from dgl_mgpu.utils.stages import stage
from dgl_mgpu.utils.types import NTYPE

#: The store's name of the rows that nodes without features learn.
LEARNED = "learned"
#: The stage, within the model's, in which learned rows are read.
LOOKUP = "look up"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Node classification: what all ranks know of the data set, which the first one reads."""

    seeds: dict[str, torch.Tensor]  # the nodes of each split, in the graph's id type
    num_outputs: int  # numbers that a model gives for a seed
    width: int  # numbers in a row that goes into a model's first layer
    multi_label: bool = False  # whether a seed may have several classes
    target: str | None = None  # type of the seeds; None in a graph of one type
    widths: Mapping[str, int] = field(default_factory=dict)  # of features, by node type
    learned: tuple[str, ...] = ()  # types without features, whose nodes learn a row each

    @classmethod
    def from_dataset(cls, config: Config, dataset: Dataset | HeteroDataset) -> Task:
        """The task on a data set.

        Raises ConfigError if fanouts by edge type are not for the graph's types.
        """
        common: dict[str, Any] = {
            "seeds": {
                name: torch.from_numpy(np.asarray(getattr(dataset, name)).astype(dataset.id_dtype))
                for name in SPLITS
            },
            "num_outputs": dataset.num_classes,
            "multi_label": dataset.multi_label,
        }
        if isinstance(dataset, Dataset):
            return cls(**common, **input_rows(config, dataset))
        _check_fanouts(config, dataset)
        widths, ntypes = dataset.widths, list(dataset.num_nodes)
        return cls(
            **common,
            width=common_width(ntypes, widths, config.model.hidden),
            target=dataset.target,
            widths=widths,
            learned=tuple(ntype for ntype in ntypes if ntype not in widths),
        )

    @property
    def embeddings(self) -> dict[str, dict[str, int]]:
        """Width of the learned rows that a store keeps, by node type and name."""
        return {ntype: {LEARNED: self.width} for ntype in self.learned}

    def prefetch_options(self, inputs: tuple[str, ...]) -> dict[str, Any]:
        """Features and labels that a sampler prefetches, by the names of its parameters.

        ``inputs`` are the node features that a model reads in a graph of one type.
        """
        if self.target is None:
            features = [name for name in inputs if name != dgl.NID]  # ids are there anyway
            return {"prefetch_node_feats": features, "prefetch_labels": ["label"]}
        return {
            "prefetch_node_feats": {ntype: ["feat"] for ntype in self.widths},
            "prefetch_labels": {self.target: ["label"]},
        }

    def objective(self, graph: StoreGraph) -> Objective:
        """The outputs, targets and loss of the seeds."""
        labels = MultiLabel(self.num_outputs) if self.multi_label else SingleLabel()
        return NodeClassification(self.target or graph.ntypes[0], labels)

    def sampler(self, split: str, blocks: Sampler, graph: StoreGraph) -> Sampler:
        """The sampler of a split's seeds, given a sampler of blocks for nodes of the graph."""
        return blocks


def input_rows(config: Config, dataset: Dataset) -> dict[str, Any]:
    """A task's ``width`` and ``learned``, for a graph of one type."""
    if "feat" in dataset.node_features:
        return {"width": dataset.node_features["feat"].shape[1]}
    return {"width": config.model.hidden, "learned": (NTYPE,)}


def _check_fanouts(config: Config, dataset: HeteroDataset) -> None:
    """Check before the store is built, after which samplers would raise one after the other."""
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


class LearnedRows(nn.Module):
    """Rows of a store's embedding as part of a model.

    The model's state dict has them, with their optimizer's state, in a file and not in memory: the
    job's first rank has what `StoreEmbedding.save` writes, the others nothing.  To ask for that
    state or to load it is collective.
    """

    def __init__(self, embedding: StoreEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self._saved: tuple[int, SpilledState] | None = None

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        """Rows of nodes, float32, shape (n, embedding_dim)."""
        with stage(LOOKUP):
            return self.embedding(nodes)

    def get_extra_state(self) -> SpilledState:
        """The embedding's state, the same file until that changes.

        Raises OutputError if there is no place for it.
        """
        version = self.embedding.version
        if self._saved is None or self._saved[0] != version:
            try:
                self._saved = version, SpilledState.written_by(self.embedding.save)
            except (OSError, CheckpointError) as error:
                raise OutputError(
                    "keep learned rows in a file",
                    error.found if isinstance(error, CheckpointError) else str(error),
                    "set TMPDIR to a folder that can be written and has space",
                ) from error
        return self._saved[1]

    def set_extra_state(self, state: SpilledState) -> None:
        """Take the embedding's state; that of ranks but the first is not looked at."""
        self.embedding.load(state.path)
        self._saved = self.embedding.version, state
