"""A part of a graph, read from the files of ``dgl.distributed.partition_graph``.

DGL numbers the nodes of all types together, part by part and in a part type by type, and edges
likewise; a part's graph has nodes and edges of one type alone, with numbers of its own.  Here ids
are those of a type.  Files are mapped: of edges only an order is in memory, four bytes each, and
that only where the files have them in another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import dgl
import numpy as np

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.host.files import MappedGraph, map_graph, map_tensors
from dgl_mgpu.utils.types import CanonicalEtype

T = TypeVar("T")

ACTION = "read a partition of DGL's"
#: Edges looked at together.
_CHUNK = 1 << 20


class Rows(Protocol):
    """Rows that an integer array selects."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, places: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class TypeIds:
    """Ids of the nodes or edges of a type, part by part.

    Those of part ``p`` are ``bounds[p]`` and following, up to ``bounds[p + 1]``; among the ids of
    all types together they begin at ``starts[p]``.
    """

    starts: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> TypeIds:
        """Of a type's first id in each part and the end, among the ids of all types."""
        starts, stops = np.array(runs, np.int64).reshape(-1, 2).T
        return cls(starts, np.concatenate([[0], np.cumsum(stops - starts)]))

    def of_type(self, ids: np.ndarray) -> np.ndarray:
        """Ids of the type for ids among all types."""
        shifts = self.bounds[:-1] - self.starts
        if not shifts.any():
            return ids
        return ids + shifts[np.searchsorted(self.starts, ids, side="right") - 1]


class _FileEdges:
    """The edges of a part's graph in the order of its file, by its own ids."""

    def __init__(self, graph: MappedGraph) -> None:
        name = next(name for name in ("coo", "csc", "csr") if name in graph.matrices)
        first, second, self._eids = graph.matrices[name]
        self._indptr = None if name == "coo" else first
        others = first if name == "coo" else second
        #: The ends that the file lists edge by edge, and those that it groups them by.
        self._listed, self._grouped = others, second
        self._by_source = name == "csr"
        self.count = len(others)

    @property
    def come_by_id(self) -> bool:
        """Whether edges come in the order of their ids."""
        return not len(self._eids)

    def ids(self, places: np.ndarray) -> np.ndarray:
        return self._eids[places] if len(self._eids) else places

    def sources(self, places: np.ndarray) -> np.ndarray:
        return self._group(places) if self._by_source else self._listed[places]

    def destinations(self, places: np.ndarray) -> np.ndarray:
        if self._by_source:
            return self._listed[places]
        return self._grouped[places] if self._indptr is None else self._group(places)

    def _group(self, places: np.ndarray) -> np.ndarray:
        assert self._indptr is not None
        return np.searchsorted(self._indptr, places, side="right") - 1


@dataclass(frozen=True)
class _Column:
    """An id of each of a part's edges of a type, node by node, looked up in the files."""

    edges: _FileEdges
    #: Where the file has each edge, or ``first`` and following.
    order: np.ndarray | None
    first: int
    #: Of all nodes or edges, the ids among those of all types, and which type they are of.
    numbers: np.ndarray
    ids: TypeIds
    is_source: bool
    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        in_file = places + self.first if self.order is None else self.order[places]
        look_up = self.edges.sources if self.is_source else self.edges.ids
        return self.ids.of_type(self.numbers[look_up(in_file)]).astype(self.dtype, copy=False)


@dataclass(frozen=True)
class PartEdges:
    """A part's own edges of a type: the in-edges of its nodes, node by node.

    Attributes
    ----------
    degrees : ndarray of int64, shape (num_own,)
        In-edges of each node.
    sources, eids : Rows of int, shape (num_edges,)
        Source and id of each.
    num_sources, first_eid : int
        Nodes of the sources' type in all parts, and edges in the parts before this one.
    """

    degrees: np.ndarray
    sources: Rows
    eids: Rows
    num_sources: int
    first_eid: int

    def chunks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Places of edges, some at a time, with their sources and ids; or InvalidInputError."""
        for places in _runs(self.sources.shape[0], size):
            try:
                sources, eids = self.sources[places], self.eids[places]
            except IndexError as error:
                raise _unlike(f"an edge has an end that is not there ({error})") from error
            if not 0 <= sources.min() <= sources.max() < self.num_sources:
                raise _unlike(f"there is an edge from node {sources.max()}")
            yield places, sources, eids

    def summary(self) -> EdgeSummary:
        """What is to be known of all edges, or InvalidInputError."""
        reads = np.zeros(self.num_sources, np.int64)
        lowest, highest, in_order = self.num_sources, -1, True
        for places, sources, eids in self.chunks(max(_CHUNK, self.num_sources)):
            lowest, highest = min(lowest, int(sources.min())), max(highest, int(sources.max()))
            reads += np.bincount(sources, minlength=self.num_sources)
            in_order &= np.array_equal(eids, places + self.first_eid)
        return EdgeSummary(reads, lowest, highest, in_order)


class EdgeSummary(NamedTuple):
    """Of a part's own edges of a type: how often each node of all parts is their source, the least
    and greatest of the sources, and whether edges' ids are their places, part by part."""

    out_degrees: np.ndarray
    lowest: int
    highest: int
    in_order: bool


@dataclass(frozen=True)
class Part:
    """What a machine has of a graph.

    Attributes
    ----------
    number : int
        Of the part.
    nodes : dict of str to TypeIds
    edges : dict of (str, str, str) to TypeIds
    in_edges : dict of (str, str, str) to PartEdges
    features : dict of str to dict of str to ndarray, shape (num_own, ...)
        Of own nodes, by type and name.
    edge_features : dict of (str, str, str) to dict of str to ndarray, shape (num_own, ...)
        The same of own edges, in the order of their ids.
    """

    number: int
    nodes: dict[str, TypeIds]
    edges: dict[CanonicalEtype, TypeIds]
    in_edges: dict[CanonicalEtype, PartEdges]
    features: dict[str, dict[str, np.ndarray]]
    edge_features: dict[CanonicalEtype, dict[str, np.ndarray]]


def read_part(path: Path, number: int, num_readers: int, readers: str = "machines") -> Part:
    """Read one part of those that a JSON file of DGL's names.

    Raises
    ------
    InvalidInputError
        If the files cannot be read or do not belong together, or there are more or fewer parts
        than ``readers``.
    """
    try:
        metadata = json.loads(path.read_text())
        num_parts = metadata["num_parts"]
        nodes = {name: TypeIds.of(metadata["node_map"][name]) for name in _types(metadata, "n")}
        edges = {
            _canonical(name): TypeIds.of(metadata["edge_map"][name])
            for name in _types(metadata, "e")
        }
        of_part = metadata[f"part-{number}"] if number < num_parts else {}
        files = {kind: str(path.parent / name) for kind, name in of_part.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidInputError(
            ACTION,
            f"{path} cannot be read ({error!r})",
            "name the JSON file that dgl.distributed.partition_graph wrote",
        ) from error
    if num_parts != num_readers:
        raise InvalidInputError(
            ACTION,
            f"the number of parts is {num_parts}, and that of {readers} {num_readers}",
            f"start as many {readers} as there are parts, or write a part for each of them "
            f"(dgl-mgpu partition parts={num_readers})",
        )
    if not (_follow(list(nodes.values()), num_parts) and _follow(list(edges.values()), num_parts)):
        raise _unlike(f"the runs of ids in {path} do not follow each other, part by part")
    try:
        features = _read_features(files["node_feats"], number, nodes, str)
        edge_features = _read_features(files["edge_feats"], number, edges, _canonical)
        graph = map_graph(files["part_graph"])
        in_edges = _read_edges(graph, number, nodes, edges)
    except (IndexError, KeyError) as error:
        raise _unlike(f"part {number} lacks something ({error!r})") from error
    return Part(number, nodes, edges, in_edges, features, edge_features)


def _read_features(
    file: str, number: int, types: Mapping[T, TypeIds], type_of: Callable[[str], T]
) -> dict[T, dict[str, np.ndarray]]:
    """Rows of a part's own nodes or edges, by type and name."""
    features: dict[T, dict[str, np.ndarray]] = {of: {} for of in types}
    for full_name, rows in map_tensors(file).items():
        label, _, name = full_name.rpartition("/")
        of = type_of(label) if label else next(iter(types))
        first, stop = types[of].bounds[number : number + 2].tolist()
        if len(rows) != stop - first:
            raise _unlike(f"'{name}' has {len(rows):,} rows for {stop - first:,} of type {of}")
        features[of][name] = rows
    return features


def facts_of(part: Part) -> dict[str, str]:
    """What all who read parts of one graph find alike."""
    facts = {}
    for ntype, ids in part.nodes.items():
        facts[f"the parts' nodes of type '{ntype}'"] = str(ids.bounds.tolist())
    for etype, ids in part.edges.items():
        facts[f"the parts' edges of type {etype}"] = str(ids.bounds.tolist())
    of_types = {str(of): rows for of, rows in part.features.items()}
    of_types |= {str(of): rows for of, rows in part.edge_features.items()}
    for of, features in of_types.items():
        for name, rows in features.items():
            facts[f"rows of '{name}' of type '{of}'"] = f"{rows.dtype} of shape {rows.shape[1:]}"
    return facts


def _types(metadata: Mapping[str, Any], kind: str) -> list[str]:
    """Names of the types of nodes, "n", or edges, "e", by their numbers."""
    numbers = metadata[f"{kind}types"]
    return sorted(numbers, key=lambda name: numbers[name])


def _canonical(name: str) -> CanonicalEtype:
    source, etype, destination = name.split(":")
    return source, etype, destination


def _follow(types: Sequence[TypeIds], num_parts: int) -> bool:
    """Whether runs of ids follow each other, part by part and in a part type by type."""
    if any(len(ids.starts) != num_parts for ids in types):
        return False
    starts = np.array([ids.starts for ids in types], np.int64).T.ravel()
    counts = np.array([np.diff(ids.bounds) for ids in types], np.int64).T.ravel()
    return bool((counts >= 0).all() and (starts == np.cumsum(counts) - counts).all())


def _unlike(found: str) -> InvalidInputError:
    return InvalidInputError(ACTION, found, "partition the graph anew")


def _read_edges(
    graph: MappedGraph,
    number: int,
    nodes: dict[str, TypeIds],
    edges: dict[CanonicalEtype, TypeIds],
) -> dict[CanonicalEtype, PartEdges]:
    """The in-edges of own nodes."""
    of_file, node_ids, edge_ids = _FileEdges(graph), graph.ndata[dgl.NID], graph.edata[dgl.EID]
    degrees, order, first = _group_by_node(graph, of_file, number, nodes, list(edges))
    in_edges, begin = {}, 0
    for etype, ids in edges.items():
        count = int(degrees[etype].sum())
        if count != ids.bounds[number + 1] - ids.bounds[number]:
            raise _unlike(f"part {number} has {count:,} edges of type {etype}, which are not all")
        places = None if order is None else order[begin : begin + count]
        sources, eids = (
            _Column(
                of_file,
                places,
                first + begin,
                numbers,
                of_type,
                is_source,
                (count,),
                np.dtype(np.int32 if of_type.bounds[-1] <= np.iinfo(np.int32).max else np.int64),
            )
            for numbers, of_type, is_source in (
                (node_ids, nodes[etype[0]], True),
                (edge_ids, ids, False),
            )
        )
        begin += count
        in_edges[etype] = PartEdges(
            degrees[etype],
            sources,
            eids,
            int(nodes[etype[0]].bounds[-1]),
            int(ids.bounds[number]),
        )
    return in_edges


def _group_by_node(
    graph: MappedGraph,
    edges: _FileEdges,
    number: int,
    nodes: dict[str, TypeIds],
    etypes: list[CanonicalEtype],
) -> tuple[dict[CanonicalEtype, np.ndarray], np.ndarray | None, int]:
    """In-degrees of own nodes by edge type, and where their edges are, by type, node and id.

    That is a place for each, or None and the first, where they are in this order in the file.
    """
    starts = np.array([nodes[etype[2]].starts[number] for etype in etypes])
    counts = np.array([np.diff(nodes[etype[2]].bounds)[number] for etype in etypes])
    begins = np.cumsum(counts) - counts  # of each type, among all pairs of a type and a node
    own = min(ids.starts[number] for ids in nodes.values())
    own_stop = own + sum(np.diff(ids.bounds)[number] for ids in nodes.values())
    types = graph.edata.get(dgl.ETYPE) if len(etypes) > 1 else None

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Places of own edges, and the pair of type and node that each is of."""
        for places in _runs(edges.count, max(_CHUNK, int(counts.sum()))):
            destinations = graph.ndata[dgl.NID][edges.destinations(places)]
            is_own = (destinations >= own) & (destinations < own_stop)
            places, destinations = places[is_own], destinations[is_own]
            etype = 0 if types is None else types[edges.ids(places)]
            within = destinations - starts[etype]
            if ((within < 0) | (within >= counts[etype])).any():
                raise _unlike("an edge is not of the type that its ends are of")
            yield places, begins[etype] + within

    totals = np.zeros(int(counts.sum()), np.int64)
    in_order, first, last, before = edges.come_by_id, -1, -1, -1
    for places, pair in pairs():
        totals += np.bincount(pair, minlength=len(totals))
        if not len(pair):
            continue
        first = int(places[0]) if first < 0 else first
        follow = last < 0 or places[0] == last + 1
        in_order &= bool(follow and pair[0] >= before and (np.diff(pair) >= 0).all())
        in_order &= bool((np.diff(places) == 1).all())
        last, before = int(places[-1]), int(pair[-1])
    degrees = dict(zip(etypes, np.split(totals, begins[1:]), strict=True))
    if in_order:
        return degrees, None, max(first, 0)
    narrow = edges.count <= np.iinfo(np.int32).max
    order = np.empty(int(totals.sum()), np.int32 if narrow else np.int64)
    free = np.cumsum(totals) - totals
    for places, pair in pairs():
        by_pair = np.argsort(pair, kind="stable")
        pair = pair[by_pair]
        # Within a run of the same pair, edges stay as they come.
        heads = np.flatnonzero(np.diff(pair, prepend=-1))
        lengths = np.diff(heads, append=len(pair))
        within = np.arange(len(pair)) - np.repeat(heads, lengths)
        order[free[pair] + within] = places[by_pair]
        free[pair[heads]] += lengths
    if not edges.come_by_id:
        _sort_by_id(order, totals, edges)
    return degrees, order, 0


def _sort_by_id(order: np.ndarray, counts: np.ndarray, edges: _FileEdges) -> None:
    """Sort runs of places, ``counts`` of them each, by the ids of the edges there."""
    stops, run = np.cumsum(counts), 0
    while run < len(counts):
        begin = int(stops[run] - counts[run])
        stop = max(run + 1, int(np.searchsorted(stops, begin + _CHUNK, side="right")))
        places = order[begin : stops[stop - 1]]
        run_of = np.repeat(np.arange(run, stop), counts[run:stop])
        places[:] = places[np.lexsort((edges.ids(places), run_of))]
        run = stop


def _runs(count: int, size: int) -> Iterator[np.ndarray]:
    """The numbers below ``count``, some at a time."""
    for begin in range(0, count, size):
        yield np.arange(begin, min(begin + size, count))
