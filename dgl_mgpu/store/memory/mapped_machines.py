"""Tables of a store over machines that NVLink joins: kernels read other machines' GPUs directly.

Each machine plans its part and keeps it, as elsewhere.  Where ranks of all machines can map each
other's GPU memory (:mod:`dgl_mgpu.comm.fabric`), which is proved by reading it, what other machines
have on their GPUs becomes tiers of a machine's own tables, in front of those that it has itself.
Rows that others have in host memory are still asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import PeerAccessError
from dgl_mgpu.store.memory.device import DeviceMemory
from dgl_mgpu.store.memory.table import Table
from dgl_mgpu.store.memory.tables import Store

log = logging.getLogger(__name__)

_ACTION = "map the GPUs of other machines"
#: Of each rank's memory, which others read to see that they have mapped it.
_PROOF_BYTES = 4096


class _Tier(NamedTuple):
    """Rows on a machine's GPUs at positions ``[start, stop)``, dealt out modulo over the parts.

    ``copies`` are those of each part: whose rank's block, from where in it, and how many bytes.
    """

    start: int
    stop: int
    copies: list[list[tuple[int, int, int]]]


class _Offer(NamedTuple):
    """What a rank tells all others: its block's handle, if it has a block and others may map it,
    and how it begins; and a machine's first rank, how each table lies on its GPUs."""

    may_be_mapped: bool
    handle: bytes
    begin: bytes
    #: By table: whether rows have an order of their own, and tiers.
    tables: dict[str, tuple[bool, list[_Tier]]]


def map_other_machines(
    store: Store, machines: Communicator, bounds: Mapping[str, Sequence[int]]
) -> bool:
    """Have a store's tables read what other machines have on their GPUs, too, where NVLink joins
    these, and know whether they read all rows then (`Table.reads_all`).

    Collective of all ranks of the job; ``machines`` are those at this one's place of each, and
    ``bounds`` the first row of each machine and the end of the last, by the order in which rows are
    kept.  Returns whether all tables read all rows, so that no rank need ask another machine.
    """
    everyone = Communicator.of_all_machines()
    mine = everyone.run_all(_ACTION, lambda: _offer(store))
    here, gpu = machines.rank, store.gpu
    offers: dict[tuple[int, int], _Offer] = dict(everyone.all_gather(((here, store.rank), mine)))
    if gpu is None or not all(offer.may_be_mapped for offer in offers.values()):
        return False
    blocks = everyone.run_all(_ACTION, lambda: _mapped_blocks(gpu, offers, here))
    if not all(everyone.all_gather(blocks is not None)):
        return False
    assert blocks is not None
    of_machines = {machine: offer.tables for (machine, rank), offer in offers.items() if rank == 0}
    at_owners = {
        order: _positions_at_owners(store, machines, order, firsts)
        for order, firsts in sorted(bounds.items())
    }

    def read() -> set[str]:
        """The tables of which this rank reads all rows then."""
        reads_all = set()
        for name, table in store.tables.items():
            order = store.orders[name]
            if order and not table.keeps_all_rows:
                others = _Others(table, name, of_machines, blocks, bounds[order], at_owners[order])
                others.are_read_by(here, store.rank)
            if table.keeps_all_rows or bool((table.view.position >= 0).all()):
                reads_all.add(name)
        return reads_all

    of_all = set.intersection(*everyone.all_gather(everyone.run_all(_ACTION, read)))
    for name in of_all:
        store.tables[name].reads_all = True
    if everyone.rank == 0:
        log.info(
            "NVLink joins the machines: GPUs read those of others directly, and all rows of %d of "
            "%d tables",
            len(of_all),
            len(store.tables),
        )
    return len(of_all) == len(store.tables)


def _offer(store: Store) -> _Offer:
    gpu, layout = store.gpu, store.layout
    if gpu is None:
        return _Offer(False, b"", b"", {})
    tables: dict[str, tuple[bool, list[_Tier]]] = {}
    for name in layout.formats if store.rank == 0 else ():
        tiers = [
            _Tier(tier.start, tier.stop, layout.copies(name, index))
            for index, tier in enumerate(layout.plan.tables[name].tiers)
            if tier.memory == "gpu"
        ]
        tables[name] = bool(layout.orders[name]), tiers
    if not gpu.block:
        return _Offer(True, b"", b"", tables)
    try:
        handle = gpu.share()
    except PeerAccessError:
        handle = b""
    nbytes = min(_PROOF_BYTES, layout.block_bytes(store.rank))
    begin = gpu.runtime.download(gpu.block, nbytes).tobytes()
    return _Offer(gpu.runtime.is_for_machines(handle), handle, begin, tables)


def _mapped_blocks(
    gpu: DeviceMemory, offers: Mapping[tuple[int, int], _Offer], here: int
) -> dict[tuple[int, int], int] | None:
    """The addresses of the blocks of all other machines' ranks; None if one cannot be read."""
    blocks = {}
    for (machine, rank), offer in offers.items():
        if machine == here or not offer.handle:
            continue
        try:
            blocks[machine, rank] = gpu.open(offer.handle)
            begin = gpu.runtime.download(blocks[machine, rank], len(offer.begin))
        except RuntimeError:  # the memory cannot be mapped, or cannot be read
            return None
        if begin.tobytes() != offer.begin:
            return None
    return blocks


def _positions_at_owners(
    store: Store, machines: Communicator, order: str, firsts: Sequence[int]
) -> torch.Tensor:
    """Where each row of an order is at the machine that owns it; collective of ``machines``."""
    own = slice(firsts[machines.rank], firsts[machines.rank + 1])
    ordered = (table for name, table in store.tables.items() if store.orders[name] == order)
    table = next(ordered, None)
    position = torch.arange(own.start, own.stop, device=store.device)
    if table is not None:
        position = table.view.position[own].long()
    (every,) = machines.all_gather_cat(_ACTION, [position])
    return every


class _Others:
    """A table's rows on other machines' GPUs."""

    def __init__(
        self,
        table: Table,
        name: str,
        of_machines: Mapping[int, Mapping[str, Any]],
        blocks: Mapping[tuple[int, int], int],
        bounds: Sequence[int],
        at_owners: torch.Tensor,
    ) -> None:
        self._table, self._name, self._of_machines = table, name, of_machines
        self._blocks, self._bounds, self._at_owners = blocks, bounds, at_owners

    def are_read_by(self, machine: int, rank: int) -> None:
        """Have the table of a machine's rank read them, too."""
        view = self._table.view
        if getattr(view, "disk", None) is not None:  # whose cache goes by the table's own positions
            return
        tiers: list[list[int]] = []
        pointers: list[list[int]] = []
        own, rows = view.position.long(), 0
        position = torch.full_like(own, -1)
        for other, tables in self._of_machines.items():
            if other == machine:
                continue
            is_ordered, of_other = tables[self._name]
            run = slice(self._bounds[other], self._bounds[other + 1])
            at = self._at_owners[run]
            if not is_ordered:
                at = torch.arange(run.start, run.stop, device=own.device)
            for start, stop, copies in of_other:
                is_there = (at >= start) & (at < stop)
                position[run] = torch.where(is_there, at - start + rows, position[run])
                tiers.append([rows, rows + stop - start, len(copies), len(pointers)])
                for part, of_part in enumerate(copies):
                    holder, offset, nbytes = of_part[rank % len(of_part)]
                    block = self._blocks.get((other, holder), 0)  # none for no bytes
                    num_rows = len(range(start + part, stop, len(copies)))
                    segment = self._table.gpu_segment(block + offset, nbytes)
                    pointers.append(self._table.format.pointers(segment, num_rows))
                rows += stop - start
        position = torch.where(own >= 0, own + rows, position)
        if tiers:
            self._table.also_read(tiers, pointers, position)
