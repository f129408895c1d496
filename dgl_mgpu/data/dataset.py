"""Data sets of one type of nodes and edges."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from dgl_mgpu.data.checks import (
    SPLITS,
    UNLABELLED,
    check_csc_contents,
    check_csc_shapes,
    check_features,
    check_labels_contents,
    check_labels_shape,
    check_range,
    check_split,
    require_array,
    require_count,
)
from dgl_mgpu.data.csc import add_self_loops, from_edges
from dgl_mgpu.errors import InvalidInputError, InvalidWeightError

if TYPE_CHECKING:
    import dgl


@dataclass(frozen=True, eq=False)
class Dataset:
    """A graph with features, labels and a split, in memory or in read-only memory maps.

    Attributes
    ----------
    name : str
        Name for people and log files.
    num_nodes, num_classes : int
        Number of nodes and of classes; where a node may have several, of those that it may have.
    indptr : ndarray, int64 [num_nodes + 1]
        Where each node's in-edges begin (CSC).
    indices : ndarray, int32 or int64 [num_edges]
        Source of every edge, ordered by destination.
    labels : ndarray, int64 [num_nodes] or int8 [num_nodes, num_classes]
        Class of every node; or, where a node may have several, 1 for each that it has and 0 for
        each that it has not.  -1 (`UNLABELLED`) where that is unknown.
    train, valid, test : ndarray, int64
        Node ids of the split.
    node_features : mapping of str to array-like [num_nodes, …]
        NumPy arrays, memory maps or torch tensors; the input features are ``"feat"``.
    edge_features : mapping of str to array-like [num_edges, …]
        Row ``i`` belongs to the edge with id ``i``.  ``"weight"``, where present, must be
        finite, non-negative and not all zero at any node.
    eids : ndarray, int64 [num_edges], or None
        Id of the edge at every place of the CSC; None: its place is its id.
    description : str
        Where the data comes from, and how it was changed.
    checked : bool
        True: skip the checks that read whole arrays, because this content passed them before.

    Raises
    ------
    InvalidInputError
        Shapes or dtypes disagree, such as features whose row count is not the node count, or
        the CSC is malformed.
    IdOutOfRangeError
        A node or edge id is outside its range.
    InvalidWeightError
        ``edge_features["weight"]`` is unusable.
    """

    name: str
    num_nodes: int
    num_classes: int
    indptr: np.ndarray
    indices: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    node_features: Mapping[str, Any] = field(default_factory=dict)
    edge_features: Mapping[str, Any] = field(default_factory=dict)
    eids: np.ndarray | None = None
    description: str = ""
    checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self._check_shapes()
        if not self.checked:
            self._check_contents()

    @property
    def num_edges(self) -> int:
        """Number of edges, each direction counted."""
        return len(self.indices)

    @property
    def multi_label(self) -> bool:
        """Whether a node may have several classes."""
        return self.labels.ndim == 2

    @property
    def id_dtype(self) -> np.dtype:
        """The dtype of node and edge ids: int32 where that numbers both, int64 otherwise."""
        # Places have the dtype of ids in the graphs that are made of it.
        is_short = self.indices.dtype == np.int32 and self.num_edges <= 2**31
        return np.dtype(np.int32 if is_short else np.int64)

    def __repr__(self) -> str:
        features = ", ".join(
            f"{name}: {feature.dtype} {tuple(feature.shape)}"
            for name, feature in (*self.node_features.items(), *self.edge_features.items())
        )
        return (
            f"Dataset({self.name!r}, {self.num_nodes:,} nodes, {self.num_edges:,} edges, "
            f"{self.num_classes} {'labels' if self.multi_label else 'classes'}, {features})"
        )

    @property
    def _action(self) -> str:
        return f"describe data set {self.name!r}"

    def _check_shapes(self) -> None:
        require_count(self._action, "num_nodes", self.num_nodes)
        require_count(self._action, "num_classes", self.num_classes)
        check_csc_shapes(self._action, self.indptr, self.indices, self.num_nodes)
        check_labels_shape(self._action, self.labels, self.num_nodes, self.num_classes)
        if self.eids is not None:
            require_array(self._action, "eids", self.eids)
            if self.eids.dtype != np.int64 or self.eids.shape != (self.num_edges,):
                raise InvalidInputError(
                    self._action,
                    f"eids has dtype {self.eids.dtype} and shape {self.eids.shape}",
                    f"pass int64 of shape ({self.num_edges},), or None",
                )
        check_features(self._action, "node", self.num_nodes, self.node_features)
        check_features(self._action, "edge", self.num_edges, self.edge_features)

    def _check_contents(self) -> None:
        check_csc_contents(self._action, self.indptr, self.indices, self.num_nodes)
        check_split(self._action, {part: getattr(self, part) for part in SPLITS}, self.num_nodes)
        if self.eids is not None:
            check_range(self._action, "eids", self.eids, self.num_edges)
            seen = np.zeros(self.num_edges, np.bool_)
            seen[self.eids] = True
            if not seen.all():
                raise InvalidInputError(
                    self._action,
                    f"edge id {int(seen.argmin())} is missing from eids",
                    "let eids be a permutation of the edge ids",
                )
        check_labels_contents(self._action, self.labels, self.num_classes)
        if "weight" in self.edge_features:
            self._check_weights(np.asarray(self.edge_features["weight"]))

    def _check_weights(self, weight: np.ndarray) -> None:
        if weight.ndim != 1:
            raise InvalidInputError(
                self._action,
                f"the edge weights have shape {weight.shape}",
                "pass one for each edge",
            )
        eids = np.empty(0, np.int64) if self.eids is None else self.eids
        place, node = _first_bad_weight(self.indptr, eids, weight)
        if node >= 0:
            problem = (
                f"the weights of all in-edges of node {node} are zero"
                if place < 0
                else f"the weight of edge {place}, an in-edge of node {node}, is {weight[place]}"
            )
            fix = "pass finite weights of at least 0, with one above 0 at every node"
            raise InvalidWeightError(self._action, problem, fix)

    def to_dgl(self) -> dgl.DGLGraph:
        """Return the data set as a DGLGraph on the CPU.

        Node data are the node features, ``label`` and the masks ``train_mask``, ``val_mask``
        and ``test_mask``; edge data are the edge features.  Arrays in memory are shared, not
        copied, except that both index arrays of a graph must have one dtype (int64), and that each
        edge gets its id.
        """
        import dgl
        import torch

        with shared_with_dgl():
            indices = torch.as_tensor(self.indices).long()
            # Without ids, DGL fails to sum features of edges on CPUs.
            places = torch.arange(len(indices))
            eids = places if self.eids is None else torch.as_tensor(self.eids, dtype=torch.int64)
            graph = dgl.graph(
                ("csc", (torch.as_tensor(self.indptr), indices, eids)), num_nodes=self.num_nodes
            )
            for name, feature in self.node_features.items():
                graph.ndata[name] = torch.as_tensor(feature)
            for name, feature in self.edge_features.items():
                graph.edata[name] = torch.as_tensor(feature)
            graph.ndata.update(target_data(self, self.num_nodes))
        return graph


@contextlib.contextmanager
def shared_with_dgl() -> Iterator[None]:
    """Make tensors of read-only memory maps without warnings: DGL does not write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        yield


def target_data(dataset: Any, num_nodes: int) -> dict[str, Any]:
    """``label`` and the masks ``train_mask``, ``val_mask`` and ``test_mask`` of a data set."""
    import torch

    data = {"label": torch.as_tensor(dataset.labels)}
    for name, ids in (("train", dataset.train), ("val", dataset.valid), ("test", dataset.test)):
        data[f"{name}_mask"] = torch.zeros(num_nodes, dtype=torch.bool)
        data[f"{name}_mask"][torch.as_tensor(ids)] = True
    return data


def from_edge_list(src: np.ndarray, dst: np.ndarray, self_loops: bool, **fields: Any) -> Dataset:
    """Return the data set of an edge list and of all other fields of `Dataset`."""
    num_nodes = len(fields["labels"])
    if self_loops:
        src, dst = add_self_loops(src, dst, num_nodes)
    csc = from_edges(src, dst, num_nodes)
    return Dataset(num_nodes=num_nodes, indptr=csc.indptr, indices=csc.indices, **fields)


def as_labels(raw: np.ndarray) -> np.ndarray:
    """Return labels of any numeric dtype as a `Dataset` has them, NaN as -1.

    ``raw`` has a class for each node, [N] or [N, 1], or whether it has each of L > 1, [N, L].
    InvalidInputError if it has another shape, or holds other numbers.
    """
    if raw.ndim == 2 and raw.shape[1] == 1:
        raw = raw[:, 0]
    if raw.ndim not in (1, 2) or raw.dtype.kind not in "biuf":
        raise InvalidInputError(
            asked="read labels",
            found=f"they are an array of dtype {raw.dtype} and shape {raw.shape}",
            fix="pass one numeric class per node, or a row of 0 and 1",
        )
    known = np.isfinite(raw)
    labels = np.full(raw.shape, UNLABELLED, np.int64 if raw.ndim == 1 else np.int8)
    np.copyto(labels, raw, where=known, casting="unsafe")
    if not np.array_equal(labels[known], raw[known]):
        raise InvalidInputError(
            asked="read labels",
            found="some are not whole numbers" if raw.ndim == 1 else "some are neither 0 nor 1",
            fix="pass class numbers, or a row of 0 and 1 for each node, NaN where it is unknown",
        )
    return labels


@njit(cache=True, nogil=True)
def _first_bad_weight(indptr, eids, weight):
    """Return (edge, node) of the first bad weight, (-1, node) of an all-zero node, (-1, -1)."""
    for node in range(len(indptr) - 1):
        total = 0.0
        for place in range(indptr[node], indptr[node + 1]):
            edge = eids[place] if len(eids) > 0 else place
            if not (weight[edge] >= 0 and weight[edge] < np.inf):
                return edge, node
            total += weight[edge]
        if indptr[node + 1] > indptr[node] and total == 0:
            return -1, node
    return -1, -1
