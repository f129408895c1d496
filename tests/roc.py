"""Areas under ROC curves by comparing every pair of nodes."""

from __future__ import annotations

import numpy as np
import torch


def roc_auc(scores: torch.Tensor, labels: torch.Tensor | np.ndarray) -> float:
    """The mean over the labels that some nodes have and others have not; -1 is unknown."""
    areas = []
    for column, truth in zip(scores.double().cpu().numpy().T, np.asarray(labels).T, strict=True):
        having, others = column[truth == 1, None], column[None, truth == 0]
        if having.size and others.size:
            areas.append(float(((having > others) + 0.5 * (having == others)).mean()))
    return float(np.mean(areas))
