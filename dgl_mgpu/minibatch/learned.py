"""A store's embeddings as part of a model that is trained on mini-batches."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

from dgl_mgpu.backend.global_store.embedding.layer import StoreEmbedding
from dgl_mgpu.pipeline.stage import stage
from dgl_mgpu.store import Ranks

#: The stage, within a model's, in which it reads rows; those of features have been gathered.
LOOKUP = "look up"
_FILE = "rows.npz"


class LearnedRows(nn.Module):
    """Rows of an embedding, which a model's state dict has with their optimizer's state.

    To ask for that state or to load it is collective.  The job's first rank has it, as the bytes
    of what `StoreEmbedding.save` writes; that of the others is empty.

    Parameters
    ----------
    embedding : StoreEmbedding
    """

    def __init__(self, embedding: StoreEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        """Rows of nodes, float32, shape (n, embedding_dim)."""
        with stage(LOOKUP):
            return self.embedding(nodes)

    def get_extra_state(self) -> torch.Tensor:
        """The embedding's state, uint8."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / _FILE
            self.embedding.save(path)
            content = np.fromfile(path, np.uint8) if path.exists() else np.empty(0, np.uint8)
        return torch.from_numpy(content)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take the embedding's state; that of ranks but the first is not looked at."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / _FILE
            if Ranks.of_all_machines().rank == 0:
                state.numpy().tofile(path)
            self.embedding.load(path)
