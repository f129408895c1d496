"""Vectors that ranks send each other, of lengths that only their senders know."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dgl_mgpu.comm.communicator import Communicator

#: Numbers before each message: whether its sender has more than there is room for, its length.
_HEAD = 2
#: Elements that there is room for at least: lengths that are small vary most.
_SPARE = 64


class Received(NamedTuple):
    """What all ranks sent here: ``notes`` of each, and by rank the ``lengths`` of their vectors,
    which ``data`` has one after the other."""

    notes: list[list[int]]
    data: torch.Tensor
    lengths: list[int]


@dataclass
class _Capacities:
    """Elements that messages to and from each rank have room for."""

    sending: list[int]
    receiving: list[int]


class Messages:
    """Vectors between all ranks of a group, in one collective where their lengths were foreseen.

    Both ends of a message know how long those like it were, and have room for that and a little
    more.  What is longer follows in a second collective, which all ranks are told of.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._capacities: dict[Hashable, _Capacities] = {}

    def exchange(
        self, like: Hashable, notes: Sequence[int], data: torch.Tensor, lengths: Sequence[int]
    ) -> Received:
        """Send each rank its part of ``data``, and ``notes`` to all; collective.

        ``like`` names the earlier messages that these are about as long as; it is the same on all
        ranks, as the number of ``notes``, int64, and the dtype are.  ``data``, int32 or int64, has
        the parts for all ranks one after the other, of these lengths.
        """
        group = self._group
        capacities = self._capacities.setdefault(
            like, _Capacities([_SPARE] * group.size, [_SPARE] * group.size)
        )
        exceeds = any(n > capacity for n, capacity in zip(lengths, capacities.sending, strict=True))
        heads = torch.tensor([[exceeds, length, *notes] for length in lengths], dtype=torch.int64)
        heads = _to(heads, data.device).view(data.dtype)
        width = heads.shape[1]
        padding = data.new_zeros(max(capacities.sending))
        parts = data.split(list(lengths))
        pieces: list[torch.Tensor] = []
        for head, part, capacity in zip(heads, parts, capacities.sending, strict=True):
            pieces += head, part[:capacity], padding[: capacity - len(part[:capacity])]
        received = group.all_to_all(
            torch.cat(pieces),
            [width + capacity for capacity in capacities.sending],
            [width + capacity for capacity in capacities.receiving],
        ).split([width + capacity for capacity in capacities.receiving])
        arrived_heads = torch.stack([part[:width] for part in received]).view(torch.int64)
        heads_of: list[list[int]] = arrived_heads.tolist()
        coming = [head[1] for head in heads_of]
        first = [part[width:][:n] for part, n in zip(received, coming, strict=True)]
        if any(head[0] for head in heads_of):
            rest = torch.cat(
                [p[capacity:] for p, capacity in zip(parts, capacities.sending, strict=True)]
            )
            left = [_excess(coming, capacities.receiving), _excess(lengths, capacities.sending)]
            arrived = group.all_to_all(rest, left[1], left[0]).split(left[0])
            first = [piece for pair in zip(first, arrived, strict=True) for piece in pair]
        capacities.sending = _next_capacities(lengths, capacities.sending)
        capacities.receiving = _next_capacities(coming, capacities.receiving)
        return Received([head[_HEAD:] for head in heads_of], torch.cat(first), coming)


def _excess(lengths: Sequence[int], capacities: Sequence[int]) -> list[int]:
    return [max(0, length - capacity) for length, capacity in zip(lengths, capacities, strict=True)]


def _next_capacities(lengths: Sequence[int], capacities: Sequence[int]) -> list[int]:
    """Room for a little more than now, and less and less of what was needed once."""
    return [
        max(length + length // 8 + _SPARE, capacity - capacity // 8)
        for length, capacity in zip(lengths, capacities, strict=True)
    ]


def _to(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        numbers = numbers.pin_memory()  # the copy does not wait for other work
    return numbers.to(device, non_blocking=True)
