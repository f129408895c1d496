"""What DataLoaders are given whose graph is in a store without a GPU."""

from __future__ import annotations

import pytest

from dgl_mgpu.backend import runner
from dgl_mgpu.backend.memory import pinning
from dgl_mgpu.backend.ours import graphs_on_tensors
from dgl_mgpu.backend.runner import RunnerOptions
from dgl_mgpu.store import cuda


@pytest.fixture
def without_gpu(monkeypatch):
    for module in (cuda, pinning):
        monkeypatch.setattr(module, "find_runtime", lambda: None)


@pytest.fixture
def told(monkeypatch):
    """The runner, given options, which by default say nothing but that there is to be a store."""

    def tell(**store) -> None:
        monkeypatch.delenv(runner.VARIABLE, raising=False)
        runner.hand_on(RunnerOptions(store))

    monkeypatch.setenv(runner.VARIABLE, "")  # so that it is taken back
    tell()
    return tell


@pytest.fixture(params=[False, True], ids=["DGL's graphs", "graphs of tensors"])
def both_kinds(request):
    with graphs_on_tensors(request.param):
        yield
