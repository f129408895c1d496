"""Checks that all ranks of a machine ask for the same store, by short descriptions of it."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from dgl import DGLGraph
from dgl.frame import Frame

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.store_options import StoreOptions, parse_bytes
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.errors import ConfigError, DGLMGPUError, InvalidInputError
from dgl_mgpu.machine import Topology
from dgl_mgpu.store.content import Content, Embeddings, read_dataset, read_graph, require_storable
from dgl_mgpu.store.embedding.tables import EmbeddingSpec
from dgl_mgpu.store.graph_structure import Nodes
from dgl_mgpu.store.graphbolt import NodeFeatures, read_graphbolt
from dgl_mgpu.store.memory import TopologySource
from dgl_mgpu.utils.types import CanonicalEtype

#: Values to be compared, by what they describe.
Facts = dict[str, str]

_ACTION = "build a store"
_SAME_DATA = "pass the same on every rank, or None on all but the machine's first"


@dataclass(frozen=True)
class StoreInput:
    """A graph or data set that a rank passes for a store."""

    read: Callable[[], Content]  # as tables
    facts: Callable[[], Facts]  # what can be compared without reading the edges
    edges: Callable[[], Facts]  # checksums of all edges in their order

    @classmethod
    def from_graph(cls, g: DGLGraph, seeds: Nodes | None) -> StoreInput:
        """A DGLGraph; reading it raises InvalidInputError if a store cannot take it."""
        return cls(
            partial(read_graph, g, seeds), partial(graph_facts, g), partial(_edges_of_graph, g)
        )

    @classmethod
    def from_dataset(cls, dataset: Dataset | HeteroDataset) -> StoreInput:
        """A data set; reading it raises InvalidInputError if it is not one."""
        read = partial(read_dataset, dataset)
        return cls(read, lambda: _facts_of(read()), lambda: _edges_of(read()))

    @classmethod
    def from_graphbolt(cls, graph: Any, features: NodeFeatures, seeds: Nodes | None) -> StoreInput:
        """A graph of GraphBolt's; reading it raises InvalidInputError if a store cannot take it."""
        read = functools.cache(partial(read_graphbolt, graph, features, seeds))
        return cls(read, lambda: _facts_of(read()), lambda: _edges_of(read()))


def require_agreement(
    ranks: Communicator,
    data: StoreInput | None,
    embeddings: Embeddings | None,
    options: StoreOptions,
    topology: Topology | str,
    seed: int,
    edges: bool,
) -> None:
    """Check that all ranks of a machine ask for the same store.  Collective.

    All ranks raise InvalidInputError if the first passes no data, or another other data or
    embeddings, and ConfigError if their options differ.  If one passes what no store takes, the
    others raise RankFailedError.
    """

    def described() -> tuple[Facts, Facts | None, Facts | None]:
        passed = {**_option_facts(options, topology), "seed": str(seed), "edges": str(bool(edges))}
        specs = None if embeddings is None else dict(_embedding_facts(embeddings))
        return passed, None if data is None else data.facts(), specs

    option_facts, facts, embedding_facts = zip(
        *ranks.all_gather(ranks.run_all(_ACTION, described)), strict=True
    )
    require_same(_ACTION, option_facts, "pass the same on every rank", ConfigError)
    if facts[0] is None:
        raise InvalidInputError(
            _ACTION, "the machine's first rank passed no graph", "pass the graph on that rank"
        )
    require_same(_ACTION, facts, _SAME_DATA)
    require_same(_ACTION, embedding_facts, _SAME_DATA)
    if any(other is not None for other in facts[1:]):
        checksums = ranks.run_all(_ACTION, lambda: None if data is None else data.edges())
        require_same(_ACTION, ranks.all_gather(checksums), _SAME_DATA)


def job_facts(
    options: StoreOptions, embeddings: Embeddings | None, seed: int, edges: bool
) -> Facts:
    """Facts of a store that spans machines which all of them have to be asked for alike.

    They may differ in their memory and GPUs.
    """
    facts = _option_facts(options, "")
    alike = "span", "replica_ratio", "hotness", "feature_dtypes"
    return {
        **{name: facts[name] for name in alike},
        **dict(_embedding_facts(embeddings or {})),
        "seed": str(seed),
        "edges": str(bool(edges)),
    }


def require_same(
    action: str,
    facts: Sequence[Mapping[str, str] | None],
    fix: str,
    error: type[DGLMGPUError] = InvalidInputError,
) -> None:
    """Raise ``error`` unless the facts of all ranks that have some are those of the first rank."""
    first = facts[0] or {}
    for rank, other in enumerate(facts):
        for name in {**first, **other} if other is not None else ():
            expected, actual = first.get(name, "missing"), (other or {}).get(name, "missing")
            if expected != actual:
                raise error(
                    action,
                    f"{name} is {expected} on the machine's first rank, but {actual} on rank "
                    f"{rank} of it",
                    fix,
                )


def frames(g: DGLGraph) -> Iterator[tuple[str | CanonicalEtype, Frame]]:
    """The frames of features of each node type and edge type."""
    yield from zip(g.ntypes, g._node_frames, strict=True)
    yield from zip(g.canonical_etypes, g._edge_frames, strict=True)


def graph_facts(g: DGLGraph) -> Facts:
    """Facts of a graph without its edges, or InvalidInputError if a store cannot take it."""
    require_storable(g)
    facts = {"the dtype of ids": str(g.idtype)}
    for ntype in g.ntypes:
        facts[f"nodes of type '{ntype}'"] = f"{g.num_nodes(ntype):,}"
    for etype in g.canonical_etypes:
        facts[f"edges of type {etype}"] = f"{g.num_edges(etype):,}"
    for of, frame in frames(g):
        for name, column in frame._columns.items():
            facts[f"feature '{name}' of {of!r}"] = (
                f"{column.scheme.dtype} of shape {(len(column), *column.scheme.shape)}"
            )
    return facts


def _edges_of_graph(g: DGLGraph) -> Facts:
    return {
        f"ends of edges of type {etype}": _checksum(
            *(ends.numpy() for ends in g.edges(etype=etype, order="eid"))
        )
        for etype in g.canonical_etypes
    }


def _facts_of(data: Content) -> Facts:
    facts = {f"nodes of type '{ntype}'": f"{n:,}" for ntype, n in data.schema.num_nodes.items()}
    for name, source in data.sources.items():
        if isinstance(source, TopologySource):
            facts[f"edges of {name}"] = f"{source.num_edges:,} with ids of {source.idtype}"
        else:
            shape = tuple(source.rows.shape)
            facts[f"rows of {name}"] = f"{source.source_dtype} of shape {shape}"
    return facts


def _edges_of(data: Content) -> Facts:
    return {
        f"ends of edges of {name}": _checksum(source.indptr, source.indices, source.eids)
        for name, source in data.sources.items()
        if isinstance(source, TopologySource)
    }


def _checksum(*arrays: np.ndarray | None) -> str:
    """A checksum of arrays in their order."""
    checksum = 0
    for array in arrays:
        if array is not None:
            checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"checksum {checksum:08x}"


def _option_facts(options: StoreOptions, topology: Topology | str) -> Facts:
    facts = {option.name: _as_text(getattr(options, option.name)) for option in fields(options)}
    for name in ("gpu_memory", "host_memory", "staging_memory"):
        facts[name] = str(parse_bytes(getattr(options, name), f"store.{name}") or "auto")
    if isinstance(topology, Topology):
        topology = json.dumps(topology.to_dict())
    return {**facts, "topology": str(topology)}


def _as_text(value: Any) -> str:
    """An option's value: the same for a list and a tuple, a path and its name, a dtype and its."""
    if isinstance(value, Mapping):
        return str({str(name): _as_text(item) for name, item in sorted(value.items(), key=str)})
    if isinstance(value, Sequence) and not isinstance(value, str):
        return str([_as_text(item) for item in value])
    return str(value).removeprefix("torch.")


def _embedding_facts(embeddings: Embeddings, of: str = "") -> Iterator[tuple[str, str]]:
    # read_specs raises if it is not a mapping.
    for name, value in embeddings.items() if isinstance(embeddings, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _embedding_facts(value, f"{name}.")
            continue
        spec = EmbeddingSpec(value) if isinstance(value, int) else value
        text = str(spec)
        if isinstance(spec, EmbeddingSpec) and isinstance(spec.init, torch.Tensor | np.ndarray):
            text = f"{spec.dim} numbers for {spec.optimizer}, begun with given rows"
        yield f"embedding '{of}{name}'", text
