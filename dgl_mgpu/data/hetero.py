"""Data sets of several types of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dgl_mgpu.data.checks import (
    SPLITS,
    check_csc_contents,
    check_csc_shapes,
    check_features,
    check_labels_contents,
    check_labels_shape,
    check_range,
    check_split,
    require_count,
)
from dgl_mgpu.data.csc import CSC, from_edges, index_dtype
from dgl_mgpu.data.dataset import Dataset, shared_with_dgl, target_data
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.utils.types import CanonicalEtype

if TYPE_CHECKING:
    import dgl


@dataclass(frozen=True, eq=False)
class HeteroDataset:
    """A heterogeneous graph with features, and labels and a split of the nodes of one type.

    What `Dataset` is for graphs of one type of nodes and edges.

    Attributes
    ----------
    name : str
        Name for people and log files.
    num_nodes : mapping of str to int
        Nodes of each type.
    edges : mapping of (source type, edge type, destination type) to CSC
        The in-edges of the destinations of each relation: ``indptr``, int64, and ``indices``, int32
        or int64, sources.  An edge's id is its place; ``eids`` is not read.
    target : str
        The node type that is classified.
    num_classes : int
    labels : ndarray, int64 [num_nodes of target] or int8 [num_nodes of target, num_classes]
        As of `Dataset`.
    train, valid, test : ndarray, int64
        Ids of the target's nodes.
    node_features : mapping of str to (mapping of str to array-like [num_nodes, …])
        By node type and name; the input features are ``"feat"``, and may differ in width.  A type
        may have none.
    description : str
        Where the data comes from, and how it was changed.
    checked : bool
        True: skip the checks that read whole arrays, because this content passed them before.

    Raises
    ------
    InvalidInputError
        Shapes or dtypes disagree, a type is unknown, or a CSC is malformed.
    IdOutOfRangeError
        A node id or a label is outside its range.
    """

    name: str
    num_nodes: Mapping[str, int]
    edges: Mapping[CanonicalEtype, CSC]
    target: str
    num_classes: int
    labels: np.ndarray
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    node_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    description: str = ""
    checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self._check_types()
        action, targets = self._action, self.num_nodes[self.target]
        for etype, (indptr, indices, _) in self.edges.items():
            check_csc_shapes(self._action_of(etype), indptr, indices, self.num_nodes[etype[2]])
        check_labels_shape(action, self.labels, targets, self.num_classes)
        for ntype, features in self.node_features.items():
            check_features(action, ntype, self.num_nodes[ntype], features)
        if self.checked:
            return
        for etype, (indptr, indices, _) in self.edges.items():
            check_csc_contents(self._action_of(etype), indptr, indices, self.num_nodes[etype[0]])
        check_split(action, {part: getattr(self, part) for part in SPLITS}, targets)
        check_labels_contents(action, self.labels, self.num_classes)

    @property
    def num_edges(self) -> int:
        """Edges of all types."""
        return sum(len(csc.indices) for csc in self.edges.values())

    @property
    def multi_label(self) -> bool:
        """Whether a node may have several classes."""
        return self.labels.ndim == 2

    @property
    def id_dtype(self) -> np.dtype:
        """The narrowest of int32 and int64 that holds the ids of all nodes and edges."""
        sizes = (len(csc.indices) for csc in self.edges.values())
        return index_dtype(max(*self.num_nodes.values(), *sizes))

    @property
    def widths(self) -> dict[str, int]:
        """Numbers in a row of the input features, of each node type that has some."""
        return {
            ntype: int(features["feat"].shape[1])
            for ntype, features in self.node_features.items()
            if "feat" in features
        }

    def __repr__(self) -> str:
        nodes = ", ".join(f"{count:,} {ntype}" for ntype, count in self.num_nodes.items())
        return (
            f"HeteroDataset({self.name!r}, nodes: {nodes}, {self.num_edges:,} edges of "
            f"{len(self.edges)} types, {self.num_classes} classes of {self.target})"
        )

    @property
    def _action(self) -> str:
        return f"describe data set {self.name!r}"

    def _action_of(self, etype: CanonicalEtype) -> str:
        return f"describe relation {':'.join(etype)} of data set {self.name!r}"

    def _check_types(self) -> None:
        for ntype, count in self.num_nodes.items():
            require_count(self._action, f"num_nodes of {ntype!r}", count)
        require_count(self._action, "num_classes", self.num_classes)
        named = {self.target, *self.node_features}
        named |= {end for src, _, dst in self.edges for end in (src, dst)}
        unknown = sorted(named - set(self.num_nodes))
        if unknown or not self.edges:
            raise InvalidInputError(
                self._action,
                f"node types {unknown} have no number of nodes" if unknown else "it has no edges",
                "give num_nodes for every node type, and edges of at least one type",
            )
        for ntype, features in self.node_features.items():
            if "feat" in features and len(features["feat"].shape) != 2:
                raise InvalidInputError(
                    self._action,
                    f"the input features of {ntype!r} have shape {tuple(features['feat'].shape)}",
                    "pass a row of numbers for each node",
                )

    def to_dgl(self) -> dgl.DGLGraph:
        """Return the data set as a DGLGraph on the CPU, with int32 ids where all fit.

        Node data are the node features, and of the target ``label`` and the masks ``train_mask``,
        ``val_mask`` and ``test_mask``.  Features are shared, not copied.
        """
        import dgl
        import torch

        idtype = torch.int32 if self.id_dtype == np.int32 else torch.int64
        with shared_with_dgl():
            edges = {}
            for etype, (indptr, indices, _) in self.edges.items():
                # Without ids, DGL fails to sum features of edges on CPUs.
                eids = torch.arange(len(indices), dtype=idtype)
                ends = (torch.as_tensor(array).to(idtype) for array in (indptr, indices))
                edges[etype] = ("csc", (*ends, eids))
            graph = dgl.heterograph(edges, dict(self.num_nodes), idtype=idtype)
            for ntype, features in self.node_features.items():
                for name, feature in features.items():
                    graph.nodes[ntype].data[name] = torch.as_tensor(feature)
            targets = self.num_nodes[self.target]
            graph.nodes[self.target].data.update(target_data(self, targets))
        return graph


def without_inputs(dataset: Dataset | HeteroDataset) -> Dataset | HeteroDataset:
    """The data set without the input features ``"feat"`` of any nodes."""

    def without_feat(features: Mapping[str, Any]) -> dict[str, Any]:
        return {name: rows for name, rows in features.items() if name != "feat"}

    features: Any = without_feat(dataset.node_features)
    if isinstance(dataset, HeteroDataset):
        features = {ntype: without_feat(rows) for ntype, rows in dataset.node_features.items()}
    description = f"{dataset.description}; without features"
    return replace(dataset, node_features=features, description=description, checked=True)


def relation(src: np.ndarray, dst: np.ndarray, num_src: int, num_dst: int) -> CSC:
    """The edges of a relation as CSC, from int arrays [num_edges] of sources and destinations.

    Raises IdOutOfRangeError if an id is not below the number of nodes of its type.
    """
    check_range("build a relation", "src", src, num_src)
    check_range("build a relation", "dst", dst, num_dst)
    indptr, indices, _ = from_edges(src, dst, max(num_src, num_dst))
    return CSC(indptr[: num_dst + 1], indices, None)


def with_reverse(
    edges: Mapping[CanonicalEtype, CSC], num_nodes: Mapping[str, int]
) -> dict[CanonicalEtype, CSC]:
    """The relations, and then the reverse of each, under its name with ``rev_`` before it.

    A relation between nodes of one type has a reverse, too: to be cited is not to cite.
    """
    both = dict(edges)
    for (src, etype, dst), csc in edges.items():
        targets = np.repeat(np.arange(num_nodes[dst]), np.diff(csc.indptr))
        reverse = relation(targets, csc.indices, num_nodes[dst], num_nodes[src])
        both[dst, f"rev_{etype}", src] = reverse
    return both


def with_self_loops(dataset: HeteroDataset) -> HeteroDataset:
    """The data set with a relation ``self_<node type>`` that joins every node to itself."""
    loops = {}
    for ntype, count in dataset.num_nodes.items():
        nodes = np.arange(count + 1)
        indices = nodes[:-1].astype(index_dtype(count))
        loops[ntype, f"self_{ntype}", ntype] = CSC(nodes, indices, None)
    return replace(dataset, edges={**dataset.edges, **loops}, checked=True)
