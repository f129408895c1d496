"""Rows of several tables that machines send each other at once.

What goes to a machine is its rows of one table after the other, as bytes; those of each table begin
where kernels can load them at their widest.  Where rows are received, they are tiers of a table
before those that this machine has of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace as with_fields

import torch

from dgl_mgpu.comm.messages import to_device
from dgl_mgpu.ops import RowView
from dgl_mgpu.ops.device import current_stream
from dgl_mgpu.store.rounds import Spans
from dgl_mgpu.utils.rows import as_bytes

#: Bytes of a kernel's widest load.
_ALIGNMENT = 16

#: Rows, or ids, of each table, by machine.
Counts = Sequence[Sequence[int]]


def _num_bytes(counts: Counts, views: Sequence[RowView]) -> list[list[int]]:
    """Bytes of the rows of each table, by machine."""
    return [
        [-(-count * view.row_bytes // _ALIGNMENT) * _ALIGNMENT for count in of_table]
        for of_table, view in zip(counts, views, strict=True)
    ]


def num_bytes(counts: Counts, views: Sequence[RowView]) -> list[int]:
    """Bytes of the rows of all tables, by machine."""
    return [*map(sum, zip(*_num_bytes(counts, views), strict=True))]


def by_machine(tables: Sequence[torch.Tensor], counts: Counts) -> torch.Tensor:
    """Rows of tables, each with those for one machine after the other, as what machines are sent.

    They are uint8, of as many as :func:`num_bytes` says.
    """
    parts = []
    for rows, of_table in zip(tables, counts, strict=True):
        of_rows = as_bytes(rows)
        width = of_rows.shape[1]
        parts.append(of_rows.view(-1).split([count * width for count in of_table]))
    pieces = []
    for part in itertools.chain.from_iterable(zip(*parts, strict=True)):
        if len(part):
            pieces.append(part)
            if len(part) % _ALIGNMENT:
                pieces.append(part.new_empty(-len(part) % _ALIGNMENT))
    if not pieces:
        return parts[0][0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class ReceivedRows:
    """Rows of tables that machines have sent, and those that are here, as one table each."""

    def __init__(self) -> None:
        #: By table and stream, its tiers, for how much room, and these behind those of what is
        #: received.
        self._tiers: dict[tuple[object, int], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def views(
        self,
        tables: Sequence[object],
        views: Sequence[RowView],
        received: torch.Tensor,
        sent: Sequence[Spans],
        counts: Counts,
        room: int,
    ) -> list[RowView]:
        """A view of each table, of which ``views`` are of what is here.

        The rows ``received`` are those of as many ids as ``counts`` says, from where ``sent``
        begins in the message to each machine, which has this ``room``.  ``tables`` tell apart what
        tiers are kept of.
        """
        addresses = self._addresses(views, received, sent, counts)
        device, size = received.device, len(counts[0])
        first = size * room
        positions = torch.empty(0, dtype=torch.int64, device=device)  # ids are positions
        pointers = [view.pointers for view in views]
        of_received = to_device([*itertools.chain.from_iterable(addresses)], device).split(size)
        all_pointers = torch.cat(
            [*itertools.chain.from_iterable(zip(of_received, pointers, strict=True))]
        )
        parts = all_pointers.split([size + len(of_table) for of_table in pointers])
        return [
            with_fields(
                view,
                tiers=self._tiers_of(table, view, room, size),
                pointers=pointers,
                num_rows=first + (view.num_positions or view.num_rows),
                position=positions,
                owner=(view.owner, received),
                host_start=view.host_start if view.host_start < 0 else first + view.host_start,
                disk=None,
                address=0,
                num_positions=0,
            )
            for table, view, pointers in zip(tables, views, parts, strict=True)
        ]

    def _addresses(
        self,
        views: Sequence[RowView],
        received: torch.Tensor,
        sent: Sequence[Spans],
        counts: Counts,
    ) -> list[list[int]]:
        """Where the rows for each message's ids begin, by table and machine."""
        address = received.data_ptr()
        of_machines: list[list[int]] = []
        for machine, of_machine in enumerate(zip(*_num_bytes(counts, views), strict=True)):
            of_machines.append([])
            for view, spans, nbytes in zip(views, sent, of_machine, strict=True):
                of_machines[-1].append(address - spans.begins[machine] * view.row_bytes)
                address += nbytes
        return [[*of_table] for of_table in zip(*of_machines, strict=True)]

    def _tiers_of(self, table: object, view: RowView, room: int, size: int) -> torch.Tensor:
        device = view.tiers.device
        # What one stream has made, another might read too early.
        key = table, current_stream(device) if device.type == "cuda" else 0
        known = self._tiers.get(key)
        if known is not None and known[0] is view.tiers and known[1] == room:
            return known[2]
        first = size * room
        of_machines = [[n * room, (n + 1) * room, 1, n] for n in range(size)]
        here = view.tiers + to_device([first, first, 0, size], device)
        tiers = torch.cat([to_device(of_machines, device), here])
        self._tiers[key] = view.tiers, room, tiers
        return tiers
