from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from dgl_mgpu.capture import calls, graphs
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from tests.capture.scripts import here

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def replayed(run, device, pool):
    """Like a CUDA graph, a recording does not keep its model alive."""
    if not isinstance(run, partial):
        return run
    forward, model = run.func, weakref.ref(run.args[0])
    return lambda: forward(model())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def capturing(request, monkeypatch):
    """Models are captured; on the CPU a replay computes again what was recorded."""
    if request.param == "cpu":
        monkeypatch.setattr(calls, "captures", lambda device: True)
        monkeypatch.setattr(graphs, "captured", replayed)
    monkeypatch.setattr(here, "device", request.param)
    with tensor_backed_graphs():
        calls.capture_models()
        yield request.param
    calls.capture_models(False)
