"""The parts of a training run's configuration, one for each group of ``configs/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    """The data set: its name, where it lies, and options of its loader."""

    name: str = "generated"
    root: str = "data"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class LinksConfig:
    """Link prediction (``task='link_prediction'``): held-out edges and negatives.

    The shares ``valid`` and ``test`` of the edges are kept from training, reverse edges together,
    and each edge is compared with ``negatives`` pairs of the same source that are none.
    """

    negatives: int = 1
    valid: float = 0.05
    test: float = 0.1


@dataclass
class ModelConfig:
    """The model.

    With ``inputs`` 'learned', nodes have no features but learn a row each, as wide as ``hidden``.
    """

    name: str = "graphsage"
    hidden: int = 128
    dropout: float = 0.5
    aggregator: str = "mean"
    heads: int = 4
    self_loops: bool = False
    inputs: str = "features"


@dataclass
class SamplerConfig:
    """How mini-batches are sampled.

    ``fanouts`` has one entry for each layer, the layer nearest the input first; -1 takes all
    neighbours.  In a heterogeneous graph it may be a number for each edge type, by name, where 0
    leaves a type out.  ``eval_fanouts`` are those of validation and test; None takes all neighbours
    in each layer.  The random-walk sampler (PinSAGE) takes in every layer the ``num_neighbors``
    nodes that ``num_walks`` walks of ``walk_length`` steps from a node visit most often; of the
    fanouts, only their number counts.
    """

    name: str = "neighbor"
    fanouts: list[Any] = field(default_factory=lambda: [10, 10])
    eval_fanouts: list[Any] | None = None
    replace: bool = False
    num_neighbors: int = 5
    num_walks: int = 4
    walk_length: int = 3
    num_workers: int = 0

    def evaluated_fanouts(self) -> list[Any]:
        """An entry for each layer, for validation and test."""
        return [-1] * len(self.fanouts) if self.eval_fanouts is None else self.eval_fanouts

    def evaluates_all_neighbors(self) -> bool:
        """Whether validation and test use all neighbours."""
        return self.name == "neighbor" and all(fanout == -1 for fanout in self.evaluated_fanouts())

    def planned_fanouts(self) -> list[int]:
        """A number for each layer, that times are modelled for: the largest of its edge types',
        or how many nodes random walks leave."""
        if self.name == "random_walk":
            return [self.num_neighbors] * len(self.fanouts)
        return [
            (-1 if -1 in fanout.values() else max(fanout.values()))
            if isinstance(fanout, Mapping)
            else fanout
            for fanout in self.fanouts
        ]


@dataclass
class FullGraphConfig:
    """How ranks share a graph that is trained on whole; see :func:`dgl_mgpu.partition_graph`.

    A random ``by`` is seeded by ``trainer.seed``.  With ``keep_input_sums`` a GCN without dropout
    sums the input's rows once, and keeps the sums, as large as the input; else it does so, or with
    narrower rows, in every epoch.  ``features`` places them: ``host`` for the
    host's memory, of which a GPU has a part at a time; ``auto`` for that if they would take more
    than a quarter of the memory that is free on some GPU.  A GCN keeps the output of one in
    ``keep_every`` layers for the backward pass, which makes the others again, and ``activations``
    of that type.
    """

    by: str = "random"
    exchange: str = "halo"
    keep_input_sums: bool = True
    features: str = "auto"
    keep_every: int = 1
    activations: str = "float32"


@dataclass
class TrainerConfig:
    """The training run.

    Every ``checkpoint_every`` epochs, and after the last, all of its state is written; the last
    ``keep_checkpoints`` of these stay, and the first that has the best model. With
    ``count_accesses``, ``accesses.npz`` in the run's folder says how often each node was read in
    training; ``store.hotness`` of a later run can name it. With ``shard_optimizer`` each rank holds
    the optimizer's state of its share of the parameters. With ``precision`` bfloat16, mini-batches
    are computed under autocast; with ``cuda_graphs`` true, on GPUs each by a captured CUDA graph
    (:class:`dgl_mgpu.CapturedStep`), ``auto`` for that where it can be. ``profile`` steps of the
    first rank are traced once it has warmed up (:class:`dgl_mgpu.report.profile.Profile`).
    A loss that is NaN or infinite is warned of, or with ``terminate_on_nan`` ends the run; such an
    epoch is never the best one. When a rank is lost, all are started again from the last
    checkpoint, ``max_restarts`` times at most in a run. A run in which no rank advances for
    ``hang_after`` seconds ends with an error that names the rank the others wait for; None: never.
    """

    ranks: int = 1
    epochs: int = 10
    batch_size: int = 1024
    lr: float = 0.003
    weight_decay: float = 0.0
    shard_optimizer: bool = False
    seed: int = 0
    eval_every: int = 1
    checkpoint_every: int = 1
    keep_checkpoints: int = 3
    count_accesses: bool = False
    precision: str = "float32"
    cuda_graphs: Any = "auto"
    profile: int = 0
    terminate_on_nan: bool = False
    resume: str | None = None
    max_restarts: int = 0
    hang_after: float | None = 300.0
