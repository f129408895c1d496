"""The few calls of the CUDA runtime that a store in GPU memory needs.

torch's allocator keeps memory for itself and hands it out in pieces; what other processes map
has to be a block of its own, and to go back to the GPU when it is freed.  The calls are made
through CuPy, which is imported when a store is built on GPUs and not before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.fabric import DriverError, FabricMemory
from dgl_mgpu.errors import (
    ConfigError,
    DeviceMemoryError,
    DGLMGPUError,
    PeerAccessError,
    UnavailableError,
)
from dgl_mgpu.machine import Topology, probe
from dgl_mgpu.machine.links import is_measured
from dgl_mgpu.machine.probe import gpu_id, rates
from dgl_mgpu.ops.device import cupy

# Allocations share a handle with their neighbours unless they fill pages of this size, which
# are what the driver maps for another process.
_PAGE = 2 << 20
# What handles begin with, of memory that processes of other machines can map and of such that only
# those of this machine can.
_FABRIC, _IPC = b"F", b"I"
# CUDA's names for these are not in CuPy's API.
_OUT_OF_MEMORY = 2
_REGISTER_PORTABLE_MAPPED = 1 | 2
_REGISTERED_ADDRESS_IS_DEVICE_ADDRESS = 91


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU as a rank finds it."""

    gpu: str  # the same for all ranks that use it, whatever number they know it by
    free: int  # bytes
    total: int


class Runtime:
    """Memory of one rank's GPU, torch's current device.  Tests put a machine without GPUs here.

    ``device`` is where the tensors of views go, which decides what device operators run on.  Raises
    UnavailableError if CuPy cannot be imported, or the driver gives registered host memory another
    address.
    """

    #: Memory that other machines can map, once some was asked for, where there is such.
    _fabric: FabricMemory | None = None

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()
        self.device = torch.device("cuda", self._index)
        self._runtime = cupy().cuda.runtime
        if not self._runtime.deviceGetAttribute(_REGISTERED_ADDRESS_IS_DEVICE_ADDRESS, self._index):
            raise UnavailableError(
                f"keep a store on {self.device}",
                "this GPU cannot read host memory at the host's addresses",
                "use store.device=cpu",
            )

    def device_info(self) -> DeviceInfo:
        return DeviceInfo(gpu_id(self._index), *torch.cuda.mem_get_info(self._index))

    def gpus(self) -> list[str]:
        """All GPUs that this process sees, by what `DeviceInfo.gpu` is."""
        return [gpu_id(index) for index in range(torch.cuda.device_count())]

    def machine(self) -> Topology:
        """The machine they are in, numbered as in `gpus`, with all of their memory; uses none."""
        return probe(free_memory=False)

    def is_measured(self, machine: Topology, gpus: Sequence[str]) -> bool:
        """Whether all bandwidths of some of them are known."""
        return is_measured(machine, gpus)

    def has_fabric_handles(self) -> bool:
        """Whether other machines that NVLink joins to this one can map its GPU's memory."""
        with self._on_device():
            return self._find_fabric() is not None

    def allocate(self, nbytes: int, joined: bool = False) -> int:
        """The address of new memory; DeviceMemoryError if there is too little.

        With ``joined`` machines that NVLink joins can map it.
        """
        with self._on_device():
            try:
                fabric = self._find_fabric() if joined else None
                if fabric is not None:
                    return fabric.allocate(nbytes)
                return self._runtime.malloc(-(-nbytes // _PAGE) * _PAGE)
            except DriverError as error:
                if not error.lacks_memory:
                    raise
            except self._runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
        raise out_of_memory(str(self.device), nbytes, torch.cuda.mem_get_info(self._index)[0])

    def free(self, address: int) -> None:
        """Give memory back, once no other process maps it."""
        with self._on_device():
            if self._fabric is not None and address in self._fabric:
                self._fabric.free(address)
            else:
                self._runtime.free(address)

    def share(self, address: int) -> bytes:
        """A handle of allocated memory, for other processes; PeerAccessError if there are none."""
        action = f"share memory of {self.device} with other ranks"
        fix = "hide its links (store.links), or use store.device=cpu"
        with self._raising(PeerAccessError, action, fix):
            if self._fabric is not None and address in self._fabric:
                return _FABRIC + self._fabric.export(address)
            return _IPC + self._runtime.ipcGetMemHandle(address)

    def open(self, handle: bytes) -> int:
        """Map another process's memory; PeerAccessError if it cannot be."""
        action = f"map another rank's GPU memory on {self.device}"
        fix = "hide the link between the two (store.links), or use store.device=cpu"
        kind, handle = handle[:1], handle[1:]
        with self._raising(PeerAccessError, action, fix):
            if kind == _IPC:
                return self._runtime.ipcOpenMemHandle(handle)
            fabric = self._find_fabric()
            if fabric is not None:
                return fabric.open(handle)
        raise PeerAccessError(action, "this machine is not among those that NVLink joins", fix)

    def close(self, address: int) -> None:
        with self._on_device():
            if self._fabric is not None and address in self._fabric:
                self._fabric.close(address)
            else:
                self._runtime.ipcCloseMemHandle(address)

    def _find_fabric(self) -> FabricMemory | None:
        if self._fabric is None:
            self._fabric = FabricMemory.find(self._index)
        return self._fabric

    def register(self, address: int, nbytes: int) -> None:
        """Let kernels use host memory at the address that the host knows it by."""
        action = f"map {nbytes:,} bytes of host memory on {self.device}"
        fix = (
            "raise the limit on locked memory (ulimit -l), or keep less in host memory "
            "(store.host_memory)"
        )
        with self._raising(partial(DeviceMemoryError, needed=nbytes), action, fix):
            self._runtime.hostRegister(address, nbytes, _REGISTER_PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        with self._on_device():
            self._runtime.hostUnregister(address)

    def upload(self, address: int, data: np.ndarray) -> None:
        """Copy contiguous host memory to the GPU, and wait."""
        with self._on_device():
            runtime = self._runtime
            runtime.memcpy(address, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)
            # A copy from pageable memory returns once that is read.
            runtime.streamSynchronize(0)

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of GPU memory, uint8."""
        data = np.empty(nbytes, np.uint8)
        with self._on_device():
            runtime = self._runtime
            runtime.memcpy(data.ctypes.data, address, nbytes, runtime.memcpyDeviceToHost)
        return data

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses that this GPU reaches."""
        with self._on_device():
            self._runtime.memcpy(target, source, nbytes, self._runtime.memcpyDefault)
            self._runtime.streamSynchronize(0)

    def rates(self, copies: Sequence[tuple[int, int]], nbytes: int, repeats: int) -> list[float]:
        """GB/s of copies (target, source) between addresses that this GPU reaches, all at once."""

        def copy(target: int, source: int) -> None:
            runtime, stream = self._runtime, torch.cuda.current_stream().cuda_stream
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)

        with self._on_device():
            return rates([(self.device, partial(copy, *pair)) for pair in copies], nbytes, repeats)

    def synchronize(self) -> None:
        with self._on_device():
            self._runtime.deviceSynchronize()

    def trim(self) -> None:
        """Give back what torch's allocator keeps for later."""
        torch.cuda.empty_cache()

    @contextmanager
    def _raising(
        self, kind: Callable[[str, str, str], DGLMGPUError], action: str, fix: str
    ) -> Iterator[None]:
        with self._on_device():
            try:
                yield
            except (self._runtime.CUDARuntimeError, DriverError) as error:
                raise kind(action, str(error), fix) from error

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        # Whatever thread this is: memory may be freed by the garbage collector in any.
        before = self._runtime.getDevice()
        self._runtime.setDevice(self._index)
        try:
            yield
        finally:
            self._runtime.setDevice(before)


def find_runtime() -> Runtime | None:
    """The runtime of this process's GPU, or None where torch sees none.

    Raises UnavailableError, as :class:`Runtime`.
    """
    return Runtime() if torch.cuda.is_available() else None


def choose_runtime(device: str, ranks: Communicator) -> Runtime | None:
    """The GPU memory that all ranks keep their part of a store in, or None for shared memory.

    Collective.  Of the devices (`dgl_mgpu.config.store_options.DEVICES`) 'auto' takes GPUs where
    every rank has one.  Raises ConfigError if ranks ask for different devices;
    UnavailableError if 'cuda' is asked for and a rank has no GPU or no CuPy.
    """

    def look() -> tuple[Runtime | None, str]:
        if device == "cpu":
            return None, ""
        try:
            runtime = find_runtime()
        except UnavailableError as error:
            if device == "auto":
                warnings.warn(f"the store stays in shared memory: {error}", stacklevel=4)
            return None, str(error)
        return runtime, "" if runtime is not None else "torch sees no GPU"

    runtime, missing = ranks.run_all("find the ranks' GPUs", look)
    answers = ranks.all_gather((device, missing))
    devices = {device for device, _ in answers}
    if len(devices) > 1:
        raise ConfigError(
            "choose the store's device",
            f"the ranks ask for different ones, {sorted(devices)}",
            "pass the same device on every rank",
        )
    for rank, (_, reason) in enumerate(answers):
        if reason and device == "cuda":
            raise UnavailableError(
                "keep a store on GPUs",
                f"rank {rank} cannot use one ({reason})",
                "fix that, or use device 'auto'",
            )
    return None if any(reason for _, reason in answers) else runtime


def out_of_memory(where: str, needed: int, available: int) -> DeviceMemoryError:
    """What to raise when a GPU has too little room for a store's part."""
    return DeviceMemoryError(
        f"place {needed:,} bytes of a store on {where}",
        f"{available:,} bytes are free, which is {needed - available:,} too few",
        "lower store.gpu_memory, or free memory on that GPU",
        needed,
        available,
    )
