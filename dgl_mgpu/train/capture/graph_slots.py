"""Slots of CUDA graphs: mini-batches are sampled straight into a graph's static buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from dgl.heterograph import DGLBlock

from dgl_mgpu.capture.cuda_graph import StreamEvent, record_event, wait_event
from dgl_mgpu.capture.static_buffers import Sizes, StaticBuffers
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import EtypeBlock
from dgl_mgpu.sampling.dataloading import batches_into_slots
from dgl_mgpu.sampling.loader_batches import FeatureSource


def _nothing() -> None:
    return None


class ShapeKey(NamedTuple):
    """What mini-batches must have in common to share a slot.

    Attributes
    ----------
    sizes : hashable
        :attr:`Sizes.shape`.
    modes : tuple of bool
        Which modules are training.
    """

    sizes: Hashable
    modes: tuple[bool, ...]


@dataclass
class Results:
    """What a graph computed.

    Attributes
    ----------
    loss : Tensor, shape ()
    outputs : Tensor, shape (seeds, ...)
    labels : Tensor, shape (seeds, ...)
    gradients : list of Tensor or None
        By parameter.
    flat : Tensor or None
        All gradients concatenated, where ranks average them.
    """

    loss: torch.Tensor
    outputs: torch.Tensor
    labels: torch.Tensor
    gradients: list[torch.Tensor | None]
    flat: torch.Tensor | None


@dataclass(eq=False)
class GraphSlot:
    """A CUDA graph and the static buffers that hold its mini-batch.

    Attributes
    ----------
    owner : object
        The step that it belongs to.
    shape_key : ShapeKey
        Of the mini-batches that fit.
    buffers : StaticBuffers
    num_seeds : int
        Rows of the outputs.
    replay : callable
        Computes the mini-batch in the buffers.
    current_batch : callable
        Returns that mini-batch, or None once the script is done with it.
    last_use : StreamEvent
        On the script's stream, after the last mini-batch was computed.
    """

    owner: object
    shape_key: ShapeKey
    buffers: StaticBuffers
    num_seeds: int
    replay: Callable[[], Results]
    current_batch: Callable[[], SlotBatch | None] = _nothing
    last_use: StreamEvent = None


@dataclass(eq=False)
class SlotBatch:
    """A mini-batch in a slot, valid until the next one is asked for.

    Raises
    ------
    InvalidInputError
        If it is used later.
    """

    _slot: GraphSlot
    _sizes: Sizes

    @property
    def slot(self) -> GraphSlot:
        if self._slot.current_batch() is not self:
            raise InvalidInputError(
                "compute a mini-batch",
                "its slot has been given to another mini-batch",
                "pass each mini-batch to the step before asking for the next one",
            )
        return self._slot

    def blocks(self) -> list[DGLBlock]:
        """Blocks of the mini-batch, in the slot's memory."""
        return self.slot.buffers.blocks(self._sizes)


def free_slot(slots: Sequence[GraphSlot]) -> GraphSlot | None:
    """A slot without a mini-batch, if there is one."""
    return next((slot for slot in slots if slot.current_batch() is None), None)


class SlotPool:
    """The slots of a step, which a loader's mini-batches go into.

    Parameters
    ----------
    slots : callable
        Returns the current slots.
    modes : callable
        Returns which modules are training.
    device : torch.device
    """

    def __init__(
        self,
        slots: Callable[[], Sequence[GraphSlot]],
        modes: Callable[[], tuple[bool, ...]],
        device: torch.device,
    ) -> None:
        self._slots, self._modes, self._device = slots, modes, device

    def put(self, hops: Sequence[EtypeBlock], features: FeatureSource) -> SlotBatch | None:
        """Load a mini-batch into a free slot; None if there is none or it does not fit.

        A single slot is not used: it would never be free while another batch is computed.
        """
        slots = self._slots()
        slot = free_slot(slots) if len(slots) > 1 else None
        if slot is None:
            return None
        buffers = slot.buffers
        if not buffers.types.are_of(hops) or not buffers.is_served_by(features):
            return None
        sizes = Sizes.of_hops(hops, buffers.types)
        if slot.shape_key != ShapeKey(sizes.shape, self._modes()) or not buffers.sizes.hold(sizes):
            return None
        wait_event(slot.last_use, self._device)
        buffers.load_hops(hops, features)
        batch = SlotBatch(slot, sizes)
        # A batch that the loader makes again frees its slot when it is dropped.
        slot.current_batch = weakref.ref(batch)
        return batch

    def batches(self, loader: Any) -> Iterator[Any]:
        """A pass over a loader that starts now: mini-batches in slots, or blocks."""
        return self._freed_after_use(batches_into_slots(loader, self))

    def _freed_after_use(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not isinstance(batch, SlotBatch):
                *_, blocks = batch
                yield blocks
                continue
            slot: GraphSlot | None = batch.slot
            try:
                yield batch
                assert slot is not None
                # After what the script has done with the results, too.
                slot.last_use = record_event(self._device)
            finally:
                # Also if the script left the loop, at whatever time that is noticed: the step has
                # recorded the slot's last use.
                if slot is not None:
                    slot.current_batch = _nothing
                # So that the slot's memory is free before others are captured.
                batch = slot = None
