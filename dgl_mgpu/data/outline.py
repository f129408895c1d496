"""Data sets in outline: their sizes before there is any data, and degrees by a model.

A plan depends on the number of rows, their length and how often they are read.  Sizes are published
(`published`), or those that a generated graph will have.  Degrees follow the power law of generated
graphs (`blockmodel.in_degrees`).  Arrays of unknown content have a shape and take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dgl_mgpu.data import blockmodel, facebook, igbh, ogb, planetoid, reddit
from dgl_mgpu.data.csc import CSC, index_dtype
from dgl_mgpu.data.dataset import Dataset
from dgl_mgpu.data.generate import SHAPES, GraphSpec, named_spec
from dgl_mgpu.data.hetero import CanonicalEtype, HeteroDataset
from dgl_mgpu.data.igbh import NODE_TYPES, RELATIONS, IgbhSpec
from dgl_mgpu.data.published import PUBLISHED, PUBLISHED_HETERO, HeteroSizes, Sizes
from dgl_mgpu.utils.types import ETYPE, NTYPE

_MODELLED = (
    "degrees and how often each row is read are modelled by a power law (exponent {exponent:g}), "
    "not counted"
)


@dataclass(frozen=True)
class _Relation:
    """The number of edges of a relation, and the exponents of in- and out-degrees."""

    edges: int
    exponent: float = GraphSpec.exponent
    exponent_out: float = GraphSpec.exponent


@dataclass(frozen=True)
class Outline:
    """Sizes, degrees and shapes of a data set without its data."""

    origin: str  # of the sizes, and what is modelled, in a sentence
    _name: str
    _nodes: Mapping[str, int]
    _relations: Mapping[CanonicalEtype, _Relation]
    _features: Mapping[str, Mapping[str, np.ndarray]]  # by node type and name, without memory
    _labels: np.ndarray  # likewise
    _classes: int
    _target: str | None = None
    _edge_width: int = 0
    _seed: int = 0

    def draw(
        self, *, shuffled: bool = False
    ) -> tuple[Dataset | HeteroDataset, dict[str, np.ndarray]]:
        """The data set, with empty arrays but for degrees, and how hot its nodes are.

        Nodes come by falling degree, or ``shuffled``, and the split is empty.  The dict has by node
        type how often each node is another's neighbour, int64 (num_nodes,).
        """
        draw = np.random.default_rng(self._seed)
        places = {
            ntype: draw.permutation(count) if shuffled else slice(None)
            for ntype, count in self._nodes.items()
        }
        hotness = {ntype: np.zeros(count, np.int64) for ntype, count in self._nodes.items()}
        edges: dict[CanonicalEtype, CSC] = {}
        for (src, etype, dst), relation in self._relations.items():
            into = self._degrees(self._nodes[dst], relation.edges, relation.exponent)
            out = into
            if src != dst or relation.exponent != relation.exponent_out:
                out = self._degrees(self._nodes[src], relation.edges, relation.exponent_out)
            hotness[src] += out[places[src]]
            indptr = np.zeros(self._nodes[dst] + 1, np.int64)
            np.cumsum(into[places[dst]], out=indptr[1:])
            indices = _no_memory(relation.edges, dtype=index_dtype(self._nodes[src]))
            edges[src, etype, dst] = CSC(indptr, indices, None)
        shared: dict[str, Any] = {
            "name": self._name,
            "num_classes": self._classes,
            "labels": self._labels,
            **dict.fromkeys(("train", "valid", "test"), np.empty(0, np.int64)),
            "description": self.origin,
            "checked": True,
        }
        if self._target is not None:
            return HeteroDataset(
                num_nodes=self._nodes, edges=edges, target=self._target,
                node_features=self._features, **shared,
            ), hotness  # fmt: skip
        (csc,) = edges.values()
        if self._edge_width:
            num_edges = len(csc.indices)
            rows = _no_memory(num_edges, self._edge_width, dtype=np.float32)
            eids = _no_memory(num_edges, dtype=np.int64)
            shared |= {"edge_features": {"feat": rows}, "eids": eids}
        return Dataset(
            num_nodes=self._nodes[NTYPE], indptr=csc.indptr, indices=csc.indices,
            node_features=self._features[NTYPE], **shared,
        ), hotness  # fmt: skip

    def _degrees(self, num_nodes: int, num_edges: int, exponent: float) -> np.ndarray:
        """Falling degrees, int64, shape (num_nodes,)."""
        indptr = blockmodel.in_degrees(num_nodes, num_edges, exponent, self._seed)
        return np.sort(np.diff(indptr))[::-1]


def data_folder(name: str, root: str | Path) -> Path | None:
    """The folder of a real data set's files; None where they would be downloaded."""
    root = Path(root).expanduser()
    if name in PUBLISHED_HETERO or name.startswith("ogbn-"):
        return ogb.find_folder(name, root)
    module = {"reddit": reddit, "facebook": facebook}.get(name, planetoid)
    return module.find_folder(name, root)


def outline(name: str, options: Mapping[str, Any]) -> Outline | None:
    """A data set in outline, given the options of its loader; None if its sizes are not known."""
    if name in PUBLISHED:
        return _published(name, PUBLISHED[name], options)
    if name in PUBLISHED_HETERO:
        return _published_hetero(name, PUBLISHED_HETERO[name], options)
    if name == igbh.NAME:
        return _igbh(igbh.named_spec(**options))
    if name == "generated" or name.removeprefix("generated-") in SHAPES:
        return _generated(name, named_spec(name, **options), options)
    return None


def _published(name: str, sizes: Sizes, options: Mapping[str, Any]) -> Outline:
    reversed_too = sizes.directed and options.get("add_reverse", False)
    edges = sizes.edges * (2 if reversed_too else 1)
    means = options.get("mean_edge_features", False)
    width = sizes.edge_width if means else options.get("num_features", sizes.width)
    return Outline(
        f"sizes as published ({sizes.nodes:,} nodes, {sizes.edges:,} edges, {width} features a "
        f"node: {sizes.source}); {_MODELLED.format(exponent=GraphSpec.exponent)}",
        name,
        {NTYPE: sizes.nodes},
        _only_relation(sizes.nodes, edges, options),
        {NTYPE: _node_features(sizes.nodes, width, sizes.int_features)},
        _labels(sizes.nodes, sizes.classes if sizes.multi_label else 0),
        sizes.classes,
        _edge_width=0 if means else sizes.edge_width,
    )


def _published_hetero(name: str, sizes: HeteroSizes, options: Mapping[str, Any]) -> Outline:
    relations = {etype: _Relation(count) for etype, count in sizes.edges.items()}
    if options.get("add_reverse", True):
        relations |= {(dst, f"rev_{e}", src): edges for (src, e, dst), edges in relations.items()}
    nodes = ", ".join(f"{count:,} of {ntype}" for ntype, count in sizes.nodes.items())
    features = {
        ntype: _node_features(count, sizes.widths.get(ntype, 0), sizes.int_features.get(ntype, ()))
        for ntype, count in sorted(sizes.nodes.items())
        if ntype in {*sizes.widths, *sizes.int_features}
    }
    return Outline(
        f"sizes as published (nodes: {nodes}; {sum(sizes.edges.values()):,} edges without reverse "
        f"ones: {sizes.source}); {_MODELLED.format(exponent=GraphSpec.exponent)}",
        name,
        sizes.nodes,
        relations,
        features,
        _labels(sizes.nodes[sizes.target]),
        sizes.classes,
        sizes.target,
    )


def _generated(name: str, spec: GraphSpec, options: Mapping[str, Any]) -> Outline:
    edges = spec.num_edges * (2 if options.get("add_reverse", False) else 1)
    return Outline(
        f"sizes of the graph as it would be generated ({spec.num_nodes:,} nodes, "
        f"{spec.num_edges:,} edges, {spec.num_features} features a node); "
        f"{_MODELLED.format(exponent=spec.exponent)}",
        name,
        {NTYPE: spec.num_nodes},
        _only_relation(spec.num_nodes, edges, options, spec.exponent),
        {NTYPE: _node_features(spec.num_nodes, spec.num_features)},
        _labels(spec.num_nodes, spec.num_labels),
        spec.num_labels or spec.num_classes,
        _seed=spec.seed,
    )


def _igbh(spec: IgbhSpec) -> Outline:
    nodes, relations = spec.num_nodes, {}
    for (src, etype, dst), count in spec.num_edges.items():
        relation = RELATIONS[etype.removeprefix("rev_")]
        into, out = relation.fame, relation.spread
        if src == dst:
            out = into  # both ways
        elif etype.startswith("rev_"):
            into, out = out, into
        relations[src, etype, dst] = _Relation(count, into, out)
    features = {
        ntype: {"feat": _no_memory(nodes[ntype], spec.num_features, dtype=np.float16)}
        for ntype in NODE_TYPES
    }
    return Outline(
        f"sizes of the graph as it would be generated ({sum(nodes.values()):,} nodes, "
        f"{sum(spec.num_edges.values()):,} edges, {spec.num_features} features a node); degrees "
        "and how often each row is read are modelled by power laws, not counted",
        igbh.NAME,
        nodes,
        relations,
        features,
        _labels(nodes["paper"]),
        spec.num_classes,
        "paper",
        _seed=spec.seed,
    )


def _only_relation(
    num_nodes: int,
    num_edges: int,
    options: Mapping[str, Any],
    exponent: float = GraphSpec.exponent,
) -> dict[CanonicalEtype, _Relation]:
    loops = num_nodes if options.get("self_loops", False) else 0
    return {(NTYPE, ETYPE, NTYPE): _Relation(num_edges + loops, exponent, exponent)}


def _labels(num_nodes: int, num_labels: int = 0) -> np.ndarray:
    """Classes, or as many labels as a node may have."""
    if num_labels:
        return _no_memory(num_nodes, num_labels, dtype=np.int8)
    return _no_memory(num_nodes, dtype=np.int64)


def _node_features(
    num_nodes: int, width: int, int_features: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    features = {"feat": _no_memory(num_nodes, width, dtype=np.float32)} if width else {}
    return features | {name: _no_memory(num_nodes, 1, dtype=np.int64) for name in int_features}


def _no_memory(*shape: int, dtype: Any) -> np.ndarray:
    """Zeros that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
