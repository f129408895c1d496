"""Forward and backward pass of a mini-batch as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from dgl.dataloading import DataLoader
from dgl.heterograph import DGLBlock
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from dgl_mgpu.capture.cuda_graph import (
    captured,
    captures,
    errors_as_not_captured,
    host_waits_refused,
    new_pool,
    record_event,
    wait_event,
)
from dgl_mgpu.capture.static_buffers import Sizes, StaticBuffers
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.train.capture.graph_slots import (
    GraphSlot,
    Results,
    ShapeKey,
    SlotBatch,
    SlotPool,
    free_slot,
)
from dgl_mgpu.train.capture.policy import CapturePolicy
from dgl_mgpu.train.optimizer import average_gradients, broadcast_from_first, flattened_gradients

Blocks = Sequence[DGLBlock]

#: One slot computes while the next mini-batch is loaded into the other.  A third one changed no
#: step's time by more than runs differ, also where mini-batches wait for host memory.
NUM_SLOTS = 2


class _Pass(nn.Module):
    """The computation of a training step, as a module with the model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Blocks], torch.Tensor],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: Callable[[Blocks], torch.Tensor],
    ) -> None:
        super().__init__()
        self.model = model
        # In a tuple: modules among them must not be registered.
        self._functions = forward, loss, labels

    def forward(
        self, blocks: Blocks, seeds: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss, outputs and labels of the first ``seeds`` seeds, by default of all."""
        forward, loss, labels = self._functions
        outputs, classes = forward(blocks)[:seeds], labels(blocks)[:seeds]
        return loss(outputs, classes), outputs.detach(), classes.detach()


def normalised_batch(model: nn.Module) -> str | None:
    """The name of a batch normalisation module, if there is one."""
    names = (name for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return next(names, None)


def _label(blocks: Blocks) -> torch.Tensor:
    if "label" not in blocks[-1].dstdata:
        raise InvalidInputError(
            "compute a mini-batch's loss",
            "the seeds have no feature 'label'",
            'have the sampler fetch them, prefetch_labels=["label"], or say where they are: '
            "CapturedStep(…, labels=…)",
        )
    return blocks[-1].dstdata["label"]


class CapturedStep:
    """Computes a mini-batch's loss and gradients, on a GPU by one CUDA graph.

    Launching a small model kernel by kernel takes the host longer than the GPU computes.  Here a
    mini-batch is loaded into the static buffers of a CUDA graph, and the host launches the graph.
    :meth:`batches` samples a loader's mini-batches and fetches their features into them while
    the GPU computes the one before; mini-batches passed as blocks are copied.  The first ones are
    computed without a graph; then one is captured, with room to spare for others of as many seeds.
    A larger one is captured anew.  One with another number of seeds is computed without a graph,
    until there have been twice as many of those.  On a CPU nothing is captured.

    The computation must be the same for all mini-batches, and rows of nodes may depend on each
    other through edges only: blocks have padding nodes and edges, which are not connected to the
    mini-batch.  The host must not read results in between (as ``GraphConv`` does without
    ``allow_zero_in_degree``).  Changes of anything but tensors, such as a dropout's rate, have no
    effect, except for ``model.train()`` and ``model.eval()``.

    Where ``torch.distributed`` is initialised, parameters and buffers become those of the first
    rank, and gradients are the mean over all ranks, zeros where none has any.  This replaces
    ``DistributedDataParallel``; every rank creates a step and calls it equally often.

    Parameters
    ----------
    model : nn.Module
        Whose parameters get gradients.
    forward : callable
        Of a mini-batch's blocks gives a row for each of its seeds, and then maybe others.
    loss : callable
        Of these rows and the seeds' labels gives a number; may depend on parameters, too.
    labels : callable
        Of a mini-batch's blocks gives the labels; by default ``blocks[-1].dstdata["label"]``.
    required : bool
        Whether it is an error if steps cannot be captured.  If not, whatever keeps them from that,
        later ones are computed without a graph, after a warning with the reason.

    Raises
    ------
    InvalidInputError
        If the model has batch normalisation, whose statistics are of all rows, also if captures are
        not required: ranks share its running statistics by ``DistributedDataParallel``.

    Examples
    --------
    >>> step = dgl_mgpu.CapturedStep(
    ...     model, lambda blocks: model(blocks, blocks[0].srcdata["feat"]), F.cross_entropy
    ... )
    >>> for batch in step.batches(loader):
    ...     loss = step(batch)
    ...     optimizer.step()

    Notes
    -----
    CUDA graphs are those of ``torch.cuda.CUDAGraph``; gradients overwrite what parameters had.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Blocks], torch.Tensor],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: Callable[[Blocks], torch.Tensor] = _label,
        *,
        required: bool = True,
    ) -> None:
        name = normalised_batch(model)
        if name is not None:
            raise InvalidInputError(
                "capture a training step",
                f"'{name}' is batch normalisation, whose statistics would count padding rows",
                "use layer normalisation, or train without capturing steps",
            )
        self._required, self._captures = required, True
        broadcast_from_first((*model.parameters(), *model.buffers()))
        self._pass, self._labels = _Pass(model, forward, loss, labels), labels
        self._modules = list(model.modules())
        learned = {n: p for n, p in self._pass.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(learned), list(learned.values())
        self._slots: list[GraphSlot] = []
        #: The number of slots to capture, and the most that fit memory.
        self._num_slots, self._max_slots = 1, NUM_SLOTS
        self._policy = CapturePolicy()
        self._weight: torch.Tensor | None = None
        self._weight_now = 1.0
        #: Of the last mini-batch's seeds; of a captured one valid until the next mini-batch.
        self.outputs = self.labels = torch.empty(0)

    def batches(self, loader: Any) -> Iterator[Blocks | SlotBatch]:
        """The mini-batches of a pass over a loader, to be passed to the step one by one.

        They are those that the loader gives, in its order.  On a GPU, neighbours that DGL's own
        samplers take from a :class:`~dgl_mgpu.StoreGraph`, or from a graph in memory that the GPU
        reads, are put where they will be computed, and no blocks are made of them.  The features
        that are read must be those that the sampler prefetches, and every node type have edges.
        All others come as the loader's blocks.  A pass ends with what raises in it.

        Parameters
        ----------
        loader : dgl.dataloading.DataLoader

        Returns
        -------
        iterator of list of DGLBlock, or of SlotBatch
            Each to be used before the next one is asked for.

        Raises
        ------
        InvalidInputError
            If it is no such loader.
        """
        if not isinstance(loader, DataLoader):
            raise InvalidInputError(
                "go over mini-batches of blocks",
                f"the loader is of type {type(loader).__name__}",
                "pass a dgl.dataloading.DataLoader, or blocks to the step itself",
            )
        if not captures(torch.device(loader.device)):
            return (blocks for *_, blocks in loader)
        if self._num_slots < self._max_slots:
            # One slot is loaded while another computes.
            self._num_slots = self._max_slots
            self._drop_slots()
        return SlotPool(lambda: self._slots, self._modes, loader.device).batches(loader)

    def state_dict(self) -> dict[str, Any]:
        """The state of the capture policy: which mini-batches a graph computes, and its capacity.

        A step that loads it computes further mini-batches bit for bit as this one will, given the
        same states of the random number generators and enough memory.  It also stops capturing if
        this one did, unless captures are required.

        Returns
        -------
        dict
            Plain values, which JSON can hold.
        """
        return {**self._policy.state(), "captures": self._captures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the step with this :meth:`state_dict`.

        Parameters
        ----------
        state : dict

        Raises
        ------
        KeyError, TypeError, ValueError
            If it is none.
        """
        captures = bool(state["captures"])
        self._policy.load_state(state)
        self._captures = captures or self._required
        self._drop_slots()

    def num_seeds(self, batch: Blocks | SlotBatch) -> int:
        """Seeds of a mini-batch, of those that have labels.

        Parameters
        ----------
        batch : list of DGLBlock, or what :meth:`batches` gives

        Raises
        ------
        InvalidInputError
            If the next one has been asked for since.
        """
        if isinstance(batch, SlotBatch):
            return batch.slot.num_seeds
        return len(self._labels(batch))

    def __call__(self, batch: Blocks | SlotBatch, weight: float = 1.0) -> torch.Tensor:
        """The loss of a mini-batch; its parameters' gradients are those of ``weight`` times that.

        Parameters
        ----------
        batch : list of DGLBlock
            Of graphs on one device, with features and labels; or what :meth:`batches` gives.
        weight : float

        Returns
        -------
        Tensor, shape ()

        Raises
        ------
        InvalidInputError
            If blocks are not those of one mini-batch, or a feature requires gradients, or what
            :meth:`batches` gave is used after the next one, or by another step.
        UnavailableError
            If what is computed cannot be captured, and that is required.
        """
        if isinstance(batch, SlotBatch):
            slot = batch.slot
            if slot.owner is not self._pass:
                raise InvalidInputError(
                    "compute a mini-batch",
                    "it was made for another step",
                    "pass each step what its own batches() gives, or the loader's blocks",
                )
            if slot in self._slots and slot.shape_key.modes == self._modes():
                self._policy.count(slot.shape_key)
                loss = self._replay(slot, weight)
            else:
                # The slot was dropped since, or the model changed modes: compute it as blocks.
                loss = self._compute_blocks(batch.blocks(), weight)
            slot.last_use = record_event(loss.device)
            return loss
        return self._compute_blocks(batch, weight)

    def _compute_blocks(self, blocks: Blocks, weight: float) -> torch.Tensor:
        """The loss of blocks, by a graph or not."""
        is_captured = self._captures and captures(blocks[0].device)
        slot = self._slot_for(blocks) if is_captured else None
        if slot is None:
            return self._compute(blocks, weight)
        loss = self._replay(slot, weight)
        # From here on it is free, and another stream may put a mini-batch there.
        slot.last_use = record_event(loss.device)
        self.labels = self._labels(blocks)
        return loss

    def _replay(self, slot: GraphSlot, weight: float) -> torch.Tensor:
        """The loss of the mini-batch in a slot."""
        if weight != self._weight_now:
            assert self._weight is not None
            self._weight.fill_(weight)
            self._weight_now = weight
        results = slot.replay()
        for parameter, gradient in zip(self._parameters, results.gradients, strict=True):
            parameter.grad = gradient
        average_gradients(self._parameters, results.flat)
        self.outputs, self.labels = results.outputs, results.labels
        return results.loss.clone()

    def without_batch(self) -> None:
        """Take part where other ranks have a mini-batch: gradients are theirs, over all ranks."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        average_gradients(self._parameters)

    def _compute(self, blocks: Blocks, weight: float) -> torch.Tensor:
        """Compute without a graph; clears the gradients of the last mini-batch."""
        loss = self._try_to_compute(blocks, weight)
        if loss is None:
            loss = self._try_to_compute(blocks, weight)
            assert loss is not None
        average_gradients(self._parameters)
        return loss

    def _try_to_compute(self, blocks: Blocks, weight: float) -> torch.Tensor | None:
        """The loss; None if graphs left too little memory, which is now freed."""
        for parameter in self._parameters:
            parameter.grad = None
        try:
            loss, self.outputs, self.labels = self._pass(blocks)
            (weight * loss).backward()
        except torch.OutOfMemoryError as error:
            if self._required or not self._slots:
                raise
            self._give_up(error)
            return None
        return loss.detach()

    def _give_up(self, error: Exception) -> None:
        """Stop capturing."""
        self._captures = False
        self._free()
        warnings.warn(
            "From here on no training step is a CUDA graph, and each is queued kernel by kernel: "
            + (str(error).splitlines() or [type(error).__name__])[0],
            stacklevel=3,
        )

    def _free(self) -> None:
        """Free the memory of graphs and of their last results."""
        self._drop_slots()
        for parameter in self._parameters:
            parameter.grad = None
        self.outputs = self.labels = torch.empty(0)

    def _drop_slots(self) -> None:
        for slot in self._slots:
            # A mini-batch in it can still be read as blocks; the graph is dropped.
            slot.replay = _dropped
        self._slots = []

    def _modes(self) -> tuple[bool, ...]:
        """Training flags of all modules."""
        return tuple(module.training for module in self._modules)

    def _slot_for(self, blocks: Blocks) -> GraphSlot | None:
        """The slot into which a batch was loaded; None to compute it without a graph."""
        sizes = Sizes.of(blocks)
        try:
            return self._put(blocks, sizes)
        except Exception as error:
            # Models may raise anything; an error not due to the capture comes again without it.
            if self._required:
                raise
            self._give_up(error)
            return None

    def _put(self, blocks: Blocks, sizes: Sizes) -> GraphSlot | None:
        """As :meth:`_slot_for`, but raises errors of the capture."""
        shape_key = ShapeKey(sizes.shape, self._modes())
        self._policy.count(shape_key)
        fits = self._policy.holds(shape_key, sizes) and all(
            slot.buffers.takes(blocks) for slot in self._slots[:1]
        )
        if not fits:
            if not self._policy.choose(shape_key, sizes):
                return None
            self._drop_slots()
        if not self._slots:
            self._free()
            while not self._capture_slots(blocks):
                # A failed capture leaves the generator in a state that other graphs do not expect.
                self._num_slots = self._max_slots = len(self._slots)
        slot = free_slot(self._slots)
        if slot is not None:
            wait_event(slot.last_use, blocks[0].device)
            slot.buffers.load(blocks)
        return slot

    def _capture_slots(self, blocks: Blocks) -> bool:
        """Capture all slots anew for the policy's shape; False if memory does not suffice for all.

        Raises OutOfMemoryError if it does not suffice for one.
        """
        self._drop_slots()
        where = blocks[0].device
        pool = new_pool(where)
        # Captures must not advance the random numbers of the steps to come.
        with torch.random.fork_rng([where] if where.type == "cuda" else []):
            for _ in range(self._num_slots):
                try:
                    self._slots.append(self._capture(blocks, pool))
                except torch.OutOfMemoryError:
                    if not self._slots:
                        raise
                    return False
        return True

    def _capture(self, blocks: Blocks, pool: Any) -> GraphSlot:
        shape_key, sizes, where = self._policy.shape_key, self._policy.capacity, blocks[0].device
        assert shape_key is not None and sizes is not None
        buffers = StaticBuffers(blocks, sizes)
        seeds = len(self._labels(blocks))
        if self._weight is None:
            self._weight = torch.full((), self._weight_now, device=where)
        weight = self._weight

        def run() -> Results:
            # Share the parameters' memory, without their autograd history.
            leaves = [p.detach().requires_grad_() for p in self._parameters]
            loss, outputs, labels = functional_call(
                self._pass, dict(zip(self._names, leaves, strict=True)), (buffers.blocks(), seeds)
            )
            (weight * loss).backward()
            flat = flattened_gradients(leaves) if dist.is_initialized() else None
            gradients = [leaf.grad for leaf in leaves]
            return Results(loss.detach(), outputs, labels, gradients, flat)

        with errors_as_not_captured():
            run()  # allocates buffers of the features that it reads
        buffers.forget()
        with host_waits_refused():
            run()
        return GraphSlot(self._pass, shape_key, buffers, seeds, captured(run, where, pool))


def _dropped() -> Results:
    raise AssertionError("a mini-batch was computed in a slot that has been dropped")
