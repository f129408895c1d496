"""What the ranks that build one store pass, in few words that can be compared."""

from __future__ import annotations

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
from dgl_mgpu.store.content import Content, Embeddings, of_dataset, of_dgl, require_storable
from dgl_mgpu.store.embedding.tables import EmbeddingSpec
from dgl_mgpu.store.memory import TopologySource
from dgl_mgpu.store.table_names import CanonicalEtype, Nodes

#: By what they are of.
Facts = dict[str, str]

_ASKED = "build a store"
_SAME_DATA = "pass the same on every rank, or None on all but the machine's first"


@dataclass(frozen=True)
class Data:
    """What a store is to hold, as a rank passes it.

    Attributes
    ----------
    read : callable
        Gives it as tables.
    facts : callable
        What is quickly said of it.
    edges : callable
        What differs where edges or their order do; reads all of them.
    """

    read: Callable[[], Content]
    facts: Callable[[], Facts]
    edges: Callable[[], Facts]

    @classmethod
    def of_graph(cls, g: DGLGraph, seeds: Nodes | None) -> Data:
        """A DGLGraph; on asking, InvalidInputError if it is none that a store takes."""
        return cls(partial(of_dgl, g, seeds), partial(graph_facts, g), partial(_edges_of_graph, g))

    @classmethod
    def of_dataset(cls, dataset: Dataset | HeteroDataset) -> Data:
        """A data set; on asking, InvalidInputError if it is none."""
        read = partial(of_dataset, dataset)
        return cls(read, lambda: _facts_of(read()), lambda: _edges_of(read()))


def require_agreement(
    ranks: Communicator,
    data: Data | None,
    embeddings: Embeddings | None,
    options: StoreOptions,
    topology: Topology | str,
    seed: int,
    edges: bool,
) -> None:
    """Check that all ranks of a machine ask for the same store.  Collective.

    Raises
    ------
    InvalidInputError
        On all ranks, if the first passes no data, or another other data or embeddings.
    ConfigError
        On all ranks, if their options differ.
    RankFailedError
        On the other ranks, if one passes what no store takes.
    """

    def told() -> tuple[Facts, Facts | None, Facts | None]:
        asked = {**_option_facts(options, topology), "seed": str(seed), "edges": str(bool(edges))}
        learned = None if embeddings is None else dict(_embedding_facts(embeddings))
        return asked, None if data is None else data.facts(), learned

    asked, facts, learned = zip(*ranks.all_gather(ranks.run_all(_ASKED, told)), strict=True)
    require_same(_ASKED, asked, "pass the same on every rank", ConfigError)
    if facts[0] is None:
        raise InvalidInputError(
            _ASKED, "the machine's first rank passed no graph", "pass the graph on that rank"
        )
    require_same(_ASKED, facts, _SAME_DATA)
    require_same(_ASKED, learned, _SAME_DATA)
    if any(each is not None for each in facts[1:]):
        mine = ranks.run_all(_ASKED, lambda: None if data is None else data.edges())
        require_same(_ASKED, ranks.all_gather(mine), _SAME_DATA)


def require_same(
    asked: str,
    told: Sequence[Mapping[str, str] | None],
    fix: str,
    error: type[DGLMGPUError] = InvalidInputError,
) -> None:
    """Raise ``error`` unless all ranks, of those that tell anything, tell what the first does."""
    first = told[0] or {}
    for rank, other in enumerate(told):
        for what in {**first, **other} if other is not None else ():
            mine, its = first.get(what, "missing"), (other or {}).get(what, "missing")
            if mine != its:
                raise error(
                    asked,
                    f"{what} is {mine} on the machine's first rank, but {its} on rank {rank} of it",
                    fix,
                )


def frames(g: DGLGraph) -> Iterator[tuple[str | CanonicalEtype, Frame]]:
    """What holds the features of each node type, and of each edge type."""
    yield from zip(g.ntypes, g._node_frames, strict=True)
    yield from zip(g.canonical_etypes, g._edge_frames, strict=True)


def graph_facts(g: DGLGraph) -> Facts:
    """What is quickly said of a graph, or InvalidInputError if it is none that a store takes."""
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
        f"ends of edges of type {etype}": _mark(
            *(ends.numpy() for ends in g.edges(etype=etype, order="eid"))
        )
        for etype in g.canonical_etypes
    }


def _facts_of(data: Content) -> Facts:
    facts = {f"nodes of type '{ntype}'": f"{n:,}" for ntype, n in data.schema.num_nodes.items()}
    for name, source in data.sources.items():
        if isinstance(source, TopologySource):
            facts[f"edges of {name}"] = f"{len(source.indices):,} with ids of {source.idtype}"
        else:
            rows = source.rows
            facts[f"rows of {name}"] = f"{source.given} of shape {tuple(rows.shape)}"
    return facts


def _edges_of(data: Content) -> Facts:
    return {
        f"ends of edges of {name}": _mark(source.indptr, source.indices, source.eids)
        for name, source in data.sources.items()
        if isinstance(source, TopologySource)
    }


def _mark(*arrays: np.ndarray | None) -> str:
    """What differs where numbers or their order do."""
    mark = 0
    for array in arrays:
        if array is not None:
            mark = zlib.crc32(np.ascontiguousarray(array).data, mark)
    return f"checksum {mark:08x}"


def _option_facts(options: StoreOptions, topology: Topology | str) -> Facts:
    facts = {each.name: _said(getattr(options, each.name)) for each in fields(options)}
    for name in ("gpu_memory", "host_memory", "staging_memory"):
        facts[name] = str(parse_bytes(getattr(options, name), f"store.{name}") or "auto")
    if isinstance(topology, Topology):
        topology = json.dumps(topology.to_dict())
    return {**facts, "topology": str(topology)}


def _said(value: Any) -> str:
    """An option's value: the same for a list and a tuple, a path and its name, a dtype and its."""
    if isinstance(value, Mapping):
        return str({str(name): _said(each) for name, each in sorted(value.items(), key=str)})
    if isinstance(value, Sequence) and not isinstance(value, str):
        return str([_said(each) for each in value])
    return str(value).removeprefix("torch.")


def _embedding_facts(embeddings: Embeddings, of: str = "") -> Iterator[tuple[str, str]]:
    # What is no mapping is told where it is read.
    for name, given in embeddings.items() if isinstance(embeddings, Mapping) else ():
        if isinstance(given, Mapping):
            yield from _embedding_facts(given, f"{name}.")
            continue
        spec = EmbeddingSpec(given) if isinstance(given, int) else given
        told = str(spec)
        if isinstance(spec, EmbeddingSpec) and isinstance(spec.init, torch.Tensor | np.ndarray):
            told = f"{spec.dim} numbers for {spec.optimizer}, begun with given rows"
        yield f"embedding '{of}{name}'", told
