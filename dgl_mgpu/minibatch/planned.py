"""Plans for a configuration whose data need not be built, on a machine that need not be there."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from dgl_mgpu.backend.global_store.content import Content, Schema, with_narrow_features
from dgl_mgpu.backend.global_store.embedding.tables import (
    STATES,
    Specs,
    read_specs,
    require_in_memory,
)
from dgl_mgpu.backend.global_store.store import machine, sources_of
from dgl_mgpu.backend.global_store.tables import node_table
from dgl_mgpu.data import HETEROGENEOUS
from dgl_mgpu.data.blockmodel import in_degrees
from dgl_mgpu.data.generate import GraphSpec, named_spec
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.minibatch.load import load
from dgl_mgpu.minibatch.task import LEARNED, ONE_NTYPE
from dgl_mgpu.placement import Degrees, Plan, TableSpec
from dgl_mgpu.store import FeatureSource
from dgl_mgpu.store.planning import StoreOptions, make_blueprint, plan_tables
from dgl_mgpu.topology import Topology, preset, probe, probe_shared_memory
from dgl_mgpu.topology.shared_memory import SharedMemory
from dgl_mgpu.training.config import Config
from dgl_mgpu.training.models import INV_SQRT_DEGREES


def plan_for(config: Config) -> Plan:
    """Solve the placement of a configuration's topology and features.

    A generated graph is not generated for it: its degrees are drawn, the rest is arithmetic.
    The machine is a preset (used whole when ``trainer.ranks`` is 1), or this one with its GPUs.
    Unless ``store.device`` is 'cpu', GPUs hold the store, and what it has there beside its tables
    counts as :class:`~dgl_mgpu.store.planning.StoreOptions` says.

    Raises
    ------
    ConfigError
        If a generated graph is to be ordered by counts, for which it would have to be there; if
        learned rows would go to disk; or if a whole graph is trained on, which no store keeps.
    DGLMGPUError
        As :func:`dgl_mgpu.minibatch.run.train`.
    """
    if config.mode == "fullgraph":
        raise ConfigError(
            "plan with mode=fullgraph",
            "ranks share a whole graph by nodes, and no store keeps it",
            "leave mode out, for the plan of a mini-batch run's store",
        )
    options = StoreOptions(
        batch_size=config.planned_seeds(),
        fanouts=config.sampler.planned_fanouts(),
        **dataclasses.asdict(config.store),
    )
    topology = _topology(config)
    on_gpus = options.device != "cpu" and topology.name != "cpu"
    # A machine known by name, or this one.
    memory = topology.host_memory
    shared = None if on_gpus else SharedMemory(memory, memory)
    if not on_gpus and config.topology == "auto":
        shared = SharedMemory.of_this_machine()
    data = config.data
    if data.name in HETEROGENEOUS or not data.name.startswith("generated"):
        dataset, task = load(config)
        embeddings = task.embeddings
        tables = sources_of(dataset, options, config.trainer.seed, embeddings)
        plan = make_blueprint(*tables, topology, options, on_gpus=on_gpus, shared=shared).plan
        require_in_memory(plan, read_specs(embeddings, list(embeddings)))
        return plan
    if options.hotness != "degree":
        raise ConfigError(
            f"plan for data.name={data.name} with store.hotness={options.hotness}",
            "counts, and a graph that is not generated for a plan",
            "use store.hotness=degree, or look at the plan of a store that is built (store.plan)",
        )
    graph = named_spec(data.name, **data.options)
    indptr = in_degrees(graph.num_nodes, graph.num_edges, graph.exponent, graph.seed)
    # The graph's out-degrees, which sampling reads nodes in proportion to, follow the law of
    # its in-degrees and are large at the same nodes.
    hot = np.sort(np.diff(indptr))[::-1]
    reads = options.reads({ONE_NTYPE: hot}, [Degrees(ONE_NTYPE, hot)])
    id_bytes = 4 if len(hot) <= np.iinfo(np.int32).max else 8
    learned: Specs = {}
    name, width = "features", graph.num_features
    narrow = options.narrow_features()
    with_narrow_features(_content(config, graph), narrow)  # raises, as a run would
    dtype = narrow.get("feat", torch.float32)
    if config.model.inputs == "learned":
        # Rows and their optimizer's state lie side by side.
        learned = read_specs({LEARNED: config.model.hidden}, [ONE_NTYPE])
        name = node_table(ONE_NTYPE, LEARNED)
        width = config.model.hidden * (1 + len(STATES["adam"]))
    specs = [
        TableSpec.topology(
            "topology", hot, reads.sampled[ONE_NTYPE], fanout=reads.fanout, id_bytes=id_bytes
        ),
        TableSpec.features(name, len(hot), width * dtype.itemsize, reads.nodes[ONE_NTYPE]),
    ]  # fmt: skip
    plan = plan_tables(specs, topology, options, [len(hot)], on_gpus=on_gpus, shared=shared)
    require_in_memory(plan, learned)
    return plan


def _content(config: Config, graph: GraphSpec) -> Content:
    """What nodes of a generated graph have in a run's store, with zeros that take no memory."""
    rows = {"label": np.broadcast_to(np.int64(0), graph.num_nodes)}
    if config.model.inputs != "learned":
        rows["feat"] = np.broadcast_to(np.float32(0), (graph.num_nodes, graph.num_features))
    if config.model.name == "gcn":
        rows[INV_SQRT_DEGREES] = np.broadcast_to(np.float32(0), (graph.num_nodes, 2))
    sources = {node_table(ONE_NTYPE, name): FeatureSource(each) for name, each in rows.items()}
    return Content(Schema({ONE_NTYPE: graph.num_nodes}, []), {**sources}, torch.empty(0))


def _topology(config: Config) -> Topology:
    if config.topology == "auto":
        found = probe_shared_memory if config.store.device == "cpu" else probe
        return found(config.trainer.ranks)
    if config.trainer.ranks == 1:
        return preset(config.topology)
    return machine(config.topology, config.trainer.ranks)
