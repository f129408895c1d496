"""Runs kernels on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from dgl_mgpu.ops import device
from tests.kernels.emulator import EmulatedDriver
from tests.kernels.instances import instances


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """Kernels run on CPU tensors during a test; torch fills what ``empty`` allocates.

    A kernel that the test launches must be one that test_compile.py compiles, or another instance.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles kernels for the CPU")
    driver = EmulatedDriver()
    monkeypatch.setattr(device, "driver", driver)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield driver
    torch.use_deterministic_algorithms(before)
    for kernel in driver.launched:
        assert kernel.expression in instances(kernel.source), f"instances.py lacks {kernel}"


@pytest.fixture(params=["emulated", "cuda"])
def where(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device whose tensors a kernel gets: the CPU's under the emulator, and a GPU's.

    On both, torch fills what ``empty`` allocates.
    """
    if request.param == "emulated":
        request.getfixturevalue("emulated")
        yield torch.device("cpu")
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cuda", torch.cuda.current_device())
    torch.use_deterministic_algorithms(before)
