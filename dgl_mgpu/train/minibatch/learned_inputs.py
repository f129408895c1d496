"""A store's embeddings as part of a model that is trained on mini-batches."""

from __future__ import annotations

import torch
from torch import nn

from dgl_mgpu.errors import CheckpointError, OutputError
from dgl_mgpu.store.embedding.layer import StoreEmbedding
from dgl_mgpu.train.checkpoint.spilled_state import SpilledState
from dgl_mgpu.utils.stages import stage

#: The stage, within a model's, in which it reads rows; those of features have been gathered.
LOOKUP = "look up"


class LearnedRows(nn.Module):
    """Rows of an embedding, which a model's state dict has with their optimizer's state.

    They are in a file there, and not in memory: the job's first rank has what
    `StoreEmbedding.save` writes, the others nothing.  To ask for that state or to load it is
    collective.
    """

    def __init__(self, embedding: StoreEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self._saved: tuple[int, SpilledState] | None = None

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        """Rows of nodes, float32, shape (n, embedding_dim)."""
        with stage(LOOKUP):
            return self.embedding(nodes)

    def get_extra_state(self) -> SpilledState:
        """The embedding's state, the same file until that changes.

        Raises OutputError if there is no place for it.
        """
        version = self.embedding.version
        if self._saved is None or self._saved[0] != version:
            try:
                self._saved = version, SpilledState.written_by(self.embedding.save)
            except (OSError, CheckpointError) as error:
                raise OutputError(
                    "keep learned rows in a file",
                    error.found if isinstance(error, CheckpointError) else str(error),
                    "set TMPDIR to a folder that can be written and has space",
                ) from error
        return self._saved[1]

    def set_extra_state(self, state: SpilledState) -> None:
        """Take the embedding's state; that of ranks but the first is not looked at."""
        self.embedding.load(state.path)
        self._saved = self.embedding.version, state
