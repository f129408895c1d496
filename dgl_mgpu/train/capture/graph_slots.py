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
    """The key that mini-batches have in common to share a slot."""

    sizes: Hashable  # :attr:`Sizes.shape`
    modes: tuple[bool, ...]  # training flags of all modules


@dataclass
class Results:
    """Results of a graph."""

    loss: torch.Tensor  # shape ()
    outputs: torch.Tensor  # shape (seeds, ...), as the labels
    labels: torch.Tensor
    gradients: list[torch.Tensor | None]  # by parameter
    flat: torch.Tensor | None  # all gradients concatenated, where ranks average them


@dataclass(eq=False)
class GraphSlot:
    """A CUDA graph and the static buffers that hold its mini-batch."""

    owner: object  # the step that it belongs to
    shape_key: ShapeKey
    buffers: StaticBuffers
    num_seeds: int  # rows of the outputs
    replay: Callable[[], Results]  # computes the mini-batch in the buffers
    #: Returns that mini-batch, or None once the script is done with it.
    current_batch: Callable[[], SlotBatch | None] = _nothing
    #: On the script's stream, after the last mini-batch was computed.
    last_use: StreamEvent = None


@dataclass(eq=False)
class SlotBatch:
    """A mini-batch in a slot, valid until the next one; a later use raises InvalidInputError."""

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

    ``slots`` returns the current ones, and ``modes`` the training flags of all modules.
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
                # Also after the script's use of the results.
                slot.last_use = record_event(self._device)
            finally:
                # Also if the script left the loop: the step has recorded the slot's last use.
                if slot is not None:
                    slot.current_batch = _nothing
                # So that the slot's memory is free before others are captured.
                batch = slot = None
