"""Forward and backward pass of a mini-batch as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from dgl.dataloading import DataLoader
from torch import nn
from torch.func import functional_call

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.train.capture.capture import (
    captured,
    captures,
    new_pool,
    point,
    told_as_not_captured,
    wait_for,
    waits_refused,
)
from dgl_mgpu.train.capture.graph_slots import (
    GraphSlot,
    Results,
    ShapeKey,
    SlotBatch,
    SlotPool,
    free_place,
)
from dgl_mgpu.train.capture.passes import Blocks, Pass, normalised_batch
from dgl_mgpu.train.capture.policy import CapturePolicy
from dgl_mgpu.train.capture.static_buffers import Sizes, StaticBuffers
from dgl_mgpu.train.data_parallel import average_gradients, flattened_gradients, take_first_ranks

#: One is computed while the next one is put in its place.  A third one changed no step's time by
#: more than runs differ, also where mini-batches wait for the host's memory.
PLACES = 2


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

    To queue a small model kernel by kernel takes the host longer than it takes the GPU.  Here a
    mini-batch is put where the graph expects it, and the host launches that.  :meth:`batches` has
    a loader's sampled and fetched there while the GPU computes the one before; those that are
    passed as blocks are copied.  The first ones are computed as always; then one is captured, with
    room for others of as many seeds.  What turns out larger is captured anew, and a mini-batch of
    another number of seeds is computed as always, until there are twice as many of those.  On a CPU
    all are.

    What is computed must be the same for all mini-batches, and rows of nodes must not depend on
    others but through edges: blocks have some more of both, which no edge joins to those of the
    mini-batch.  The host must not look at results in between (as ``GraphConv`` does without
    ``allow_zero_in_degree``), nor are changes seen of what is no tensor, like a dropout's rate, but
    for ``model.train()`` and ``model.eval()``.

    Where ``torch.distributed`` is initialised, parameters and buffers become those of the first
    rank, and gradients are the mean over all ranks, zeros where none has any.  That is in place of
    ``DistributedDataParallel``; every rank makes one of these, and calls it as often.

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
        all are computed as always from there on, and a warning says why.

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
        take_first_ranks((*model.parameters(), *model.buffers()))
        self._pass, self._labels = Pass(model, forward, loss, labels), labels
        self._modules = list(model.modules())
        learned = {name: each for name, each in self._pass.named_parameters() if each.requires_grad}
        self._names, self._parameters = list(learned), list(learned.values())
        self._places: list[GraphSlot] = []
        #: To be made, and as many as there is memory for.
        self._num_places, self._most_places = 1, PLACES
        self._choice = CapturePolicy()
        self._weight: torch.Tensor | None = None
        self._weight_now = 1.0
        #: Rows for the last mini-batch's seeds and their labels; of a captured one until the next
        #: is asked for.
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
        if self._num_places < self._most_places:
            # One is put in its place while another is computed.
            self._num_places = self._most_places
            self._drop_places()
        return SlotPool(lambda: self._places, self._modes, loader.device).batches(loader)

    def state_dict(self) -> dict[str, Any]:
        """What decides which mini-batches are computed by a graph, and with how much room.

        A step that takes it computes the mini-batches to come as this one will, bit for bit, if the
        generators of random numbers go on from the same states, too, and there is memory for as
        much.  One that takes it from a step that gave up capturing does so, too, if it may.

        Returns
        -------
        dict
            Of plain values, which may be kept as JSON.
        """
        return {**self._choice.state(), "captures": self._captures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the step whose :meth:`state_dict` it is.

        Parameters
        ----------
        state : dict

        Raises
        ------
        KeyError, TypeError, ValueError
            If it is none.
        """
        captures = bool(state["captures"])
        self._choice.take(state)
        self._captures = captures or self._required
        self._drop_places()

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
            return batch.place.num_seeds
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
            place = batch.place
            if place.owner is not self._pass:
                raise InvalidInputError(
                    "compute a mini-batch",
                    "it was made for another step",
                    "pass each step what its own batches() gives, or the loader's blocks",
                )
            if place in self._places and place.kind.modes == self._modes():
                self._choice.count(place.kind)
                loss = self._replay(place, weight)
            else:
                # The place was given up since, or the model switched: as the loader's blocks are.
                loss = self._compute_blocks(batch.blocks(), weight)
            place.left = point(loss.device)
            return loss
        return self._compute_blocks(batch, weight)

    def _compute_blocks(self, blocks: Blocks, weight: float) -> torch.Tensor:
        """The loss of blocks, by a graph or not."""
        is_captured = self._captures and captures(blocks[0].device)
        place = self._place_for(blocks) if is_captured else None
        if place is None:
            return self._compute(blocks, weight)
        loss = self._replay(place, weight)
        # From here on it is free, and another stream may put a mini-batch there.
        place.left = point(loss.device)
        self.labels = self._labels(blocks)
        return loss

    def _replay(self, place: GraphSlot, weight: float) -> torch.Tensor:
        """The loss of what is in a place."""
        if weight != self._weight_now:
            assert self._weight is not None
            self._weight.fill_(weight)
            self._weight_now = weight
        results = place.replay()
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
        """As always: the loss, and no gradients left of the last mini-batch."""
        loss = self._computed(blocks, weight)
        if loss is None:
            loss = self._computed(blocks, weight)
            assert loss is not None
        average_gradients(self._parameters)
        return loss

    def _computed(self, blocks: Blocks, weight: float) -> torch.Tensor | None:
        """The loss; None if graphs left too little memory, which they have given up now."""
        for parameter in self._parameters:
            parameter.grad = None
        try:
            loss, self.outputs, self.labels = self._pass(blocks)
            (weight * loss).backward()
        except torch.OutOfMemoryError as error:
            if self._required or not self._places:
                raise
            self._give_up(error)
            return None
        return loss.detach()

    def _give_up(self, error: Exception) -> None:
        """Capture nothing from here on."""
        self._captures = False
        self._free()
        warnings.warn(
            "From here on no training step is a CUDA graph, and each is queued kernel by kernel: "
            + (str(error).splitlines() or [type(error).__name__])[0],
            stacklevel=3,
        )

    def _free(self) -> None:
        """Give up the memory of graphs, and of what they computed last."""
        self._drop_places()
        for parameter in self._parameters:
            parameter.grad = None
        self.outputs = self.labels = torch.empty(0)

    def _drop_places(self) -> None:
        for place in self._places:
            # There may be a mini-batch, of which blocks are made then; the graph is not kept.
            place.replay = _dropped
        self._places = []

    def _modes(self) -> tuple[bool, ...]:
        """Which modules are training."""
        return tuple(each.training for each in self._modules)

    def _place_for(self, blocks: Blocks) -> GraphSlot | None:
        """Where a batch has been put, to be computed by a graph; None if it is not to be."""
        sizes = Sizes.of(blocks)
        try:
            return self._put(blocks, sizes)
        except Exception as error:
            # Models may raise anything; if it is not for the capture, they do so as always, too.
            if self._required:
                raise
            self._give_up(error)
            return None

    def _put(self, blocks: Blocks, sizes: Sizes) -> GraphSlot | None:
        """As :meth:`_place_for`; raises what keeps them from being captured."""
        kind = ShapeKey(sizes.kind, self._modes())
        self._choice.count(kind)
        is_chosen = self._choice.holds(kind, sizes) and all(
            each.room.takes(blocks) for each in self._places[:1]
        )
        if not is_chosen:
            if not self._choice.choose(kind, sizes):
                return None
            self._drop_places()
        if not self._places:
            self._free()
            while not self._capture_places(blocks):
                # A capture that fails leaves the generator in another state than those before know.
                self._num_places = self._most_places = len(self._places)
        place = free_place(self._places)
        if place is not None:
            wait_for(place.left, blocks[0].device)
            place.room.load(blocks)
        return place

    def _capture_places(self, blocks: Blocks) -> bool:
        """Make the places for what is chosen, beginning with none; whether there is memory for all.

        Raises
        ------
        OutOfMemoryError
            If there is none for the first one.
        """
        self._drop_places()
        where = blocks[0].device
        pool = new_pool(where)
        # What is computed here is no step: those to come draw as if it had not been.
        with torch.random.fork_rng([where] if where.type == "cuda" else []):
            for _ in range(self._num_places):
                try:
                    self._places.append(self._capture(blocks, pool))
                except torch.OutOfMemoryError:
                    if not self._places:
                        raise
                    return False
        return True

    def _capture(self, blocks: Blocks, pool: Any) -> GraphSlot:
        kind, sizes, where = self._choice.kind, self._choice.room, blocks[0].device
        assert kind is not None and sizes is not None
        room = StaticBuffers(blocks, sizes)
        seeds = len(self._labels(blocks))
        if self._weight is None:
            self._weight = torch.full((), self._weight_now, device=where)
        weight = self._weight

        def run() -> Results:
            # In the parameters' memory, and known to nothing that was computed before, which
            # autograd would wait for.
            leaves = [each.detach().requires_grad_() for each in self._parameters]
            loss, outputs, labels = functional_call(
                self._pass, dict(zip(self._names, leaves, strict=True)), (room.blocks(), seeds)
            )
            (weight * loss).backward()
            flat = flattened_gradients(leaves) if dist.is_initialized() else None
            gradients = [each.grad for each in leaves]
            return Results(loss.detach(), outputs, labels, gradients, flat)

        with told_as_not_captured():
            run()  # finds the features that it reads
        room.forget()
        with waits_refused():
            run()
        return GraphSlot(self._pass, kind, room, seeds, captured(run, where, pool))


def _dropped() -> Results:
    raise AssertionError("a mini-batch is not computed in a place that was given up")
