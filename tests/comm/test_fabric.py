"""Memory for other machines, of a driver that is not there: what is undone when a call fails."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.comm.fabric import DriverError, FabricMemory
from dgl_mgpu.errors import PeerAccessError

_PAGE = 2 << 20
#: What undoes each call.
_UNDONE_BY = {
    "cuMemCreate": "cuMemRelease",
    "cuMemImportFromShareableHandle": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
}


class _Driver:
    """CUDA's driver, of which the calls named in ``failing`` fail with a status."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
    CUmemAllocationType = CUmemLocationType = CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ALLOCATION_TYPE_PINNED=1,
        CU_MEM_LOCATION_TYPE_DEVICE=1,
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3,
    )
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_FABRIC=8)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)

    def __init__(self, **failing: str) -> None:
        self.failing = failing
        self.calls: Counter[str] = Counter()
        self.handles: dict[Any, int] = {}
        self._numbers = itertools.count(1)

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace()

    def CUmemFabricHandle(self) -> Any:
        handle = SimpleNamespace(data=b"")
        handle.getPtr = lambda: handle
        return handle

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple:
            if name in self.failing:
                return SimpleNamespace(name=self.failing[name]), None
            self.calls[name] += 1
            return self.CUresult.CUDA_SUCCESS, self._result(name, arguments)

        return call

    def _result(self, name: str, arguments: tuple) -> Any:
        if name == "cuMemGetAllocationGranularity":
            return _PAGE
        if name == "cuMemCreate":
            assert arguments[0] % _PAGE == 0 and arguments[1].requestedHandleTypes == 8
            return f"memory {next(self._numbers)} of {arguments[0]}"
        if name == "cuMemExportToShareableHandle":
            return SimpleNamespace(data=arguments[0].encode().ljust(64, b"\0"))
        if name == "cuMemImportFromShareableHandle":
            return arguments[0].data.rstrip(b"\0").decode()
        if name == "cuMemMap":
            assert arguments[3].endswith(f" of {arguments[1]}")  # all of it
        return next(self._numbers) << 32 if name == "cuMemAddressReserve" else None

    @property
    def left(self) -> Counter[str]:
        """How many calls were not undone."""
        left = Counter({name: -self.calls[name] for name in _UNDONE_BY.values()})
        for call, undone_by in _UNDONE_BY.items():
            left[undone_by] += self.calls[call]
        assert min(left.values()) >= 0  # nothing is undone twice
        return +left


def test_memory_of_one_process_is_mapped_by_another() -> None:
    driver, other = _Driver(), _Driver()
    memory, mapped = FabricMemory(driver, 0), FabricMemory(other, 1)
    address = memory.allocate(_PAGE + 1)
    there = mapped.open(memory.export(address))
    assert address in memory and there in mapped and there not in memory
    mapped.close(there)
    memory.free(address)
    assert not driver.left and not other.left
    assert address not in memory and there not in mapped


@pytest.mark.parametrize("failing", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_what_fails_halfway_is_undone(failing: str) -> None:
    driver = _Driver(**{failing: "CUDA_ERROR_OUT_OF_MEMORY"})
    with pytest.raises(DriverError, match=f"{failing} says CUDA_ERROR_OUT") as caught:
        FabricMemory(driver, 0).allocate(10)
    assert caught.value.lacks_memory and not driver.left
    handle = FabricMemory(_Driver(), 0)
    exported = handle.export(handle.allocate(10))
    with pytest.raises(PeerAccessError, match=f"{failing}.*IMEX"):
        FabricMemory(driver, 0).open(exported)
    assert not driver.left


@pytest.mark.parametrize(
    "failing",
    [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    ],
)
def test_without_imex_there_is_no_such_memory(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    driver = _Driver(**{failing: "CUDA_ERROR_NOT_PERMITTED"})
    monkeypatch.setattr(bindings, "driver", driver)
    assert FabricMemory.find(0) is None
    assert not driver.left


def test_memory_that_gets_no_handle_is_asked_for() -> None:
    """As elsewhere where memory is not shared: a store then does without."""
    runtime = object.__new__(Runtime)
    runtime._index, runtime.device = 0, torch.device("cpu")
    runtime._runtime = SimpleNamespace(
        CUDARuntimeError=OSError, getDevice=lambda: 0, setDevice=lambda index: None
    )
    driver = _Driver(cuMemExportToShareableHandle="CUDA_ERROR_NOT_PERMITTED")
    runtime._fabric = FabricMemory(driver, 0)
    address = runtime.allocate(10, joined=True)
    with pytest.raises(PeerAccessError, match=r"share memory of cpu.*NOT_PERMITTED"):
        runtime.share(address)
    runtime.free(address)
    assert not driver.left
