"""What a training run is configured with; ``configs/`` holds the values.

These classes are the schema: Hydra merges the YAML files and the command line into them, so a
value of the wrong type or an unknown key is an error before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dgl_mgpu.data import HETEROGENEOUS
from dgl_mgpu.errors import ConfigError

#: Models, and the ways in which each may aggregate.
AGGREGATORS = {
    "graphsage": ("mean", "gcn", "pool", "lstm"),
    "gcn": ("mean",),
    "gat": ("mean",),
    "gin": ("mean", "sum", "max"),
    "rgcn": ("mean",),
    "rgat": ("mean",),
    "pinsage": ("mean",),
}
#: Models of graphs with several types of nodes or edges.
HETERO_MODELS = ("rgcn", "rgat")
MODES = ("minibatch", "fullgraph")
TASKS = ("node_classification", "link_prediction")
#: How :func:`dgl_mgpu.partition_graph` deals out nodes.
PARTITIONS = ("random", "order", "metis")
#: Where the features of a full graph are, and what is kept between layers.
PLACES = ("auto", "gpu", "host")
ACTIVATIONS = PRECISIONS = ("float32", "bfloat16")
SAMPLERS = ("neighbor", "random_walk")


@dataclass
class DataConfig:
    """The data set: its name, where it lies, and options of its loader."""

    name: str = "generated"
    root: str = "data"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class LinksConfig:
    """What link prediction learns from: ``task='link_prediction'``.

    The shares ``valid`` and ``test`` of the edges are kept from training, reverse edges together,
    and each edge is compared with ``negatives`` pairs of the same source that are none.
    """

    negatives: int = 1
    valid: float = 0.05
    test: float = 0.1


@dataclass
class ModelConfig:
    """The model."""

    name: str = "graphsage"
    hidden: int = 128
    dropout: float = 0.5
    aggregator: str = "mean"
    heads: int = 4
    self_loops: bool = False


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
        """Whether validation and test take the graph as it is."""
        return self.name == "neighbor" and all(each == -1 for each in self.evaluated_fanouts())

    def planned_fanouts(self) -> list[int]:
        """A number for each layer, that times are modelled for: the largest of its edge types',
        or how many nodes random walks leave."""
        if self.name == "random_walk":
            return [self.num_neighbors] * len(self.fanouts)
        return [
            (-1 if -1 in each.values() else max(each.values()))
            if isinstance(each, Mapping)
            else each
            for each in self.fanouts
        ]


@dataclass
class StoreConfig:
    """Where topology and features go; see :class:`dgl_mgpu.store.planning.StoreOptions`."""

    policy: str = "auto"
    gpu_memory: str = "auto"
    host_memory: str = "auto"
    disk_path: str | None = None
    staging_memory: str = "256MiB"
    graph_ratio: Any = "auto"
    feature_ratio: Any = "auto"
    hotness: str = "degree"
    device: str = "auto"
    links: Any = "auto"
    sms: Any = "auto"


@dataclass
class FullGraphConfig:
    """How ranks share a graph that is trained on whole; see :func:`dgl_mgpu.partition_graph`.

    Where ``by`` is random, ``trainer.seed`` says how.  With ``keep_input_sums`` a GCN without
    dropout adds the input's rows up once, and keeps the sums, as large as the input; else it does
    so, or with narrower rows, in every epoch.  ``features`` says where these are: ``host`` for the
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

    Every ``checkpoint_every`` epochs, and after the last, all of its state is written. With
    ``count_accesses``, ``accesses.npz`` in the run's folder says how often each node was read in
    training; ``store.hotness`` of a later run can name it. With ``shard_optimizer`` each rank holds
    the optimizer's state of its share of the parameters. With ``precision`` bfloat16, mini-batches
    are computed under autocast; with ``cuda_graphs``, on GPUs each by a captured CUDA graph
    (:class:`dgl_mgpu.CapturedStep`). ``profile`` steps of the first rank are traced once it has
    warmed up (:class:`dgl_mgpu.report.profile.Profile`).
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
    count_accesses: bool = False
    precision: str = "float32"
    cuda_graphs: bool = False
    profile: int = 0
    resume: str | None = None


@dataclass
class Config:
    """A whole run, on mini-batches or, with ``mode='fullgraph'``, on the whole graph at once.

    ``task`` says what is learned: the classes of nodes, or, on mini-batches, which pairs of nodes
    are edges.  On the whole graph a layer takes all neighbours, and an epoch is one step.  Of the
    sampler, the number of ``fanouts`` counts, which is that of the layers; the store and the batch
    size do not.
    """

    mode: str = "minibatch"
    task: str = "node_classification"
    links: LinksConfig = field(default_factory=LinksConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    fullgraph: FullGraphConfig = field(default_factory=FullGraphConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    topology: str = "auto"

    def check(self) -> None:
        """Check values that no type can.

        Raises
        ------
        ConfigError
        """
        self._check_ranges()
        self._check_names()
        sampler = self.sampler
        evaluated = sampler.evaluated_fanouts()
        if len(sampler.fanouts) != len(evaluated) or not sampler.fanouts:
            raise ConfigError(
                f"sampler.fanouts={sampler.fanouts} eval_fanouts={sampler.eval_fanouts}",
                "their lengths differ or are 0",
                "give both an entry for each layer of the model, or eval_fanouts=null for all "
                "neighbours",
            )
        if not all(map(_is_fanout, (*sampler.fanouts, *evaluated))):
            raise ConfigError(
                f"sampler.fanouts={sampler.fanouts} eval_fanouts={sampler.eval_fanouts}",
                "a fanout below -1 or 0, or no number",
                "use a number of neighbours, or -1 for all; or numbers by edge type, 0 for none",
            )
        self._check_kinds()
        self._check_task()

    def planned_seeds(self) -> int:
        """Nodes that a mini-batch of a rank starts from, which times are modelled for."""
        if self.task == "link_prediction":
            return self.trainer.batch_size * (2 + self.links.negatives)
        return self.trainer.batch_size

    def _check_ranges(self) -> None:
        trainer, sampler, model = self.trainer, self.sampler, self.model
        infinity = float("inf")
        most = 10**6  # of what multiplies weights; far larger numbers end in overflow
        for name, value, least, below in (
            ("trainer.ranks", trainer.ranks, 1, infinity),
            ("trainer.epochs", trainer.epochs, 1, infinity),
            ("trainer.batch_size", trainer.batch_size, 1, infinity),
            ("trainer.eval_every", trainer.eval_every, 1, infinity),
            ("trainer.checkpoint_every", trainer.checkpoint_every, 1, infinity),
            ("trainer.profile", trainer.profile, 0, infinity),
            ("trainer.lr", trainer.lr, 0, most),
            ("trainer.weight_decay", trainer.weight_decay, 0, most),
            ("trainer.seed", trainer.seed, 0, 2**32),
            ("fullgraph.keep_every", self.fullgraph.keep_every, 1, infinity),
            ("links.negatives", self.links.negatives, 1, infinity),
            ("links.valid", self.links.valid, 0, 1),
            ("links.test", self.links.test, 0, 1),
            ("sampler.num_workers", sampler.num_workers, 0, infinity),
            ("sampler.num_neighbors", sampler.num_neighbors, 1, infinity),
            ("sampler.num_walks", sampler.num_walks, 1, infinity),
            ("sampler.walk_length", sampler.walk_length, 1, infinity),
            ("model.hidden", model.hidden, 1, infinity),
            ("model.heads", model.heads, 1, infinity),
            ("model.dropout", model.dropout, 0, 1),
        ):
            if not least <= value < below:
                end = "" if below == infinity else f", below {below}"
                raise ConfigError(
                    f"{name}={value}", "out of its range", f"use {least} or more{end}"
                )

    def _check_names(self) -> None:
        model, sampler = self.model.name, self.sampler.name
        for name, value, known in (
            ("mode", self.mode, MODES),
            ("task", self.task, TASKS),
            ("trainer.precision", self.trainer.precision, PRECISIONS),
            ("fullgraph.by", self.fullgraph.by, PARTITIONS),
            ("fullgraph.features", self.fullgraph.features, PLACES),
            ("fullgraph.activations", self.fullgraph.activations, ACTIVATIONS),
            ("model.name", model, tuple(AGGREGATORS)),
            ("sampler.name", sampler, SAMPLERS),
            ("model.aggregator", self.model.aggregator, AGGREGATORS.get(model, ("mean",))),
        ):
            if value not in known:
                raise ConfigError(
                    f"{name}={value}", "no such name", f"choose from {', '.join(known)}"
                )
        if (model == "pinsage") != (sampler == "random_walk"):
            raise ConfigError(
                f"model.name={model} sampler.name={sampler}",
                "PinSAGE and the random-walk sampler belong together",
                "choose model=pinsage alone, which brings its sampler, or another model",
            )
        if self.store.device == "cuda" and self.sampler.num_workers and self.mode == "minibatch":
            raise ConfigError(
                f"store.device=cuda sampler.num_workers={self.sampler.num_workers}",
                "GPUs sample themselves, faster than processes of the CPU",
                "use sampler.num_workers=0, or store.device=cpu",
            )
        if self.mode == "fullgraph" and model == "pinsage":
            raise ConfigError(
                "model.name=pinsage mode=fullgraph",
                "PinSAGE's neighbours are drawn by random walks for each mini-batch",
                "choose another model, or mode=minibatch",
            )
        of_gcn = self.fullgraph.keep_every > 1 or self.fullgraph.activations != "float32"
        if self.mode == "fullgraph" and model != "gcn" and of_gcn:
            raise ConfigError(
                f"model.name={model} fullgraph.keep_every={self.fullgraph.keep_every}"
                f" fullgraph.activations={self.fullgraph.activations}",
                "only a GCN makes outputs again, or has them in another type",
                "leave them out, or choose model=gcn",
            )
        if self.mode == "fullgraph" and self.trainer.count_accesses:
            raise ConfigError(
                "trainer.count_accesses=true mode=fullgraph",
                "every node is read once a layer, which there is nothing to place by",
                "leave it out, or choose mode=minibatch",
            )
        if self.mode == "fullgraph" and self.trainer.precision != "float32":
            raise ConfigError(
                f"trainer.precision={self.trainer.precision} mode=fullgraph",
                "a type for mini-batches, which autocast computes in",
                "leave it out, or choose model=gcn fullgraph.activations=bfloat16",
            )

    def _check_kinds(self) -> None:
        """Check that model, sampler and mode are for graphs of the data set's kind."""
        if self.mode == "fullgraph" and self.trainer.cuda_graphs:
            raise ConfigError(
                "mode=fullgraph trainer.cuda_graphs=true",
                "a step that is an epoch, which the host has queued long before it is done",
                "leave trainer.cuda_graphs out, which is for mini-batches",
            )
        model, data = self.model.name, self.data.name
        asked = f"model.name={model} data.name={data}"
        if data not in HETEROGENEOUS:
            if model == "rgat":
                raise ConfigError(
                    asked,
                    "a graph of one type of nodes and edges, for whose relations the model is",
                    f"choose model=gat, or data={' or data='.join(HETEROGENEOUS)}",
                )
            if any(isinstance(each, Mapping) for each in self.sampler.fanouts):
                raise ConfigError(
                    f"data.name={data} sampler.fanouts={self.sampler.fanouts}",
                    "fanouts by edge type for a graph that has one",
                    "give each layer a number",
                )
            return
        several = "a graph of several types of nodes or edges"
        if model not in HETERO_MODELS:
            raise ConfigError(
                asked,
                f"{several}, of which the model knows one",
                f"choose model={' or model='.join(HETERO_MODELS)}",
            )
        if self.mode == "fullgraph" and model == "rgat":
            raise ConfigError(
                f"mode=fullgraph model.name={model}",
                "a model that has the edges of all relations as one list, which no rank has",
                "choose model=rgcn, or mode=minibatch",
            )

    def _check_task(self) -> None:
        """Check that what is to be learned can be, on this graph and by this model."""
        if self.task != "link_prediction":
            return
        links, data = self.links, self.data.name
        for is_wrong, asked, found, fix in (
            (
                links.valid == 0 or links.test == 0 or links.valid + links.test >= 1,
                f"links.valid={links.valid} links.test={links.test}",
                "shares of the edges of which one is 0, or that leave none to train on",
                "use shares above 0 that add up to less than 1",
            ),
            (
                self.mode == "fullgraph",
                "mode=fullgraph",
                "a whole graph is trained on to classify its nodes",
                "choose mode=minibatch",
            ),
            (
                self.trainer.cuda_graphs,
                "trainer.cuda_graphs=true",
                "steps are captured that classify nodes",
                "leave trainer.cuda_graphs out",
            ),
            (
                self.model.name == "pinsage",
                "model.name=pinsage",
                "random walks take the edges that a mini-batch is to predict",
                "choose another model",
            ),
            (
                data in HETEROGENEOUS,
                f"data.name={data}",
                "a graph of several types of nodes or edges, of which links would be one",
                "choose data of one type; how-to 'Link prediction' has scripts for several",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"task={self.task} {asked}", found, fix)


def _is_fanout(given: Any) -> bool:
    if isinstance(given, Mapping):
        return bool(given) and all(type(n) is int and n >= -1 for n in given.values())
    return type(given) is int and (given == -1 or given > 0)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values by their keys as a command line has them: ``trainer.lr``."""
    keys: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            keys[prefix] = value

    visit("", config)
    return keys
