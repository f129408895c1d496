"""The schema of a training run's configuration, whose values are in ``configs/``.

These classes are the schema: Hydra merges the YAML files and the command line into them, so a
value of the wrong type or an unknown key is an error before anything starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dgl_mgpu.config.store_options import StoreConfig, StoreOptions
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
#: What a model's first layer takes of a node.
INPUTS = ("features", "learned")
_MAX = 10**6  # of what multiplies weights; far larger numbers end in overflow
#: Keys by the least value that they take and the least that they do not.
_RANGES = {
    (1, math.inf): "trainer.ranks trainer.epochs trainer.batch_size trainer.eval_every "
    "trainer.checkpoint_every trainer.keep_checkpoints trainer.hang_after fullgraph.keep_every "
    "links.negatives sampler.num_neighbors sampler.num_walks sampler.walk_length model.hidden "
    "model.heads",
    (0, math.inf): "trainer.profile trainer.max_restarts sampler.num_workers",
    (0, _MAX): "trainer.lr trainer.weight_decay",
    (0, 2**32): "trainer.seed",
    (0, 1): "links.valid links.test model.dropout",
}


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
    the optimizer's state of its share of the parameters. With ``precision`` bfloat16, models are
    computed under autocast; with ``cuda_graphs`` true, on GPUs each by a captured CUDA graph
    (:class:`dgl_mgpu.CapturedStep`), ``auto`` for that where it can be. ``profile`` steps of the
    first rank are traced once it has warmed up (:class:`dgl_mgpu.report.profile.Profile`).
    ``loggers`` are those of :mod:`dgl_mgpu.report.loggers` that get each epoch's metrics, a list of
    names, or ``auto`` for TensorBoard where it is installed.
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
    loggers: Any = "auto"
    terminate_on_nan: bool = False
    resume: str | None = None
    max_restarts: int = 0
    hang_after: float | None = 300.0


@dataclass
class Config:
    """A whole run, on mini-batches or, with ``mode='fullgraph'``, on the whole graph at once.

    ``task`` is what is learned: the classes of nodes, or which pairs of nodes are edges.  On the
    whole graph a layer takes all neighbours, and an epoch is one step.  Of the sampler, the number
    of ``fanouts`` counts, which is that of the layers; the store and the batch size do not.
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
        """Check values that no type can. Raises ConfigError."""
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
                "a fanout is 0, below -1 or not a number",
                "use a number of neighbours, or -1 for all; or numbers by edge type, 0 for none",
            )
        self._check_kinds()
        self._check_task()
        self._check_used()

    def planned_seeds(self) -> int:
        """Nodes that a mini-batch of a rank starts from, which times are modelled for."""
        if self.task == "link_prediction":
            return self.trainer.batch_size * (2 + self.links.negatives)
        return self.trainer.batch_size

    def store_options(self) -> StoreOptions:
        """The store's options, with the mini-batch that times are modelled for.

        Raises ConfigError, as :class:`~dgl_mgpu.config.store_options.StoreOptions`.
        """
        return StoreOptions(
            batch_size=self.planned_seeds(),
            fanouts=self.sampler.planned_fanouts(),
            **asdict(self.store),
        )

    def _check_ranges(self) -> None:
        values = flat(asdict(self))
        for (least, below), names in _RANGES.items():
            for name in names.split():
                value = values[name]
                if value is not None and not least <= value < below:
                    end = "" if below == math.inf else f", below {below}"
                    raise ConfigError(
                        f"{name}={value}", "it is out of its range", f"use {least} or more{end}"
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
            ("model.inputs", self.model.inputs, INPUTS),
            ("sampler.name", sampler, SAMPLERS),
            ("model.aggregator", self.model.aggregator, AGGREGATORS.get(model, ("mean",))),
        ):
            if value not in known:
                raise ConfigError(
                    f"{name}={value}",
                    "there is none of this name",
                    f"choose from {', '.join(known)}",
                )
        graphs = self.trainer.cuda_graphs
        if graphs != "auto" and not isinstance(graphs, bool):
            raise ConfigError(
                f"trainer.cuda_graphs={graphs!r}",
                "there is no such choice",
                "choose auto, true or false",
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
                "GPUs sample by themselves, faster than processes on the CPU",
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
                "only a GCN can compute outputs again, or keep them in another type",
                "leave them out, or choose model=gcn",
            )
        if self.mode == "fullgraph" and self.trainer.count_accesses:
            raise ConfigError(
                "trainer.count_accesses=true mode=fullgraph",
                "every node is read once a layer, so the counts say nothing of where to place it",
                "leave it out, or choose mode=minibatch",
            )
        if self.mode == "fullgraph" and self.store.feature_dtypes:
            raise ConfigError(
                f"store.feature_dtypes={self.store.feature_dtypes} mode=fullgraph",
                "a store keeps rows in these types, and ranks share a whole graph without a store",
                "leave it out, or choose mode=minibatch",
            )

    def _check_kinds(self) -> None:
        """Check that model, sampler and mode are for graphs of the data set's kind."""
        if self.mode == "fullgraph" and self.trainer.cuda_graphs is True:
            raise ConfigError(
                "mode=fullgraph trainer.cuda_graphs=true",
                "a step is a whole epoch, which the host queues long before the GPU is done",
                "leave trainer.cuda_graphs out, which is for mini-batches",
            )
        model, data = self.model.name, self.data.name
        if self.model.inputs == "learned" and self.trainer.cuda_graphs is True:
            raise ConfigError(
                "model.inputs=learned trainer.cuda_graphs=true",
                "ranks look up and train learned rows together at every step",
                "leave one of them out",
            )
        action = f"model.name={model} data.name={data}"
        if data not in HETEROGENEOUS:
            if model == "rgat":
                raise ConfigError(
                    action,
                    "the model is for graphs of several relations, and this graph has one",
                    f"choose model=gat, or data={' or data='.join(HETEROGENEOUS)}",
                )
            if any(isinstance(fanout, Mapping) for fanout in self.sampler.fanouts):
                raise ConfigError(
                    f"data.name={data} sampler.fanouts={self.sampler.fanouts}",
                    "the fanouts are by edge type, and this graph has only one",
                    "give each layer a number",
                )
            return
        several = "the graph has several types of nodes or edges"
        if model not in HETERO_MODELS:
            raise ConfigError(
                action,
                f"{several}, and the model knows one of each",
                f"choose model={' or model='.join(HETERO_MODELS)}",
            )

    def _check_task(self) -> None:
        """Check that what is to be learned can be, on this graph and by this model."""
        if self.task != "link_prediction":
            return
        links, data = self.links, self.data.name
        for is_wrong, action, problem, fix in (
            (
                links.valid == 0 or links.test == 0 or links.valid + links.test >= 1,
                f"links.valid={links.valid} links.test={links.test}",
                "one of the shares of edges is 0, or they leave none to train on",
                "use shares above 0 that add up to less than 1",
            ),
            (
                self.trainer.cuda_graphs is True,
                "trainer.cuda_graphs=true",
                "only steps that classify nodes can be captured",
                "leave trainer.cuda_graphs out",
            ),
            (
                self.model.name == "pinsage",
                "model.name=pinsage",
                "its random walks use the edges that a mini-batch is to predict",
                "choose another model",
            ),
            (
                data in HETEROGENEOUS,
                f"data.name={data}",
                "the graph has several types of nodes or edges, and links are of one",
                "choose data of one type; how-to 'Link prediction' has scripts for several",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"task={self.task} {action}", problem, fix)

    def _check_used(self) -> None:
        """Check that no option is set that the run does not use."""
        for section, options, defaults, is_done in (
            ("links", self.links, LinksConfig(), "task=link_prediction"),
            ("fullgraph", self.fullgraph, FullGraphConfig(), "mode=fullgraph"),
        ):
            values, default_values = asdict(options), asdict(defaults)
            given = [
                f"{section}.{key}={values[key]}"
                for key in values
                if values[key] != default_values[key]
            ]
            if given and is_done not in (f"mode={self.mode}", f"task={self.task}"):
                raise ConfigError(
                    " ".join(given),
                    f"only runs of {is_done} use this",
                    f"add {is_done}, or leave them out",
                )


def _is_fanout(given: Any) -> bool:
    if isinstance(given, Mapping):
        return bool(given) and all(type(n) is int and n >= -1 for n in given.values())
    return type(given) is int and (given == -1 or given > 0)


def to_config(raw: Any) -> Config:
    """Merge a composed configuration into its schema and check its values. Raises ConfigError."""
    config = _of_schema(raw)
    config.check()
    return config


def to_data_config(raw: Any) -> DataConfig:
    """The data set of a composed configuration, whatever takes it. Raises ConfigError."""
    return _of_schema(raw).data


def _of_schema(raw: Any) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config: Any
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), raw))
    except (OmegaConfBaseException, OverflowError, RecursionError) as error:
        key = getattr(error, "full_key", None)
        message, fix = str(error).splitlines()[0], "give it a value of its type"
        if "is not a ListConfig" in message:
            message, fix = (
                "it is a list, and this is a single value",
                "give it a list, like [10,10]",
            )
        raise ConfigError(
            f"set {key}" if key else "read the configuration", message, fix
        ) from error
    return config


def config_of_run(saved: Any) -> Config:
    """The configuration that a run has kept, which may be someone else's: plain values alone.

    Nothing is looked up for it, as OmegaConf would for ``${oc.env:HOME}``, and no key names code.
    Raises ConfigError.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(
            "read the configuration", f"it is {saved!r:.100}", "name a run of dgl-mgpu train"
        )
    for key, value in flat(saved).items():
        if "${" in json.dumps(value):
            raise ConfigError(
                f"set {key}",
                f"a run has kept {value!r} for it, which is to be looked up",
                "say its value on the command line of a new run",
            )
    return to_config(saved)


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
