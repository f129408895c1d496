"""Validation on all nodes, layer by layer, against blocks and against DGL's graph itself."""

from __future__ import annotations

import dataclasses

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dgl_mgpu.config.schema import Config
from dgl_mgpu.layerwise_inference import run as repeated
from dgl_mgpu.models.homogeneous import NodeModel
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch import run
from dgl_mgpu.train.minibatch.evaluation import edges_of_blocks, is_cheaper_for_all_nodes
from dgl_mgpu.train.minibatch.run import load, make_trainer
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer
from tests.train.jobs import reports_of, train

NODES = 700


def config_of(data: str, *overrides: str) -> Config:
    return compose([
        data, f"data.options.num_nodes={NODES}", "data.options.num_edges=6000",
        "data.options.train=0.2", "data.options.valid=0.6", "data.options.test=0.2",
        "sampler.fanouts=[3,3,3]", "trainer.batch_size=64", "model.hidden=12", "store.device=cpu",
        *overrides,
    ])  # fmt: skip


def on_the_graph(config: Config, model: NodeModel) -> torch.Tensor:
    """Logits by one call of the model on DGL's graph."""
    dataset, _ = load(config)
    columns = [torch.from_numpy(each) for each in (dataset.indptr, dataset.indices.astype("int64"))]
    graph = dgl.graph(("csc", (*columns, torch.arange(0))), num_nodes=NODES)
    features = {name: torch.from_numpy(rows) for name, rows in dataset.node_features.items()}
    model.eval()
    with torch.no_grad():
        return model(graph, {name: features[name].float() for name in model.inputs})


def by_blocks(trainer: MiniBatchTrainer) -> float:
    return trainer.evaluate(dataclasses.replace(trainer._valid, all_nodes=None))


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat", "gin", "rgcn"])
def test_logits_are_the_models_on_the_graph(data, model):
    config = config_of(data, f"model={model}")
    trainer = make_trainer(config)
    all_nodes = trainer._valid.all_nodes
    assert all_nodes is not None and trainer._train.all_nodes is None
    expected = on_the_graph(config, trainer.model)
    trainer.model.train()
    for _ in range(2):  # the second time with what the first one has found out
        torch.testing.assert_close(all_nodes._infer(), expected, rtol=1e-4, atol=1e-5)
        assert trainer.model.training
        for parameter in trainer.model.parameters():
            parameter.data.mul_(1.3)
        expected = on_the_graph(config, trainer.model)
        trainer.model.train()
    dataset, _ = load(config)
    is_correct = (
        expected.argmax(1)[dataset.valid] == torch.from_numpy(dataset.labels)[dataset.valid]
    )
    assert trainer.evaluate(trainer._valid) == pytest.approx(float(is_correct.double().mean()))
    assert trainer.evaluate(trainer._valid) == by_blocks(trainer)
    trainer.store.close()


def test_in_half_precision_it_is_what_blocks_give(data):
    trainer = make_trainer(config_of(data, "trainer.precision=bfloat16"))
    found, expected = trainer.evaluate(trainer._valid), by_blocks(trainer)
    assert found == pytest.approx(expected, abs=0.01)
    with trainer._autocast():
        assert trainer._valid.all_nodes._infer().dtype == torch.bfloat16
    trainer.store.close()


def test_blocks_are_used_where_memory_is_too_small(data, monkeypatch):
    trainer = make_trainer(config_of(data))
    expected = trainer.evaluate(trainer._valid)
    # Two layers' rows of 12 float32.
    needed = NODES * 4 * 2 * 12
    made = []
    make = trainer._make_loader
    monkeypatch.setattr(trainer, "_make_loader", lambda split: made.append(split) or make(split))
    for free, loaders in ((2 * needed, 0), (2 * needed - 2, 1)):
        monkeypatch.setattr(repeated, "free_host_bytes", lambda free=free: free)
        assert trainer.evaluate(trainer._valid) == expected
        assert len(made) == loaders
    trainer.store.close()


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampler.eval_fanouts=[-1,-1,5]"],
        ["model=pinsage"],
        ["trainer.batch_size=10000"],
    ],
    ids=["a fanout", "random walks", "one batch"],
)
def test_what_is_evaluated_by_blocks(data, overrides):
    trainer = make_trainer(config_of(data, *overrides))
    assert trainer._valid.all_nodes is None and trainer._test_split.all_nodes is None
    trainer.store.close()


@pytest.mark.usefixtures("without_pictures")
def test_ranks_share_it_and_learn_what_they_did(tmp_path, data, monkeypatch):
    options = [
        data, "data.options.train=0.4", "data.options.valid=0.4", "sampler.fanouts=[3,3]",
        "sampler.eval_fanouts=null", "trainer.batch_size=32", "trainer.epochs=2",
    ]  # fmt: skip
    shared = reports_of(train(tmp_path / "shared", 2, *options))
    monkeypatch.setattr(run, "is_cheaper_for_all_nodes", lambda *sizes: False)
    blocks = reports_of(train(tmp_path / "blocks", 2, *options))
    assert [r.valid_accuracy for r in shared] == [r.valid_accuracy for r in blocks]
    assert [r.loss for r in shared] == [r.loss for r in blocks]
    assert [r.tiers for r in shared] == [r.tiers for r in blocks]


@pytest.mark.parametrize("num_seeds", [10, 300, 2000])
@pytest.mark.parametrize("num_edges", [2000, 20_000])
def test_edges_are_estimated(num_seeds, num_edges):
    num_nodes = 2000
    g = dgl.rand_graph(num_nodes, num_edges)
    sampler, counts = NeighborSampler([-1] * 3), []
    for _ in range(30):
        _, _, blocks = sampler.sample_blocks(g, torch.randperm(num_nodes)[:num_seeds])
        counts.append(sum(block.num_edges() for block in blocks))
    found = edges_of_blocks(num_seeds, 3, num_nodes, num_edges / num_nodes)
    assert found == pytest.approx(sum(counts) / len(counts), rel=0.1)


@pytest.mark.parametrize(
    "sizes, cheaper",
    [
        ((80_000, 1024, 3, 100_000, 2_000_000), True),
        ((39_323, 1000, 3, 2_449_029, 123_718_280), True),  # ogbn-products
        ((125_265, 1000, 2, 111_059_956, 3_231_371_744), False),  # ogbn-papers100M
        ((500, 1024, 2, 2708, 10_556), False),  # one batch goes over no edge twice
        ((5, 1, 2, 10, 0), False),
    ],
)
def test_which_is_cheaper(sizes, cheaper):
    assert is_cheaper_for_all_nodes(*sizes) == cheaper
