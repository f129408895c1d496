"""What trains embeddings that are kept in a store: SGD, Adagrad and Adam of the rows looked up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.store import row_updates as of_tables
from dgl_mgpu.store.embedding.layer import StoreEmbedding
from dgl_mgpu.store.row_updates import SparseOptimizer

OverRanks = Literal["mean", "sum"]


class EmbeddingOptimizer:
    """Trains embeddings of a store: what the classes below have in common.

    It is no ``torch.optim.Optimizer``: learning rates are changed by `lr`, and neither schedulers
    nor a ``GradScaler`` take it.  Scaled gradients have to be scaled back before :meth:`step`.

    Parameters
    ----------
    params : iterable of StoreEmbedding
        On all ranks the same, in the same order.
    lr : float
    over_ranks : 'mean' or 'sum'
        What becomes of the gradients of several ranks: 'mean' divides them by the number of
        ranks, as DistributedDataParallel does with a model's.  Those of one row are summed.
    **settings
        What ``of_table`` takes besides.

    Attributes
    ----------
    lr : float
        May be changed between steps, on all ranks.

    Raises
    ------
    InvalidInputError
        If there is nothing to train, the store keeps no state for it, or a number is out of range.
    """

    #: As `EmbeddingSpec.optimizer` names it.
    kind: ClassVar[str]
    #: What trains one table.
    of_table: ClassVar[Callable[..., SparseOptimizer]]

    def __init__(
        self,
        params: Iterable[StoreEmbedding],
        lr: float,
        over_ranks: OverRanks = "mean",
        **settings: Any,
    ) -> None:
        action = f"train with {type(self).__name__}"
        self._embeddings = [params] if isinstance(params, StoreEmbedding) else list(params)
        for embedding in self._embeddings:
            if not isinstance(embedding, StoreEmbedding):
                raise InvalidInputError(
                    action,
                    f"one is of type {type(embedding).__name__}, not an embedding of a store",
                    "pass what store.embedding(name) gives",
                )
            if embedding.optimizer != self.kind:
                raise InvalidInputError(
                    action,
                    f"embedding '{embedding.name}' was built for the optimizer "
                    f"'{embedding.optimizer}'",
                    "build the store with "
                    f"EmbeddingSpec({embedding.embedding_dim}, optimizer='{self.kind}')",
                )
        names = [embedding.name for embedding in self._embeddings]
        if not self._embeddings or len({*map(id, self._embeddings)}) != len(self._embeddings):
            raise InvalidInputError(
                action, f"one of the embeddings {names} is given twice", "pass each one once"
            )
        if over_ranks not in ("mean", "sum"):
            raise InvalidInputError(
                action, f"there is no over_ranks={over_ranks!r}", "use 'mean' or 'sum'"
            )
        _check(action, "lr", lr, math.inf)
        self.lr = lr
        self._ranks = Communicator.of_all_machines()
        self._scale = 1 / self._ranks.size if over_ranks == "mean" else 1.0
        self._optimizers = [
            self.of_table(embedding._rows, *embedding._states, lr=lr, ranks=self._ranks, **settings)
            for embedding in self._embeddings
        ]

    def step(self) -> None:
        """Change the rows that gradients of any rank came to since the last step; collective.

        Every rank of the job takes part, also one that had no mini-batch; one that does not keeps
        the others waiting, which they cannot tell from a slow one.  What was looked up before
        stays as it was.

        Raises
        ------
        InvalidInputError
            If ranks step different embeddings, or with different numbers.
        IdOutOfRangeError
            If an id that was looked up is no row.
        StoreClosedError
        RankFailedError
            If another rank failed.
        """
        for embedding, optimizer in zip(self._embeddings, self._optimizers, strict=True):
            ids, gradients = embedding._prepare_change("train rows of", embedding.take_gradients)
            if self._scale != 1:
                gradients = gradients * self._scale
            optimizer.lr, optimizer.steps = self.lr, embedding.steps
            optimizer.step(ids, gradients)
            embedding.steps = optimizer.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that backward passes have left since the last step.

        There is no need to after a step, which takes them.
        """
        for embedding in self._embeddings:
            embedding.zero_grad()


class SparseSGD(EmbeddingOptimizer):
    """``torch.optim.SGD`` without momentum; parameters as of :class:`EmbeddingOptimizer`."""

    kind = "sgd"
    of_table = of_tables.SparseSGD


class SparseAdagrad(EmbeddingOptimizer):
    """``torch.optim.Adagrad``; parameters as there and of :class:`EmbeddingOptimizer`."""

    kind = "adagrad"
    of_table = of_tables.SparseAdagrad

    def __init__(
        self,
        params: Iterable[StoreEmbedding],
        lr: float = 1e-2,
        eps: float = 1e-10,
        *,
        over_ranks: OverRanks = "mean",
    ) -> None:
        _check("train with SparseAdagrad", "eps", eps, math.inf)
        super().__init__(params, lr, over_ranks, eps=eps)


class SparseAdam(EmbeddingOptimizer):
    """``torch.optim.SparseAdam``; parameters as there and of :class:`EmbeddingOptimizer`.

    ``dgl.optim.SparseAdam`` differs: it takes the mean of a row's gradients, not their sum,
    counts steps for each row, and adds ``eps`` to corrected moments.  Where every row at hand is
    looked up once a step, the two agree but for ``eps``.
    """

    kind = "adam"
    of_table = of_tables.SparseAdam

    def __init__(
        self,
        params: Iterable[StoreEmbedding],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        over_ranks: OverRanks = "mean",
    ) -> None:
        action = "train with SparseAdam"
        if not (isinstance(betas, Sequence) and len(betas) == 2):
            raise InvalidInputError(
                action, f"betas={betas!r} is not a pair of numbers", "pass two of them"
            )
        for beta in betas:
            _check(action, "betas", beta, 1.0)
        _check(action, "eps", eps, math.inf)
        super().__init__(params, lr, over_ranks, betas=betas, eps=eps)


def _check(action: str, name: str, value: float, below: float) -> None:
    if not (isinstance(value, Real) and 0 <= value < below):
        raise InvalidInputError(
            action, f"{name}={value!r} is out of range", f"use a number in [0, {below})"
        )
