"""Seeds of everything that tests draw from."""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import random

import dgl
import numpy as np
import torch


def seed_everything() -> None:
    """Begin all random numbers of this process anew, those that DGL's C++ draws among them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dgl.seed(0)
