"""What every data set is checked for; ``asked`` begins the errors, as in them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from dgl_mgpu.data.csc import first_decrease, first_out_of_range, require_ids
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError

#: The label of a node without one.
UNLABELLED = -1
#: The parts of a split.
SPLITS = ("train", "valid", "test")


def require_array(asked: str, what: str, given: Any) -> None:
    """Raise InvalidInputError unless `given` is a NumPy array."""
    if not isinstance(given, np.ndarray):
        raise InvalidInputError(
            asked, f"{what} is of type {type(given).__name__}", "pass a NumPy array, np.asarray(…)"
        )


def require_count(asked: str, what: str, given: Any) -> None:
    """Raise InvalidInputError unless `given` is a whole number of 0 or more."""
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 0:
        raise InvalidInputError(asked, f"{what} is {given!r}", "pass a whole number of 0 or more")


def check_csc_shapes(asked: str, indptr: np.ndarray, indices: np.ndarray, num_rows: int) -> None:
    """Check dtypes and ends of the in-edges of `num_rows` nodes, InvalidInputError if wrong."""
    require_array(asked, "indptr", indptr)
    require_array(asked, "indices", indices)
    if indptr.dtype != np.int64 or indptr.shape != (num_rows + 1,):
        raise InvalidInputError(
            asked,
            f"indptr has dtype {indptr.dtype} and shape {indptr.shape}",
            f"pass int64 of shape ({num_rows + 1},), one more than there are nodes",
        )
    if indices.dtype not in (np.int32, np.int64) or indices.ndim != 1:
        raise InvalidInputError(
            asked,
            f"indices has dtype {indices.dtype} and shape {indices.shape}",
            "pass a one-dimensional int32 or int64 array",
        )
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise InvalidInputError(
            asked,
            f"indptr runs from {indptr[0]} to {indptr[-1]}, but there are {len(indices)} indices",
            "let indptr begin at 0 and end at the number of edges",
        )


def check_csc_contents(asked: str, indptr: np.ndarray, indices: np.ndarray, num_cols: int) -> None:
    """Check all of the in-edges that come from `num_cols` nodes.

    Raises
    ------
    InvalidInputError
        `indptr` decreases.
    IdOutOfRangeError
        A source is no node.
    """
    bad = first_decrease(indptr)
    if bad >= 0:
        raise InvalidInputError(
            asked, f"indptr decreases after place {bad}", "pass a well-formed CSC"
        )
    check_range(asked, "indices", indices, num_cols)


def check_labels_shape(asked: str, labels: np.ndarray, num_nodes: int, num_classes: int) -> None:
    """Check that each node has an int64, or a row of int8; InvalidInputError if not."""
    require_array(asked, "labels", labels)
    if (labels.dtype, labels.shape) not in (
        (np.int64, (num_nodes,)),
        (np.int8, (num_nodes, num_classes)),
    ):
        raise InvalidInputError(
            asked,
            f"labels has dtype {labels.dtype} and shape {labels.shape}",
            f"pass int64 of shape ({num_nodes},), or int8 of shape ({num_nodes}, {num_classes}) "
            f"where a node may have several; {UNLABELLED} where it is unknown",
        )


def check_labels_contents(asked: str, labels: np.ndarray, num_classes: int) -> None:
    """Check that labels are classes, or 0 and 1 where a node may have several.

    Raises
    ------
    IdOutOfRangeError
    """
    if labels.ndim == 1:
        check_range(asked, "labels", labels, num_classes, lowest=UNLABELLED)
    else:
        check_range(asked, "labels.reshape(-1)", labels.reshape(-1), 2, lowest=UNLABELLED)


def check_features(asked: str, of: str, rows: int, features: Mapping[str, Any]) -> None:
    """Check that each feature has a row of numbers for each node or edge, InvalidInputError if not.

    The numbers are of a type that torch has, in this machine's order of bytes.
    """
    for name, feature in features.items():
        if not hasattr(feature, "shape") or not hasattr(feature, "dtype"):
            raise InvalidInputError(
                asked,
                f"the {of} feature {name!r} is of type {type(feature).__name__}",
                "pass a tensor or a NumPy array",
            )
        if isinstance(feature.dtype, np.dtype) and (
            feature.dtype.kind not in "biufc"
            or not feature.dtype.isnative
            or feature.dtype.char in "gG"  # long double
        ):
            raise InvalidInputError(
                asked,
                f"the {of} feature {name!r} has dtype {feature.dtype}",
                "pass numbers of a type that torch has, like feature.astype(np.float32)",
            )
        if len(feature.shape) == 0 or feature.shape[0] != rows:
            raise InvalidInputError(
                asked,
                f"the {of} feature {name!r} has shape {tuple(feature.shape)}, but there are "
                f"{rows} {of}s",
                f"pass one row for each {of}",
            )


def check_split(asked: str, parts: Mapping[str, np.ndarray], num_nodes: int) -> None:
    """Check that the parts of a split are int64 node ids.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
    """
    for part, given in parts.items():
        require_array(asked, f"{part} ids", given)
        ids = require_ids(f"the {part} nodes", given)
        if ids.dtype != np.int64:
            raise InvalidInputError(asked, f"the {part} ids have dtype {ids.dtype}", "pass int64")
        check_range(asked, part, ids, num_nodes)


def check_range(asked: str, what: str, ids: np.ndarray, stop: int, lowest: int = 0) -> None:
    """Raise IdOutOfRangeError unless all `ids` are in ``[lowest, stop)``."""
    bad = first_out_of_range(ids, lowest, stop)
    if bad >= 0:
        raise IdOutOfRangeError(
            asked, f"{what}[{bad}] is {ids[bad]}", f"use values in [{lowest}, {stop})"
        )
