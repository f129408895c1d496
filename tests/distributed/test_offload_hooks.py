"""Features that a model is lent: what it computes, and when they are on its device."""

from __future__ import annotations

import dgl
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.distributed import host_features
from dgl_mgpu.distributed.host_features import HostRows, are_for_host, offloaded_rows
from dgl_mgpu.models.homogeneous import build_model
from tests.distributed.graphs import homogeneous

MODELS = ("gcn", "gin", "graphsage", "gat", "rgcn")
_WIDTH = 64


def _graph() -> dgl.DGLGraph:
    return dgl.add_self_loop(homogeneous("skewed", width=_WIDTH))


def _model(name: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(1)
    return build_model(ModelConfig(name, 6, dropout, heads=2), _WIDTH, 3, 2).double()


def _gradients(logits: torch.Tensor, model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_lent_their_features(name, dropout):
    g, model = _graph(), _model(name, dropout)
    torch.manual_seed(2)
    logits = model(g, {"feat": g.ndata["x"]})
    wanted = [logits.detach(), *_gradients(logits, model)]
    torch.manual_seed(2)
    with offloaded_rows({"feat": HostRows(g.ndata["x"], "cpu", 24)}) as inputs:
        logits = model(g, inputs)
    found = [logits.detach(), *_gradients(logits, model)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class _Wide(TorchDispatchMode):
    """Tensors as large as the features, of those that are made and still there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._alive: dict[int, StorageWeakRef] = {}
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage.nbytes() >= self._size and storage._cdata not in self.alive():
                    self._alive[storage._cdata] = StorageWeakRef(storage)
                    self.made += 1
        return found

    def alive(self) -> dict[int, StorageWeakRef]:
        self._alive = {key: each for key, each in self._alive.items() if not each.expired()}
        return self._alive


class _Waiting(torch.nn.Module):
    """A model that looks what is there between its layers."""

    def __init__(self, wide: _Wide) -> None:
        super().__init__()
        self.first, self.second = dgl.nn.GraphConv(_WIDTH, 6, "right"), dgl.nn.GraphConv(6, 3)
        self.wide = wide
        self.between = -1

    def forward(self, g, inputs):
        hidden = torch.relu(self.first(g, inputs["feat"]))
        self.between = len(self.wide.alive())
        return self.second(g, hidden)


def test_features_are_there_in_the_first_layer_alone():
    g = _graph()
    features = HostRows(g.ndata["x"], "cpu", 24)
    with _Wide(g.ndata["x"].nbytes) as wide:
        model = _Waiting(wide).double()
        with offloaded_rows({"feat": features}) as inputs:
            logits = model(g, inputs)
        assert (model.between, wide.made) == (0, 1)
        assert not wide.alive()
        _gradients(logits, model)
        assert wide.made == 2 and not wide.alive()
        # Without gradients there is no need of them a second time.
        with torch.no_grad(), offloaded_rows({"feat": features}) as inputs:
            model(g, inputs)
        assert wide.made == 3 and not wide.alive()


def test_views_are_put_away_and_other_tensors_stay():
    rows = torch.randn(7, 5, dtype=torch.float64)
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    other = torch.randn(7, 2, dtype=torch.float64)
    with offloaded_rows({"feat": HostRows(rows, "cpu", 2), "deep": {"a": other}}) as inputs:
        assert dict(inputs).keys() == {"feat", "deep"} and inputs["deep"]["a"] is other
        part = inputs["feat"][2:, 1:4]
        out = ((part @ weight).square() * inputs["deep"]["a"][2:]).sum()
        del part
    out.backward()
    wanted = 2 * rows[2:, 1:4].t() @ ((rows[2:, 1:4] @ weight) * other[2:])
    torch.testing.assert_close(weight.grad, wanted.detach())


def test_what_a_model_changes_in_place_is_kept():
    g = _graph()
    gradients = []
    for rows in (g.ndata["x"], HostRows(g.ndata["x"], "cpu", 24)):
        torch.manual_seed(1)
        linear = torch.nn.Linear(_WIDTH, 3).double()
        with offloaded_rows({"feat": rows}) as inputs:
            torch.manual_seed(2)
            changed = inputs["feat"] if isinstance(rows, HostRows) else inputs["feat"].clone()
            total = linear(torch.nn.functional.dropout(changed, 0.5, inplace=True)).square().sum()
            del changed
        total.backward()
        gradients.append(linear.weight.grad)
    torch.testing.assert_close(*gradients)


def test_inputs_without_host_rows_are_passed_on():
    inputs = {"feat": torch.zeros(2, 2)}
    with offloaded_rows(inputs) as found:
        assert found is inputs


def _place(asked: str, nbytes: int, free: list[float]) -> bool:
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_features, "free_bytes", lambda device: free[rank])
        return are_for_host(asked, nbytes, torch.device("cpu"))


def test_all_ranks_decide_alike_where_features_are(ranks):
    roomy, tight = [500.0, 500.0, 500.0], [500.0, 399.0, 500.0]
    assert ranks.run(_place, "auto", 100, roomy) == [False] * 3
    assert ranks.run(_place, "auto", 100, tight) == [True] * 3
    assert ranks.run(_place, "gpu", 100, tight) == [False] * 3
    assert ranks.run(_place, "host", 100, roomy) == [True] * 3


def test_that_features_stay_is_said(monkeypatch, caplog):
    monkeypatch.setattr(host_features, "free_bytes", lambda device: 6e9)
    assert are_for_host("auto", 2_000_000_000, torch.device("cpu"))
    assert not are_for_host("auto", 1_000_000_000, torch.device("cpu"))
    assert [record.message for record in caplog.records] == [
        "features stay in the host's memory: they take 2.0 GB, and 6.0 GB are free on a GPU"
        " (fullgraph.features=gpu moves them there)"
    ]


def test_without_a_gpu_nothing_is_too_large():
    assert not are_for_host("auto", 1 << 60, torch.device("cpu"))
