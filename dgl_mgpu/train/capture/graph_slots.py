"""Mini-batches that are sampled where a CUDA graph expects them, without being blocks before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from dgl.heterograph import DGLBlock

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import EtypeBlock
from dgl_mgpu.sampling.dataloading import batches_into_slots
from dgl_mgpu.sampling.loader_batches import FeatureSource
from dgl_mgpu.train.capture.capture import Point, point, wait_for
from dgl_mgpu.train.capture.static_buffers import Sizes, StaticBuffers


def _nothing() -> None:
    return None


class ShapeKey(NamedTuple):
    """What mini-batches must have in common for one place.

    Attributes
    ----------
    sizes : hashable
        :attr:`Sizes.kind`.
    modes : tuple of bool
        Which modules are training.
    """

    sizes: Hashable
    modes: tuple[bool, ...]


@dataclass
class Results:
    """Of what was computed in a place.

    Attributes
    ----------
    loss : Tensor, shape ()
    outputs : Tensor, shape (seeds, ...)
    labels : Tensor, shape (seeds, ...)
    gradients : list of Tensor or None
        By parameter.
    flat : Tensor or None
        All of them one after another, where ranks take their mean.
    """

    loss: torch.Tensor
    outputs: torch.Tensor
    labels: torch.Tensor
    gradients: list[torch.Tensor | None]
    flat: torch.Tensor | None


@dataclass(eq=False)
class GraphSlot:
    """Where a mini-batch is put, and what computes there.

    Attributes
    ----------
    owner : object
        The step that has it.
    kind : Kind
        Of the mini-batches that it is for.
    room : Room
    num_seeds : int
        Rows of the outputs.
    replay : callable
        Computes the one that is there.
    taken : callable
        Gives that one, until the script is done with it, and None then.
    left : Point or None
        On the script's stream, after the last one was computed.
    """

    owner: object
    kind: ShapeKey
    room: StaticBuffers
    num_seeds: int
    replay: Callable[[], Results]
    taken: Callable[[], SlotBatch | None] = _nothing
    left: Point = None


@dataclass(eq=False)
class SlotBatch:
    """A mini-batch that is in place until the next one is asked for.

    Raises
    ------
    InvalidInputError
        When its place is asked for later.
    """

    _place: GraphSlot
    _sizes: Sizes

    @property
    def place(self) -> GraphSlot:
        if self._place.taken() is not self:
            raise InvalidInputError(
                "compute a mini-batch",
                "its place has been given to another mini-batch",
                "pass each mini-batch to the step before asking for the next one",
            )
        return self._place

    def blocks(self) -> list[DGLBlock]:
        """Blocks of the mini-batch, in its place's memory."""
        return self.place.room.blocks(self._sizes)


def free_place(every: Sequence[GraphSlot]) -> GraphSlot | None:
    """A place without a mini-batch, if there is one."""
    return next((each for each in every if each.taken() is None), None)


class SlotPool:
    """The places of a step, into which a loader's mini-batches go.

    Parameters
    ----------
    every : callable
        Gives all that there are now.
    modes : callable
        Gives which modules are training.
    device : torch.device
    """

    def __init__(
        self,
        every: Callable[[], Sequence[GraphSlot]],
        modes: Callable[[], tuple[bool, ...]],
        device: torch.device,
    ) -> None:
        self._every, self._modes, self._device = every, modes, device

    def put(self, hops: Sequence[EtypeBlock], features: FeatureSource) -> SlotBatch | None:
        """Put a mini-batch into a place that is free, if it fits there.

        Of one place alone nothing is gained: others would find it taken.
        """
        every = self._every()
        place = free_place(every) if len(every) > 1 else None
        if place is None:
            return None
        room = place.room
        if not room.types.are_of(hops) or not room.is_served_by(features):
            return None
        sizes = Sizes.of_hops(hops, room.types)
        if place.kind != ShapeKey(sizes.kind, self._modes()) or not room.sizes.hold(sizes):
            return None
        wait_for(place.left, self._device)
        room.load_hops(hops, features)
        batch = SlotBatch(place, sizes)
        # One that the loader makes anew frees its place by that.
        place.taken = weakref.ref(batch)
        return batch

    def batches(self, loader: Any) -> Iterator[Any]:
        """A pass over a loader, which begins now: mini-batches in place, or blocks."""
        return self._handed_out(batches_into_slots(loader, self))

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not isinstance(batch, SlotBatch):
                *_, blocks = batch
                yield blocks
                continue
            place: GraphSlot | None = batch.place
            try:
                yield batch
                assert place is not None
                # What the script has done with the results counts, too.
                place.left = point(self._device)
            finally:
                # Also where the loop was left, whenever that is found: the step has noted when the
                # place was.
                if place is not None:
                    place.taken = _nothing
                # The place's memory is given up before others are captured.
                batch = place = None
