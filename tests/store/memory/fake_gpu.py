"""GPUs that are not there: their memory is shared memory, so that every rank can map it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.errors import PeerAccessError
from dgl_mgpu.machine import Topology, preset
from dgl_mgpu.store.memory.device import _is_alive as is_alive
from dgl_mgpu.store.memory.device import _process_stamp as process_stamp
from dgl_mgpu.store.memory.segment import Segment

#: After a block's bytes, eight for each rank: the process that has the block open, or 0.
_MAPPERS = 8 * 8


class FakeRuntime:
    """One rank's GPU.

    Parameters
    ----------
    rank : int
    gpu : int
        Which GPU it is; ranks may share one.
    memory : int
        Bytes of each GPU.
    refused, garbled : set of (int, int)
        Pairs (reader, owner) of ranks: mapping fails, or copies are something else.
    unshared : set of int
        Ranks whose memory gets no handle.
    fail_upload : bool
        Whether uploads larger than a page fail.
    misread : bool
        Whether other ranks' memory is read as something else.
    joined : bool
        Whether NVLink joins the machines, so that all can map memory which is allocated for that.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        rank,
        num_gpus,
        gpu=None,
        memory=64 << 30,
        refused=(),
        garbled=(),
        unshared=(),
        fail_upload=False,
        misread=False,
        joined=False,
    ) -> None:
        self.rank = rank
        self.gpu = rank if gpu is None else gpu
        self.num_gpus = num_gpus
        self.memory = memory
        self.refused, self.garbled, self.unshared = set(refused), set(garbled), set(unshared)
        self.fail_upload = fail_upload
        self.misread, self.joined = misread, joined
        self.over_machines: set[int] = set()
        self.blocks: dict[int, Segment] = {}
        self.opened: dict[int, tuple[Segment, int]] = {}
        self.registered: dict[int, int] = {}
        self.most_bytes = 0

    @property
    def used(self) -> int:
        return sum(block.nbytes - _MAPPERS for block in self.blocks.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated, mapped or registered."""
        return not (self.blocks or self.opened or self.registered)

    def device_info(self) -> cuda_runtime.DeviceInfo:
        return cuda_runtime.DeviceInfo(f"fake-{self.gpu}", self.memory - self.used, self.memory)

    def gpus(self) -> list[str]:
        return [f"fake-{gpu}" for gpu in range(self.num_gpus)]

    def machine(self) -> Topology:
        return preset("hgx-h200", self.num_gpus)

    def is_measured(self, machine: Topology, gpus: list[str]) -> bool:
        return True

    def rates(self, copies: list[tuple[int, int]], nbytes: int, repeats: int) -> list[float]:
        """GB/s that tell what is read: 1000 this GPU's memory, 100 and the rank a peer's, 50 the
        host's; half as much of what is repeated often, as when all copy at once."""
        rates = []
        for target, source in copies:
            if source not in self.registered:
                self.copy(target, source, 8)
            owners = [
                owner
                for base, (block, owner) in self.opened.items()
                if base <= source < base + block.nbytes
            ]
            rate = 100.0 + owners[0] if owners else 50.0 if source in self.registered else 1000.0
            rates.append(rate / 2 if repeats > 8 else rate)
        return rates

    def allocate(self, nbytes: int, joined: bool = False) -> int:
        if nbytes > self.memory - self.used:
            raise cuda_runtime.out_of_memory(f"fake-{self.gpu}", nbytes, self.memory - self.used)
        block = Segment.create(nbytes + _MAPPERS)
        block.bytes[:nbytes] = 0xA5  # a GPU's memory is not zero at first
        self.blocks[block.address] = block
        if joined:
            self.over_machines.add(block.address)
        self.most_bytes = max(self.most_bytes, self.used)
        return block.address

    def free(self, address: int) -> None:
        block = self.blocks.pop(address)
        # The driver unmaps what a process had that was killed.
        mappers = [mark for mark in self._mappers(block).tolist() if is_alive(mark)]
        # What other machines may map goes with its last mapping.
        assert not mappers or address in self.over_machines, "freed while another has it mapped"
        self.over_machines.discard(address)

    def share(self, address: int) -> bytes:
        block = self.blocks[address]
        if self.rank in self.unshared:
            raise PeerAccessError("share", "refused", "do not")
        return f"{self.rank}|{block.nbytes}|{block.path}".encode()

    def has_fabric_handles(self) -> bool:
        return self.joined

    def open(self, handle: bytes) -> int:
        owner, nbytes, path = handle.decode().split("|")
        assert int(owner) != self.rank, "CUDA does not open a handle where it was made"
        if (self.rank, int(owner)) in self.refused:
            raise PeerAccessError("map", "refused", "do not")
        block = Segment.attach(Path(path), int(nbytes))
        self._mappers(block)[self.rank] = process_stamp(os.getpid())
        self.opened[block.address] = block, int(owner)
        return block.address

    def close(self, address: int) -> None:
        self._mappers(self.opened.pop(address)[0])[self.rank] = 0

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.registered, "registered twice"
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def upload(self, address: int, data: np.ndarray) -> None:
        if self.fail_upload and data.nbytes > 4096:
            raise RuntimeError("the bus is on fire")
        self._at(address, data.nbytes)[:] = data.reshape(-1).view(np.uint8)

    def download(self, address: int, nbytes: int) -> np.ndarray:
        data = self._at(address, nbytes).copy()
        return data ^ 1 if self.misread and address in self.opened else data

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._at(target, nbytes)[:] = self._at(source, nbytes)
        for base, (block, owner) in self.opened.items():
            if base <= source < base + block.nbytes and (self.rank, owner) in self.garbled:
                self._at(target, nbytes)[-1] ^= 1

    def synchronize(self) -> None:
        pass

    def trim(self) -> None:
        pass

    @staticmethod
    def _mappers(block: Segment) -> np.ndarray:
        return block.bytes[-_MAPPERS:].view(np.int64)

    def _at(self, address: int, nbytes: int) -> np.ndarray:
        for block in (*self.blocks.values(), *(block for block, _ in self.opened.values())):
            offset = address - block.address
            if offset >= 0 and offset + nbytes <= block.nbytes - _MAPPERS:
                return block.bytes[offset : offset + nbytes]
        raise AssertionError("no such GPU memory is mapped here")
