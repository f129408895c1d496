"""Staged broadcast: in each round one rank sends all of its rows to all others.

MG-GCN, section 4.3, with its two buffers: one that is read while the other one fills.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange.messages import Message
from dgl_mgpu.distributed.exchange.schedule import Arriving, CommSchedule, Returning, nothing
from dgl_mgpu.distributed.exchange.wire_format import sendable
from dgl_mgpu.distributed.local_part import Part


class Broadcast(CommSchedule):
    """A round for each rank, whose rows it has."""

    def __init__(self, part: Part, group: dist.ProcessGroup | None) -> None:
        super().__init__(part, group)
        self.own_round = part.rank

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        part, src = self.part, self.part.src
        own = torch.arange(part.num_own_src, device=part.halo.device) + src.bounds[part.rank]
        positions = torch.cat([own, part.halo])
        owners = src.owners(positions)
        bounds = torch.tensor(src.bounds, device=positions.device)
        sizes = [src.count(rank) for rank in range(src.num_ranks)]
        return owners, positions - bounds[owners], sizes

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        mine = number == self.part.rank
        room = (
            rows.contiguous()
            if mine
            else rows.new_empty(self.part.src.count(number), *rows.shape[1:])
        )
        message = None
        if self.group is not None and room.numel():
            work = dist.broadcast(sendable(room), group=self.group, group_src=number, async_op=True)
            message = Message(work, room)

        def arrived() -> torch.Tensor:
            # Of own rows, too: they may be overwritten as soon as sums are there.
            if message is not None:
                message.wait()
            return room

        return arrived

    def start_return(self, number: int, rows: torch.Tensor) -> Returning:
        if self.group is None or not rows.numel():
            return Returning(nothing, nothing)
        work = dist.reduce(rows, group=self.group, group_dst=number, async_op=True)
        return Returning(Message(work, rows).wait, nothing)
