"""GPU memory that processes of other machines can map, where NVLink joins the machines.

In such a rack (GB200 NVL72, for one) CUDA's virtual memory management names memory by a *fabric
handle*, a few bytes that a process of any machine of the rack makes an address of.  Whether there
are such handles depends on the GPU, its driver and a service (IMEX) that joins the machines, so
that it is tried out.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

from dgl_mgpu.errors import PeerAccessError

log = logging.getLogger(__name__)

_NO_SUCH_MEMORY = "map memory of another machine's GPU"
_FIX = "see that the IMEX service runs on all machines (nvidia-imex-ctl -N), or use span='machine'"
#: Before the driver's handle: how many bytes the memory has.
_SIZE = struct.Struct("<q")


class DriverError(RuntimeError):
    """A call of CUDA's driver that failed, and what it said."""

    def __init__(self, call: str, status: Any) -> None:
        super().__init__(f"{call} says {status.name}")
        self.lacks_memory = status.name == "CUDA_ERROR_OUT_OF_MEMORY"


class FabricMemory:
    """Memory of one GPU, the current context's, by CUDA's virtual memory management.

    ``driver`` is ``cuda.bindings.driver``, and ``index`` the GPU's number in this process.
    """

    #: Name of the kind of handles that others are given.
    kind = "CU_MEM_HANDLE_TYPE_FABRIC"

    def __init__(self, driver: Any, index: int) -> None:
        self._driver = driver
        self._kind = getattr(driver.CUmemAllocationHandleType, self.kind)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        self._properties.requestedHandleTypes = self._kind
        recommended = driver.CUmemAllocationGranularity_flags
        self._page = self._call(
            "cuMemGetAllocationGranularity",
            self._properties,
            recommended.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        #: Bytes of what is mapped here, by address, and the driver's handle of what is this
        #: process's own.
        self._mapped: dict[int, tuple[int, Any]] = {}

    @classmethod
    def find(cls, index: int) -> FabricMemory | None:
        """That of a GPU, the current context's; None where other machines cannot map any."""
        try:
            from cuda.bindings import driver

            memory = cls(driver, index)
            address = memory.allocate(1)
            try:
                memory.close(memory.open(memory.export(address)))
            finally:
                memory.free(address)
        # An older driver or GPU, or no IMEX; the bindings raise RuntimeErrors and AttributeErrors.
        except (ImportError, AttributeError, RuntimeError) as error:
            log.info("other machines cannot map memory of GPU %d: %s", index, error)
            return None
        return memory

    def __contains__(self, address: int) -> bool:
        """Whether this is an address that :meth:`allocate` or :meth:`open` gave."""
        return address in self._mapped

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, whole pages of it."""
        size = -(-nbytes // self._page) * self._page
        handle = self._call("cuMemCreate", size, self._properties, 0)
        try:
            return self._map(handle, size)
        except DriverError:
            self._call("cuMemRelease", handle)
            raise

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` gave; the driver keeps it for who has it mapped."""
        handle = self._mapped[address][1]
        self.close(address)
        self._call("cuMemRelease", handle)

    def export(self, address: int) -> bytes:
        """What other processes open memory of this one by."""
        size, handle = self._mapped[address]
        exported = self._call("cuMemExportToShareableHandle", handle, self._kind, 0)
        return _SIZE.pack(size) + self._to_bytes(exported)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory; PeerAccessError if it cannot be mapped."""
        (size,) = _SIZE.unpack(handle[: _SIZE.size])
        try:
            imported = self._import(handle[_SIZE.size :])
            try:
                return self._map(imported, size)
            finally:  # a mapping keeps memory by itself
                self._call("cuMemRelease", imported)
        except DriverError as error:
            raise PeerAccessError(_NO_SUCH_MEMORY, str(error), _FIX) from error

    def close(self, address: int) -> None:
        """Unmap it."""
        size, _ = self._mapped.pop(address)
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def _map(self, handle: Any, size: int) -> int:
        driver = self._driver
        address = int(self._call("cuMemAddressReserve", size, self._page, 0, 0))
        is_mapped = False
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            is_mapped = True
            access = driver.CUmemAccessDesc()
            access.location = self._properties.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._call("cuMemSetAccess", address, size, [access], 1)
        except DriverError:
            if is_mapped:
                self._call("cuMemUnmap", address, size)
            self._call("cuMemAddressFree", address, size)
            raise
        self._mapped[address] = size, handle
        return address

    def _to_bytes(self, exported: Any) -> bytes:
        return bytes(exported.data)

    def _import(self, handle: bytes) -> Any:
        fabric = self._driver.CUmemFabricHandle()
        fabric.data = handle
        return self._call("cuMemImportFromShareableHandle", fabric.getPtr(), self._kind)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(name, status)
        return results[0] if results else None
