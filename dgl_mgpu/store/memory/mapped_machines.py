"""Tables of a store over machines that NVLink joins: kernels read other machines' GPUs directly.

Each machine plans its part and keeps it, as elsewhere.  Where ranks of all machines can map each
other's GPU memory (:mod:`dgl_mgpu.comm.fabric`), which is proved by reading it, what other machines
have on their GPUs becomes tiers of a machine's own tables, in front of those that it has itself.
Rows that others have in host memory are still asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import PeerAccessError
from dgl_mgpu.store.memory.device import DeviceMemory
from dgl_mgpu.store.memory.table import Table, position_dtype, torch_dtype
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


class _Run(NamedTuple):
    """Rows at positions ``[start, stop)`` of a machine, which are at ``begin`` and on here."""

    machine: int
    is_ordered: bool  # whether its rows have an order of their own
    start: int
    stop: int
    begin: int


class _Offer(NamedTuple):
    """What a rank tells all others: its block's handle, and how the block begins; no bytes, if
    there is none.  A machine's first rank tells how each table lies on its GPUs."""

    reason: str  # why it cannot be mapped, if it cannot
    handle: bytes
    begin: bytes
    #: By table: whether rows have an order of their own, and tiers.
    tables: dict[str, tuple[bool, list[_Tier]]]


def are_joined(runtime: Runtime | None, ranks: Communicator, machines: Communicator) -> bool:
    """Whether all GPUs of all machines have memory that other machines may map; collective.

    ``ranks`` are those of this machine, ``machines`` those at this one's place of each.
    """

    def look() -> bool:
        return runtime is not None and runtime.has_fabric_handles()

    of_machine = machines.run_all(_ACTION, lambda: ranks.run_all(_ACTION, look))
    return all(ranks.all_gather(all(machines.all_gather(of_machine))))


def map_other_machines(
    store: Store, machines: Communicator, bounds: Mapping[str, Sequence[int]]
) -> bool:
    """Have a store's tables read what other machines have on their GPUs, too, and know whether they
    read all rows then (`Table.reads_all_rows`).

    Collective of all ranks of the job, whose memory was allocated for other machines; ``machines``
    are those at this one's place of each, and ``bounds`` the first row of each machine and the end
    of the last, by the order in which rows are kept.  Returns whether all tables read all rows, so
    that no rank need ask another machine.
    """
    everyone, gpu = Communicator.of_all_machines(), store.gpu
    assert gpu is not None
    mine = everyone.run_all(_ACTION, lambda: _offer(store, gpu))
    place = machines.rank, store.rank
    offers: dict[tuple[int, int], _Offer] = dict(everyone.all_gather((place, mine)))
    others = {of: offer for of, offer in offers.items() if of[0] != machines.rank}
    blocks: dict[tuple[int, int], int] = {}
    reasons = [offer.reason for offer in offers.values()]
    if not any(reasons):
        reason = everyone.run_all(_ACTION, lambda: _map_blocks(gpu, others, blocks))
        reasons = everyone.all_gather(reason)
    if any(reasons):
        handles = [offer.handle for offer in others.values()]  # of which some may be mapped
        everyone.run_all(_ACTION, lambda: gpu.unmap(handles))
        if everyone.rank == 0:
            reason = next(filter(None, reasons))
            log.warning(
                "other machines are asked over NCCL, as their GPUs cannot be read directly: %s",
                reason,
            )
        return False
    of_machines = {machine: offer.tables for (machine, rank), offer in others.items() if rank == 0}
    mapping = _Mapping(store, blocks, of_machines, bounds)
    own = everyone.run_all(_ACTION, lambda: mapping.own_positions(machines.rank))
    for order, position in own.items():
        (mapping.at_owners[order],) = machines.all_gather_cat(_ACTION, [position])
    reads_all = everyone.run_all(_ACTION, mapping.make)
    of_all = set.intersection(*everyone.all_gather(reads_all))
    for name in of_all:
        store.tables[name].reads_all_rows = True
    if everyone.rank == 0:
        log.info(
            "NVLink joins the machines: GPUs read those of others directly, and all rows of %d of "
            "%d tables",
            len(of_all),
            len(store.tables),
        )
    return len(of_all) == len(store.tables)


def _offer(store: Store, gpu: DeviceMemory) -> _Offer:
    layout = store.layout
    tables: dict[str, tuple[bool, list[_Tier]]] = {}
    for name in layout.formats if store.rank == 0 else ():
        tiers = [
            _Tier(tier.start, tier.stop, layout.copies(name, index))
            for index, tier in enumerate(layout.plan.tables[name].tiers)
            if tier.memory == "gpu"
        ]
        tables[name] = bool(layout.orders[name]), tiers
    if not gpu.block:
        return _Offer("", b"", b"", tables)
    try:
        handle = gpu.share()
    except PeerAccessError as error:
        return _Offer(str(error), b"", b"", tables)
    nbytes = min(_PROOF_BYTES, layout.block_bytes(store.rank))
    return _Offer("", handle, gpu.runtime.download(gpu.block, nbytes).tobytes(), tables)


def _map_blocks(
    gpu: DeviceMemory,
    others: Mapping[tuple[int, int], _Offer],
    blocks: dict[tuple[int, int], int],
) -> str:
    """Map the blocks of other machines' ranks to addresses; why one cannot be read, if so."""
    for of, offer in others.items():
        if not offer.handle:
            continue
        try:
            blocks[of] = gpu.open(offer.handle)
            begin = gpu.runtime.download(blocks[of], len(offer.begin))
        except RuntimeError as error:  # the memory cannot be mapped, or cannot be read
            return str(error)
        if begin.tobytes() != offer.begin:
            return f"rank {of[1]} of machine {of[0]} has other bytes than are read of it"
    return ""


class _Mapping:
    """Makes tiers of what other machines have on their GPUs.

    ``blocks`` are the addresses of their ranks' memory, and ``of_machines`` their tables.
    """

    def __init__(
        self,
        store: Store,
        blocks: Mapping[tuple[int, int], int],
        of_machines: Mapping[int, Mapping[str, tuple[bool, list[_Tier]]]],
        bounds: Mapping[str, Sequence[int]],
    ) -> None:
        self._store, self._blocks = store, blocks
        self._of_machines, self._bounds = of_machines, bounds
        #: By order, where each row is at the machine that owns it.
        self.at_owners: dict[str, torch.Tensor] = {}
        #: Those of tables that lie alike on all machines are one tensor.
        self._positions: dict[object, torch.Tensor] = {}

    def own_positions(self, machine: int) -> dict[str, torch.Tensor]:
        """By order, where the rows are that a machine, this one, owns."""
        known = {self._order(name): table for name, table in self._store.tables.items()}
        positions = {}
        for order, firsts in sorted(self._bounds.items()):
            own = slice(*firsts[machine : machine + 2])
            dtype = torch_dtype(position_dtype(firsts[-1]))
            positions[order] = (
                known[order].view.position[own]
                if order in known
                else torch.arange(own.start, own.stop, dtype=dtype, device=self._store.device)
            )
        return positions

    def make(self) -> set[str]:
        """Have all tables read what others have of them; the names of those that read all rows."""
        reads_all = set()
        for name, table in self._store.tables.items():
            # A cache of rows on disk goes by the table's own positions.
            if self._order(name) and not table.keeps_all_rows and not table.caches_disk:
                self._extend(name, table)
            if table.keeps_all_rows or bool((table.view.position >= 0).all()):
                reads_all.add(name)
        return reads_all

    def _order(self, name: str) -> str:
        return self._store.layout.orders[name]

    def _extend(self, name: str, table: Table) -> None:
        tiers: list[list[int]] = []
        pointers: list[list[int]] = []
        runs: list[_Run] = []
        rank, rows = self._store.rank, 0
        for machine, tables in self._of_machines.items():
            is_ordered, of_machine = tables[name]
            for start, stop, copies in of_machine:
                runs.append(_Run(machine, is_ordered, start, stop, rows))
                tiers.append([rows, rows + stop - start, len(copies), len(pointers)])
                for part, of_part in enumerate(copies):
                    holder, offset, nbytes = of_part[rank % len(of_part)]
                    block = self._blocks.get((machine, holder), 0)  # none for no bytes
                    num_rows = len(range(start + part, stop, len(copies)))
                    segment = table.gpu_segment(block + offset, nbytes)
                    pointers.append(table.format.pointers(segment, num_rows))
                rows += stop - start
        if not tiers:
            return
        key = self._order(name), table.num_kept, *runs
        if key not in self._positions:
            self._positions[key] = self._position(self._order(name), table, runs, rows)
        table.also_read(tiers, pointers, self._positions[key])

    def _position(self, order: str, table: Table, runs: Sequence[_Run], rows: int) -> torch.Tensor:
        """Positions in others' tiers, of ``rows`` rows, and in the table's own, behind them."""
        own = table.view.position
        dtype = torch_dtype(position_dtype(rows + table.num_kept))
        position = torch.full(own.shape, -1, dtype=dtype, device=own.device)
        for run in runs:
            owned = slice(*self._bounds[order][run.machine : run.machine + 2])
            at = self.at_owners[order][owned]
            if not run.is_ordered:
                at = torch.arange(owned.start, owned.stop, device=own.device)
            is_there = (at >= run.start) & (at < run.stop)
            position[owned][is_there] = at[is_there].to(dtype) - run.start + run.begin
        is_kept = own >= 0
        position[is_kept] = own[is_kept].to(dtype) + rows
        return position
