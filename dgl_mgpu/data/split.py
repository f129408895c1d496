"""What training asks of a data set's split."""

from __future__ import annotations

import numpy as np

from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.data.dataset import Dataset
from dgl_mgpu.data.hetero import HeteroDataset
from dgl_mgpu.errors import InvalidInputError


def require_labelled_split(dataset: Dataset | HeteroDataset) -> None:
    """Check that no part of a data set's split is empty, and that all of its nodes have a class.

    Nodes of no part need none.

    Raises
    ------
    InvalidInputError
    """
    for part in SPLITS:
        ids = np.asarray(getattr(dataset, part))
        if not len(ids):
            raise InvalidInputError(
                f"train on data set {dataset.name!r}",
                f"there are no {part} nodes",
                "give each part of its split (train, valid, test) at least one node",
            )
        labels = dataset.labels[ids]
        if dataset.multi_label:
            bad = np.flatnonzero((labels < 0).all(1))
            such, wanted = "all of whose labels are unknown", "labels of 0 and 1"
        else:
            bad = np.flatnonzero((labels < 0) | (labels >= dataset.num_classes))
            such = f"whose label is {labels[bad[0]]}" if len(bad) else ""
            wanted = f"labels in [0, {dataset.num_classes})"
        if len(bad):
            raise InvalidInputError(
                f"train on data set {dataset.name!r}",
                f"{len(bad)} of {len(ids)} {part} nodes have no class, such as node {ids[bad[0]]},"
                f" {such}",
                f"give them {wanted}, or leave them out of the split",
            )
        if dataset.multi_label and not ((labels == 1).any(0) & (labels == 0).any(0)).any():
            raise InvalidInputError(
                f"train on data set {dataset.name!r}",
                f"there is no label that some {part} nodes have and others have not",
                "split the nodes otherwise: the area under the ROC curve is of such labels",
            )
