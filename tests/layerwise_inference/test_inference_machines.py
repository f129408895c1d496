"""Inference over a store that machines have together, against DGL on the whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dgl.nn import SAGEConv

import dgl_mgpu
from dgl_mgpu.errors import RankFailedError, UnsupportedByStoreError
from dgl_mgpu.layerwise_inference.rows import OwnColumn
from dgl_mgpu.layerwise_inference.strategies import LayerByLayer
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.run import make_trainer
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.layerwise_inference.inference_models import (
    CLASSES,
    HIDDEN,
    MODELS,
    WIDTH,
    Attention,
    Rgcn,
    Stack,
    assert_equal,
    expected_of,
    made,
)
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.train.jobs import SMALL

ETYPES = ["follows", "buys", "sees", "has", "marks"]


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


def _as_on_the_whole_graph() -> None:
    kept: list[int] = []

    def noted(self: LayerByLayer, name: str, outline: Any) -> Any:
        column = allocate(self, name, outline)
        if isinstance(column, OwnColumn):
            kept.append(len(column.rows))
        return column

    with pytest.MonkeyPatch.context() as patch:
        allocate = LayerByLayer._allocate
        patch.setattr(LayerByLayer, "_allocate", noted)
        for name in ("graphsage", "gcn", "gat", "jumping", "one layer"):
            g, model = homogeneous(), made(MODELS[name])
            num_layers = {"graphsage": 3, "jumping": 3, "one layer": 1}.get(name, 2)
            expected = expected_of(model, g, g.ndata["x"], num_layers)
            with dgl_mgpu.GlobalStore.from_dgl(g, span="job", replica_ratio=0.1) as store:
                own = store.graph.own_nodes()
                model.to(store.device)
                for options in ({}, {"batch_size": 2}):
                    found = dgl_mgpu.inference(model, store.graph, "x", **options)
                    assert_equal(_rows(found, own), _rows(expected, own, cut=True))
                assert 0 < len(own) < g.num_nodes()
                assert kept and set(kept) == {len(own)}
                kept.clear()


def _rows(tree: Any, own: range, cut: bool = False) -> Any:
    """A tree whose rows are those of the machine's nodes."""
    if isinstance(tree, dict):
        return {key: _rows(item, own, cut) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_rows(item, own, cut) for item in tree]
    assert cut or len(tree) == len(own)
    return tree[own.start : own.stop] if cut else tree


@machines_on_gpus_too
def test_each_machine_infers_its_own_nodes(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _as_on_the_whole_graph)


def test_ranks_of_a_machine_share_its_nodes_out(four_ranks: RankProcesses) -> None:
    four_ranks.run(on_machines, "aabb", _as_on_the_whole_graph)


def _of_several_types() -> None:
    g = heterogeneous()
    for etype in g.canonical_etypes:
        for name in list(g.edges[etype].data):
            g.edges[etype].data.pop(name)
    for make in (lambda: Rgcn(ETYPES), lambda: Attention(ETYPES)):
        model = made(make)
        expected = expected_of(model, g, g.ndata["x"], 2)
        with dgl_mgpu.GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
            model.to(store.device)
            for options in ({}, {"batch_size": 3}):
                found = dgl_mgpu.inference(model, store.graph, "x", **options)
                for ntype, rows in found.items():
                    own = store.graph.own_nodes(ntype)
                    assert_equal(rows, expected[ntype][own.start : own.stop])


@machines_on_gpus_too
def test_several_types(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _of_several_types)


class _FailsOnOne(SAGEConv):
    """Of a rank's own batches of the graph it cannot do one."""

    def forward(self, graph: Any, feat: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and graph.num_dst_nodes() and graph.dstdata["_ID"].max() > 4:
            raise ValueError("no batch for me")
        return super().forward(graph, feat)


def _refused() -> None:
    told = ValueError if dist.get_rank() == 1 else RankFailedError
    model = Stack(_FailsOnOne(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")).double()
    with dgl_mgpu.GlobalStore.from_dgl(homogeneous(), span="job", replica_ratio=0) as store:
        with pytest.raises(told, match="no batch for me"):
            dgl_mgpu.inference(model, store.graph, "x", batch_size=4)
        with pytest.raises(UnsupportedByStoreError, match="infer all nodes of a graph at once"):
            dgl_mgpu.inference(made(MODELS["gcn"]), store.graph, "x", layerwise=False)


def test_what_fails_on_one_machine_ends_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _refused)


def _no_room(*_: Any) -> None:
    raise MemoryError("there is no room")


def _has_no_room() -> None:
    is_one, model = dist.get_rank() == 1, made(MODELS["graphsage"])
    with (
        dgl_mgpu.GlobalStore.from_dgl(homogeneous(), span="job", replica_ratio=0) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        if is_one:
            patch.setattr(OwnColumn, "take", _no_room)
        with pytest.raises(MemoryError if is_one else RankFailedError, match="there is no room"):
            dgl_mgpu.inference(model, store.graph, "x", batch_size=4)


def test_a_machine_without_room_for_others_rows_ends_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _has_no_room)


def _predicted(span: str, *overrides: str) -> torch.Tensor:
    options = f"store.span={span}", "store.replica_ratio=0.1", "store.device=auto"
    config = compose([*SMALL, *overrides, *options])
    trainer = make_trainer(config)
    for _ in trainer.run_epoch(last=False):
        pass
    rows = trainer.predict()
    trainer.store.close()
    return rows


def _predicted_alike(*overrides: str) -> None:
    found, expected = _predicted("job", *overrides), _predicted("machine", *overrides)
    # Of a model that was trained, by GPUs with gradients that are added up in any order.
    tolerance = 2e-2 if torch.cuda.is_available() else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The last round has no batch for some ranks.
@machines_on_gpus_too
@pytest.mark.parametrize("model", ["model=graphsage", "model=rgcn", "model.inputs=learned"])
def test_predictions_are_those_of_a_copy_on_each_machine(
    ranks: RankProcesses, data: str, model: str
) -> None:
    options = data, model, "trainer.batch_size=80", f"trainer.ranks={ranks.size}"
    ranks.run(on_machines, "abc", _predicted_alike, *options)
