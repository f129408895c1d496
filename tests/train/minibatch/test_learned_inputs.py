"""Runs whose nodes learn rows in place of features, against plain torch and DGL."""

from __future__ import annotations

import copy
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler
from torch.nn.functional import cross_entropy

import dgl_mgpu
from dgl_mgpu.cli import main
from dgl_mgpu.data import load, load_hetero
from dgl_mgpu.errors import ConfigError, IdOutOfRangeError
from dgl_mgpu.placement import Plan
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.planned import plan_for
from dgl_mgpu.train.minibatch.run import load as load_task
from dgl_mgpu.train.minibatch.run import make_trainer
from tests.train.epochs import train_epoch

pytestmark = pytest.mark.usefixtures("without_pictures")

SIZE = {"num_nodes": 600, "num_edges": 6000}
SMALL = [
    "model.inputs=learned",
    *(f"data.options.{key}={value}" for key, value in SIZE.items()),
    "sampler.fanouts=[-1,-1]",
    "trainer.batch_size=100",
    "trainer.lr=0.01",
    "model.dropout=0",
    "model.hidden=12",
    "store.device=cpu",
]


def train(folder: Path, *overrides: str) -> tuple[list[float], float]:
    """A run's losses, and its test."""
    assert main(["train", *SMALL, f"hydra.run.dir={folder}", *overrides]) == 0
    reports, summary = read_metrics(folder / "metrics.jsonl")
    return [report.loss for report in reports], summary["test_accuracy"]


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.state_dict().items() if not n.endswith("_extra_state")}


@pytest.mark.parametrize("name", ["graphsage", "gcn", "gat", "gin", "rgcn"])
def test_steps_are_those_of_an_embedding_of_torchs(name, data):
    config = compose([*SMALL, data, f"model={name}", "model.hidden=12", "model.dropout=0"])
    trainer = make_trainer(config)
    dataset, task = load_task(config)
    assert "feat" not in dataset.node_features and task.width == 12
    graph = dataset.to_dgl()

    ours = trainer.model
    before = copy.deepcopy(parameters_of(ours))
    rows = ours.embedding(torch.arange(graph.num_nodes())).detach().clone()
    seeds = list(trainer._train.batches)
    report = train_epoch(trainer)
    learned = ours.embedding(torch.arange(graph.num_nodes())).detach()

    theirs = type(ours)([12, 12, task.num_outputs], config.model)
    theirs.load_state_dict(before)
    theirs.learn_inputs(torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True))
    table = theirs.embedding.weight
    dense = torch.optim.Adam([p for p in theirs.parameters() if p is not table], lr=0.01)
    sparse = torch.optim.SparseAdam([table], lr=0.01)
    losses = []
    sampler = NeighborSampler([-1, -1], prefetch_node_feats=list(theirs.inputs[1:]))
    for batch in seeds:
        loader = DataLoader(graph, batch.long(), sampler, batch_size=len(batch))
        for _, nodes, blocks in loader:
            logits = theirs(blocks, dict(blocks[0].srcdata))
            losses.append(cross_entropy(logits, graph.ndata["label"][nodes]))
            dense.zero_grad()
            sparse.zero_grad()
            losses[-1].backward()
            dense.step()
            sparse.step()
    of_seeds = [len(batch) for batch in seeds]
    mean = np.average([loss.item() for loss in losses], weights=of_seeds)
    assert report.loss == pytest.approx(mean, rel=1e-4)
    torch.testing.assert_close(learned, table.detach(), rtol=1e-3, atol=1e-4)
    assert (learned != rows).any(1).sum() > SIZE["num_nodes"] / 2
    after = parameters_of(ours)
    for key, value in after.items():
        torch.testing.assert_close(value, theirs.state_dict()[key], rtol=1e-3, atol=1e-4)
    trainer.store.close()


@pytest.mark.parametrize("name", ["graphsage", "gcn"])
def test_all_nodes_at_once_are_validated_as_by_blocks(name, data):
    config = compose([*SMALL, data, f"model={name}", "trainer.batch_size=20"])
    trainer = make_trainer(config)
    train_epoch(trainer)
    assert trainer._valid.all_nodes is not None
    at_once = trainer.evaluate(trainer._valid)
    logits = trainer.predict()
    trainer._valid.all_nodes = None
    assert at_once == pytest.approx(trainer.evaluate(trainer._valid), abs=1e-9)

    dataset, _ = load_task(config)
    graph = dataset.to_dgl()
    with torch.no_grad():
        inputs = {dgl.NID: graph.nodes(), **graph.ndata}
        torch.testing.assert_close(logits, trainer.model(graph, inputs), rtol=1e-4, atol=1e-5)
    trainer.store.close()


def test_nodes_of_a_subgraph_have_their_rows(data):
    trainer = make_trainer(compose([*SMALL, data, "model=graphsage"]))
    graph = load_task(compose([*SMALL, data]))[0].to_dgl()
    some = dgl.node_subgraph(graph, torch.arange(300, 500))
    with torch.no_grad():
        expected = trainer.model(some, {**some.ndata})
        others = trainer.model(some, {dgl.NID: some.nodes()})
    found = dgl_mgpu.inference(trainer.model, some)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, others)
    with pytest.raises(IdOutOfRangeError, match="is not among the 600 rows; pass ids in"):
        dgl_mgpu.inference(trainer.model, dgl.add_nodes(graph, 100))
    trainer.store.close()


def test_ranks_train_as_one_does_go_on_and_predict(tmp_path, data):
    options = [data, "model=graphsage", "model.dropout=0", "model.hidden=12", "trainer.epochs=4"]
    one, _ = train(tmp_path / "one", *options)
    two = ["trainer.ranks=2", "trainer.batch_size=50"]
    whole, test = train(tmp_path / "whole", *options, *two)
    assert whole == pytest.approx(one, rel=1e-3) and whole[-1] < 0.9 * whole[0]
    train(tmp_path / "run", *options, *two, "trainer.epochs=2")
    resume = [f"trainer.resume={tmp_path / 'run'}", "trainer.epochs=4"]
    resumed, test_of_resumed = train(tmp_path / "resumed", *options, *two, *resume)
    assert (resumed, test_of_resumed) == (whole, test)
    mine, other = (Checkpoint.load(tmp_path / name).model for name in ("resumed", "whole"))
    for name in mine:
        if name.endswith("_extra_state"):
            with np.load(mine[name].path) as a, np.load(other[name].path) as b:
                assert all(np.array_equal(a[key], b[key]) for key in b)
        else:
            assert torch.equal(mine[name], other[name])

    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.npz"
        assert main(["predict", str(tmp_path / "whole"), f"out={out}", f"ranks={ranks}"]) == 0
        with np.load(out) as found:
            classes = found["classes"]
        of = load("generated", data.partition("=")[2], **SIZE)
        assert (classes[of.test] == of.labels[of.test]).mean() == pytest.approx(test, abs=1e-9)


def test_walks_and_workers(tmp_path, data):
    losses, _ = train(tmp_path / "walks", data, "model=pinsage", "trainer.epochs=3")
    assert losses[-1] < losses[0]
    one, _ = train(tmp_path / "one", data, "trainer.epochs=2")
    assert one == train(tmp_path / "two", data, "trainer.epochs=2", "sampler.num_workers=2")[0]


def test_nodes_of_all_types_may_learn(tmp_path):
    sizes = {"num_users": 100, "num_tags": 20, "num_items": 400}
    words = ["data=generated-relations", "model=rgcn", "trainer.epochs=2", "model.inputs=learned"]
    words += [f"data.root={tmp_path}", "store.device=cpu", "model.hidden=8"]
    words += [f"data.options.{key}={value}" for key, value in sizes.items()]
    for mode in ("minibatch", "fullgraph"):
        folder = tmp_path / mode
        assert main(["train", *words, f"mode={mode}", f"hydra.run.dir={folder}"]) == 0
        rows = dgl_mgpu.load_run(folder).predict()
        assert len(rows) == sizes["num_items"]
    trainer = make_trainer(compose(words))
    for ntype, count in load_hetero("generated-relations", tmp_path, **sizes).num_nodes.items():
        assert trainer.store.embedding("learned", ntype).num_embeddings == count
    trainer.store.close()


@pytest.mark.usefixtures("without_pictures")
def test_links_of_cora_are_learned_without_its_words(tmp_path, real_data):
    options = [f"data.root={real_data}", "data=cora", "task=link_prediction", "model.hidden=64"]
    options += [
        "trainer.weight_decay=0",
        "trainer.epochs=10",
        "model.dropout=0",
        "store.device=cpu",
    ]
    folder = tmp_path / "run"
    assert main(["train", "model.inputs=learned", *options, f"hydra.run.dir={folder}"]) == 0
    assert read_metrics(folder / "metrics.jsonl")[1]["test_accuracy"] > 0.7


def bytes_of(plan: Plan, table: str) -> int:
    """Of one copy."""
    return sum(row["bytes"] for row in plan.describe() if row["table"] == table)


def test_a_plan_has_learned_rows_and_their_state(tmp_path):
    options = ["topology=dgx1", "store.gpu_memory=1MiB", "store.device=cpu"]
    planned = plan_for(compose([*SMALL, *options])).plan
    assert set(planned.tables) == {"topology/_N:_E:_N", "node/_N/learned", "node/_N/label"}
    featured = plan_for(compose([*SMALL, *options, "model.inputs=features"])).plan
    # 12 numbers and twice as many of Adam's; where there are features, 64.
    assert bytes_of(planned, "node/_N/learned") == SIZE["num_nodes"] * 36 * 4
    assert bytes_of(featured, "node/_N/feat") == SIZE["num_nodes"] * 64 * 4
    small = ["store.gpu_memory=4KiB", "store.host_memory=16KiB", f"store.disk_path={tmp_path}"]
    with pytest.raises(ConfigError, match="'learned' of '_N' in memory"):
        plan_for(compose([*SMALL, *options, *small]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.inputs=none"], "choose from features, learned"),
        (["trainer.cuda_graphs=true"], "model.inputs=learned trainer.cuda_graphs=true"),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(["model.inputs=learned", *overrides])
