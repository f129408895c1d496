"""Checks of data sets and of the options that make them; ``action`` begins the error messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from dgl_mgpu.data.csc import first_decrease, first_out_of_range, require_ids
from dgl_mgpu.errors import ConfigError, IdOutOfRangeError, InvalidInputError, nearest

if TYPE_CHECKING:
    from dgl_mgpu.data.dataset import Dataset
    from dgl_mgpu.data.hetero import HeteroDataset

#: The label of a node without one.
UNLABELLED = -1
#: The parts of a split.
SPLITS = ("train", "valid", "test")


def require_options(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for an option that a data set's loader does not know."""
    known = list(known)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"load {name} with option {option!r}",
                "there is no such option",
                nearest(option, known),
            )


def require_ranges(spec: Any, what: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError unless a generator's parameters are numbers in ``[low, high]``.

    `spec` is a dataclass whose fields are annotated with "int" or "float".
    """
    whole = {field.name for field in dataclasses.fields(spec) if field.type == "int"}
    for name, (low, high) in ranges.items():
        value = getattr(spec, name)
        kind = Integral if name in whole else Real
        if not isinstance(value, kind) or not low <= float(value) <= high:
            raise ConfigError(
                asked=f"generate {what} with {name}={value!r}",
                found=f"{name} takes a{' whole' * (name in whole)} number from {low} to {high}",
                fix=f"choose one for {name} (data.options.{name} on a command line)",
            )


def require_array(action: str, what: str, given: Any) -> None:
    """Raise InvalidInputError unless `given` is a NumPy array."""
    if not isinstance(given, np.ndarray):
        raise InvalidInputError(
            action, f"{what} is of type {type(given).__name__}", "pass a NumPy array, np.asarray(…)"
        )


def require_count(action: str, what: str, given: Any) -> None:
    """Raise InvalidInputError unless `given` is a whole number of 0 or more."""
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 0:
        raise InvalidInputError(action, f"{what} is {given!r}", "pass a whole number of 0 or more")


def check_csc_shapes(action: str, indptr: np.ndarray, indices: np.ndarray, num_rows: int) -> None:
    """Check dtypes, shapes and ends of the in-edges of `num_rows` nodes."""
    require_array(action, "indptr", indptr)
    require_array(action, "indices", indices)
    if indptr.dtype != np.int64 or indptr.shape != (num_rows + 1,):
        raise InvalidInputError(
            action,
            f"indptr has dtype {indptr.dtype} and shape {indptr.shape}",
            f"pass int64 of shape ({num_rows + 1},), one more than there are nodes",
        )
    if indices.dtype not in (np.int32, np.int64) or indices.ndim != 1:
        raise InvalidInputError(
            action,
            f"indices has dtype {indices.dtype} and shape {indices.shape}",
            "pass a one-dimensional int32 or int64 array",
        )
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise InvalidInputError(
            action,
            f"indptr runs from {indptr[0]} to {indptr[-1]}, but there are {len(indices)} indices",
            "let indptr begin at 0 and end at the number of edges",
        )


def check_csc_contents(action: str, indptr: np.ndarray, indices: np.ndarray, num_cols: int) -> None:
    """Check that `indptr` does not decrease, and that sources are ids of `num_cols` nodes."""
    bad = first_decrease(indptr)
    if bad >= 0:
        raise InvalidInputError(
            action, f"indptr decreases after place {bad}", "pass a well-formed CSC"
        )
    check_range(action, "indices", indices, num_cols)


def check_labels_shape(action: str, labels: np.ndarray, num_nodes: int, num_classes: int) -> None:
    """Check that labels are an int64 for each node, or a row of int8."""
    require_array(action, "labels", labels)
    if (labels.dtype, labels.shape) not in (
        (np.int64, (num_nodes,)),
        (np.int8, (num_nodes, num_classes)),
    ):
        raise InvalidInputError(
            action,
            f"labels has dtype {labels.dtype} and shape {labels.shape}",
            f"pass int64 of shape ({num_nodes},), or int8 of shape ({num_nodes}, {num_classes}) "
            f"where a node may have several; {UNLABELLED} where it is unknown",
        )


def check_labels_contents(action: str, labels: np.ndarray, num_classes: int) -> None:
    """Check that labels are classes, or 0 and 1 where a node may have several."""
    if labels.ndim == 1:
        check_range(action, "labels", labels, num_classes, lowest=UNLABELLED)
    else:
        check_range(action, "labels.reshape(-1)", labels.reshape(-1), 2, lowest=UNLABELLED)


def check_features(action: str, of: str, rows: int, features: Mapping[str, Any]) -> None:
    """Check that each feature has a row for each node or edge, of a native dtype of torch."""
    for name, feature in features.items():
        if not hasattr(feature, "shape") or not hasattr(feature, "dtype"):
            raise InvalidInputError(
                action,
                f"the {of} feature {name!r} is of type {type(feature).__name__}",
                "pass a tensor or a NumPy array",
            )
        if isinstance(feature.dtype, np.dtype) and (
            feature.dtype.kind not in "biufc"
            or not feature.dtype.isnative
            or feature.dtype.char in "gG"  # long double
        ):
            raise InvalidInputError(
                action,
                f"the {of} feature {name!r} has dtype {feature.dtype}",
                "pass numbers of a type that torch has, like feature.astype(np.float32)",
            )
        if len(feature.shape) == 0 or feature.shape[0] != rows:
            raise InvalidInputError(
                action,
                f"the {of} feature {name!r} has shape {tuple(feature.shape)}, but there are "
                f"{rows} {of}s",
                f"pass one row for each {of}",
            )


def check_split(action: str, parts: Mapping[str, np.ndarray], num_nodes: int) -> None:
    """Check that the parts of a split are int64 node ids."""
    for part, given in parts.items():
        require_array(action, f"{part} ids", given)
        ids = require_ids(f"the {part} nodes", given)
        if ids.dtype != np.int64:
            raise InvalidInputError(action, f"the {part} ids have dtype {ids.dtype}", "pass int64")
        check_range(action, part, ids, num_nodes)


def check_range(action: str, what: str, ids: np.ndarray, stop: int, lowest: int = 0) -> None:
    """Raise IdOutOfRangeError unless all `ids` are in ``[lowest, stop)``."""
    bad = first_out_of_range(ids, lowest, stop)
    if bad >= 0:
        raise IdOutOfRangeError(
            action, f"{what}[{bad}] is {ids[bad]}", f"use values in [{lowest}, {stop})"
        )


def require_labelled_split(dataset: Dataset | HeteroDataset) -> None:
    """Check that no part of a data set's split is empty, and that all nodes in it have a class.

    Raises
    ------
    InvalidInputError
        Training cannot use the split.
    """
    action = f"train on data set {dataset.name!r}"
    for part in SPLITS:
        ids = np.asarray(getattr(dataset, part))
        if not len(ids):
            raise InvalidInputError(
                action,
                f"there are no {part} nodes",
                "give each part of its split (train, valid, test) at least one node",
            )
        labels = dataset.labels[ids]
        if dataset.multi_label:
            bad = np.flatnonzero((labels < 0).all(1))
            problem, wanted = "all of whose labels are unknown", "labels of 0 and 1"
        else:
            bad = np.flatnonzero((labels < 0) | (labels >= dataset.num_classes))
            problem = f"whose label is {labels[bad[0]]}" if len(bad) else ""
            wanted = f"labels in [0, {dataset.num_classes})"
        if len(bad):
            raise InvalidInputError(
                action,
                f"{len(bad)} of {len(ids)} {part} nodes have no class, such as node {ids[bad[0]]},"
                f" {problem}",
                f"give them {wanted}, or leave them out of the split",
            )
        if dataset.multi_label and not ((labels == 1).any(0) & (labels == 0).any(0)).any():
            raise InvalidInputError(
                action,
                f"there is no label that some {part} nodes have and others have not",
                "split the nodes otherwise: the area under the ROC curve is of such labels",
            )
