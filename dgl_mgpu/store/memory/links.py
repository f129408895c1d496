"""What the ranks' GPUs read a second, measured once on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import DeviceInfo, Runtime
from dgl_mgpu.errors import DeviceMemoryError, PeerAccessError
from dgl_mgpu.machine import links
from dgl_mgpu.store.memory.device import DeviceMemory
from dgl_mgpu.store.memory.machine import machine, with_access
from dgl_mgpu.store.memory.segment import Segment

_MEASURE = "measure what GPUs read a second"
#: Of a copy within a GPU, more than its cache has; and over links.
_OWN_BYTES, _LINK_BYTES = 256 << 20, 64 << 20
#: How often a copy is repeated, alone and while the others copy: these do not begin at once.
_ALONE, _TOGETHER = 8, 32


def measure_links(
    runtime: Runtime, ranks: Communicator, access: np.ndarray, device_infos: Sequence[DeviceInfo]
) -> None:
    """Have the bandwidths of all ranks' GPUs kept in :data:`dgl_mgpu.machine.links.FOUND`.

    Each rank times copies from its own GPU's memory, from that of the others that it reads
    (``access``, of `prove_access`) and from the host: in turns, and then all at once.  Takes some
    tenths of a second and, meanwhile, half a GiB of each GPU.  Nothing is measured where all is
    known, where ranks share a GPU, or where there is too little memory.

    Collective.  Raises RankFailedError if another rank failed.
    """
    gpus = [info.gpu for info in device_infos]
    if len(set(gpus)) < ranks.size:
        return

    def is_known() -> bool:
        here = with_access(machine("auto", ranks.size, runtime, device_infos), access)
        return runtime.is_measured(here, gpus)

    if ranks.broadcast_from_rank0(_MEASURE, is_known):
        return
    ref_counts_bytes = 8 * ranks.size
    ref_counts: Segment | None = None

    def make_ref_counts() -> Path:
        nonlocal ref_counts
        ref_counts = Segment.create(ref_counts_bytes)
        return ref_counts.path

    path = ranks.broadcast_from_rank0(_MEASURE, make_ref_counts)
    blocks = ranks.run_all(
        _MEASURE,
        lambda: _Blocks(runtime, Segment.attach(path, ref_counts_bytes), ranks.rank),
    )
    try:
        answers = ranks.all_gather(ranks.run_all(_MEASURE, blocks.allocate))
        handles = [handle for handle in answers if handle is not None]
        if len(handles) < ranks.size:
            return
        peers = [int(peer) for peer in np.flatnonzero(access[ranks.rank]) if peer != ranks.rank]
        ranks.run_all(_MEASURE, lambda: blocks.map([handles[peer] for peer in peers]))
        me, of_peers = gpus[ranks.rank], [gpus[peer] for peer in peers]
        found: dict[str, float] = {}
        for turn in range(ranks.size):
            if turn == ranks.rank:
                found |= ranks.run_all(_MEASURE, lambda: blocks.alone(me, of_peers))
            else:
                ranks.run_all(_MEASURE, lambda: None)
        ways = ranks.run_all(_MEASURE, blocks.from_all_peers)
        if len(peers) > 1:
            found[links.reads([me], *of_peers)] = ways
        of_host = sum(ranks.all_gather(ranks.run_all(_MEASURE, blocks.from_host)))
        if ranks.size > 1:
            found[links.reads(gpus, links.HOST)] = of_host
        everyone = ranks.all_gather(found)
        ranks.broadcast_from_rank0(
            _MEASURE,
            lambda: links.FOUND.keep(
                {key: rate for each in everyone for key, rate in each.items()}
            ),
        )
    finally:
        blocks.close()


class _Blocks:
    """Memory that one rank copies from and to."""

    def __init__(self, runtime: Runtime, ref_counts: Segment, rank: int) -> None:
        self._runtime = runtime
        self._memory = DeviceMemory(runtime, ref_counts, rank)
        self._host: np.ndarray | None = None
        self._peers: list[int] = []

    def allocate(self) -> bytes | None:
        """What other ranks map this GPU's memory by, if they can; None if there is too little."""
        try:
            self._memory.allocate(2 * _OWN_BYTES)
            host = np.ones(_LINK_BYTES, np.uint8)
            self._runtime.register(host.ctypes.data, host.nbytes)
            self._host = host
            return self._memory.share()
        except DeviceMemoryError:
            return None
        except PeerAccessError:
            return b""

    def map(self, handles: Sequence[bytes]) -> None:
        self._peers = [self._memory.open(handle) for handle in handles]

    def alone(self, me: str, peers: Sequence[str]) -> dict[str, float]:
        """GB/s of each way, one after another."""
        own, target = self._memory.block, self._memory.block + _OWN_BYTES
        (rate,) = self._runtime.rates([(target, own)], _OWN_BYTES, _ALONE)
        found = {links.reads([me], me): rate}
        for peer, address in zip(peers, self._peers, strict=True):
            (rate,) = self._runtime.rates([(target, address)], _LINK_BYTES, _ALONE)
            found[links.reads([me], peer)] = rate
        found[links.reads([me], links.HOST)] = self._of_host(_ALONE)
        return found

    def from_all_peers(self) -> float:
        """GB/s of all peers together, 0 where there are none."""
        if not self._peers:
            return 0.0
        target, part = self._memory.block + _OWN_BYTES, _LINK_BYTES
        count = _OWN_BYTES // part
        copies = [
            (target + turn % count * part, address) for turn, address in enumerate(self._peers)
        ]
        return sum(self._runtime.rates(copies, part, _TOGETHER))

    def from_host(self) -> float:
        return self._of_host(_TOGETHER)

    def _of_host(self, repeats: int) -> float:
        assert self._host is not None
        target = self._memory.block + _OWN_BYTES
        return self._runtime.rates([(target, self._host.ctypes.data)], _LINK_BYTES, repeats)[0]

    def close(self) -> None:
        if self._host is not None:
            self._runtime.unregister(self._host.ctypes.data)
        self._memory.close()
