"""What DataLoaders are given whose graph is in a store without a GPU."""

from __future__ import annotations

import pytest

from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.runner_options import RunnerOptions
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.pinning import pinning


@pytest.fixture
def without_gpu(monkeypatch):
    for module in (cuda_runtime, pinning):
        monkeypatch.setattr(module, "find_runtime", lambda: None)


@pytest.fixture
def told(monkeypatch):
    """The runner, given options, which by default say nothing but that there is to be a store."""

    def tell(**store) -> None:
        monkeypatch.delenv(runner_options.VARIABLE, raising=False)
        runner_options.hand_on(RunnerOptions(store, captures=False))

    monkeypatch.setenv(runner_options.VARIABLE, "")  # so that it is taken back
    tell()
    return tell


@pytest.fixture(params=[False, True], ids=["DGL's graphs", "graphs of tensors"])
def both_kinds(request):
    with tensor_backed_graphs(request.param):
        yield
