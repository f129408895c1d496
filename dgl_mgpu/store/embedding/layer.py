"""Embeddings of nodes that are kept in a store.

Rows are read from the store as features are.  Backward passes leave gradients with the embedding,
and an optimizer's step (`optimizers`) brings those of all ranks to where the rows are kept, which
change there: neither a rank nor its GPU ever has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids
from dgl_mgpu.store.embedding import files
from dgl_mgpu.store.embedding.tables import STATES
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.memory import Table
from dgl_mgpu.store.row_updates import write_rows

_ROWS = "rows"

T = TypeVar("T")


class StoreEmbedding(nn.Module):
    """A row of trained numbers for each node; :meth:`GlobalStore.embedding` returns it.

    It takes the place of ``dgl.nn.NodeEmbedding``, or of ``torch.nn.Embedding(sparse=True)``, in
    a model.  It has no parameters: its rows are not among a model's, are not in its
    ``state_dict``, and DistributedDataParallel leaves them alone.  It is not copied or pickled;
    :meth:`save` writes its rows.

    Examples
    --------
    >>> store = dgl_mgpu.GlobalStore.from_dgl(g, embeddings={"emb": 64})
    >>> embedding = store.embedding("emb")
    >>> optimizer = dgl_mgpu.SparseAdam([embedding], lr=0.01)
    >>> for input_nodes, output_nodes, blocks in loader:
    ...     loss = model(blocks, embedding(input_nodes)).sum()
    ...     loss.backward()
    ...     optimizer.step()

    Attributes
    ----------
    name : str
        With the node type before it, where there are several.
    num_embeddings, embedding_dim : int
        Rows, and numbers in one.
    optimizer : 'sgd', 'adagrad' or 'adam'
        For which the store keeps state.
    steps : int
        How often it was trained.
    device : torch.device
        The store's.
    """

    def __init__(
        self, name: str, storage: TableStorage, optimizer: str, rows: Table, states: list[Table]
    ) -> None:
        super().__init__()
        self.name = name
        self.num_embeddings, self.embedding_dim = storage.shape
        self.optimizer = optimizer
        self.steps = 0
        self.device = rows.device
        self._storage = storage
        self._rows, self._states = rows, states
        # What makes autograd come back here; no parameter, since it gets no gradient.
        self._anchor = torch.zeros((), requires_grad=True)
        self._gradients: list[_Gradient] = []

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.num_embeddings}, {self.embedding_dim}, {self.optimizer!r}"

    @property
    def version(self) -> int:
        """Counts changes of the rows: those read at another version may be out of date."""
        return self._rows.version

    def forward(self, ids: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
        """Rows of nodes, as they are now, with a gradient that the next step takes.

        Parameters
        ----------
        ids : Tensor, int32 or int64, shape (n,)
            Also repeated.
        device : torch.device, optional
            Where to put them; on the store's by default.

        Returns
        -------
        Tensor, float32, shape (n, embedding_dim)

        Raises
        ------
        InvalidInputError
        IdOutOfRangeError
            For rows of a store on GPUs by a later call, at the latest by the step; there they are
            zeros until then.
        """
        ids = check_ids(ids, f"look up rows of embedding '{self.name}'")
        return _Lookup.apply(self._anchor, self, ids, device or self.device)

    def write(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace rows; collective, and an optimizer's state stays.

        Parameters
        ----------
        ids : Tensor, int32 or int64, shape (n,)
            n may differ between ranks and be 0.  Of rows for the same id the last one of the last
            rank is kept.
        rows : Tensor, float32, shape (n, embedding_dim)

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, StoreClosedError, RankFailedError
            As :func:`dgl_mgpu.store.row_updates.write_rows`.
        """
        self._prepare_change("write rows of", lambda: None)
        write_rows(self._rows, ids, rows, Communicator.of_all_machines())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that backward passes have left since the last step."""
        self._gradients.clear()

    def take_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and gradients of all backward passes since the last time, leaving none.

        Returns
        -------
        ids : Tensor, int64, shape (n,)
        gradients : Tensor, float32, shape (n, embedding_dim)
            On the store's device, both empty if there were none.
        """
        taken, self._gradients = self._gradients, []
        if not taken:
            shape = 0, self.embedding_dim
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return nothing, torch.empty(shape, device=self.device)
        for gradient in taken:
            gradient.follow()
        ids = [gradient.ids.to(self.device, torch.int64) for gradient in taken]
        rows = [gradient.rows.to(self.device) for gradient in taken]
        return (ids[0], rows[0]) if len(taken) == 1 else (torch.cat(ids), torch.cat(rows))

    def save(self, path: str | Path) -> None:
        """Write rows, optimizer's state and steps to a file; collective, between steps.

        The job's first rank reads all rows and writes them, with some 64 MiB of memory.  The file
        is a NumPy archive (``numpy.load(path)["rows"]``), does not depend on the number of ranks
        and appears only when it is complete.

        Raises
        ------
        CheckpointError
            If it cannot be written.
        RankFailedError
            On the other ranks, if so.
        """
        self._prepare_change("save rows of", lambda: None)
        tables = self._tables(rows_only=False)
        files.save_tables(Path(path), tables, self.steps, Communicator.of_all_machines())

    def load(self, path: str | Path, *, rows_only: bool = False) -> None:
        """Read what :meth:`save` wrote, bit for bit; collective, between steps.

        The job's first rank reads the file, twice, and sends it in chunks of 32 MiB to all ranks.
        Gradients that wait for a step are forgotten.

        Parameters
        ----------
        rows_only : bool
            Leave the optimizer's state and ``steps`` as they are, so that what was trained by
            one optimizer may be read by, or trained on with, another.

        Raises
        ------
        CheckpointError
            If the file is missing or damaged, has rows of another shape, or not the state; then
            nothing has changed.
        RankFailedError
            On the other ranks, if so.
        """
        self._prepare_change("load rows of", lambda: None)
        steps = files.load_tables(
            Path(path), self._tables(rows_only), Communicator.of_all_machines()
        )
        self.zero_grad()
        if not rows_only:
            self.steps = steps

    def __getstate__(self) -> NoReturn:
        # A file would have references to this process's memory, and a copy would not learn.
        raise InvalidInputError(
            f"copy or pickle embedding '{self.name}'",
            "its rows are in the store, and there is one copy of them",
            "write them with embedding.save(path), and keep it out of the module that is copied",
        )

    def _prepare_change(self, how: str, prepare: Callable[[], T]) -> T:
        """As of :class:`dgl_mgpu.store.feature_storage.TableStorage`, to the rows."""
        return self._storage._prepare_change(how, prepare)

    def _tables(self, rows_only: bool) -> dict[str, Table]:
        states = () if rows_only else zip(STATES[self.optimizer], self._states, strict=True)
        return {_ROWS: self._rows, **dict(states)}


@dataclass(frozen=True)
class _Gradient:
    """What a backward pass has left: rows for ids, and the stream of a GPU that it made them on.

    Autograd has the stream of the script follow only those that it left a parameter's gradient on.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    stream: torch.cuda.Stream | None

    @classmethod
    def made_here(cls, ids: torch.Tensor, rows: torch.Tensor) -> _Gradient:
        return cls(ids, rows, torch.cuda.current_stream(rows.device) if rows.is_cuda else None)

    def follow(self) -> None:
        """Let the current stream use it."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.rows.device)
        if current != self.stream:
            current.wait_stream(self.stream)
            for tensor in (self.ids, self.rows):
                if tensor.is_cuda:
                    tensor.record_stream(current)


class _Lookup(torch.autograd.Function):
    """Rows of an embedding; their gradient stays with it."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        embedding: StoreEmbedding,
        ids: torch.Tensor,
        device: torch.device | str,
    ) -> torch.Tensor:
        ctx.embedding = embedding
        ctx.save_for_backward(ids)
        return embedding._storage.fetch(ids, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.embedding._gradients.append(_Gradient.made_here(ids, gradient))
        return None, None, None, None
