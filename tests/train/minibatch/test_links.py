"""Link prediction by the command, against plain DGL and torch on whole graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from dgl_mgpu import GlobalStore
from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import Config
from dgl_mgpu.data import Dataset
from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.report import EpochReport, read_metrics
from dgl_mgpu.sampling.prefetch_safety import is_pure
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.minibatch.links import LinkPrediction, LinkTask, WithParallels
from dgl_mgpu.train.minibatch.run import load, make_trainer
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer
from dgl_mgpu.train.setup import load_dataset
from tests.train.epochs import train_epoch

SMALL = [
    "task=link_prediction",
    "links.negatives=3",
    "data.options.num_nodes=400",
    "data.options.num_edges=3000",
    "sampler.fanouts=[-1,-1]",
    "trainer.batch_size=300",
    "model.dropout=0",
    "model.hidden=16",
    "store.device=cpu",
]


def config_of(*overrides: str) -> Config:
    return compose([*SMALL, *overrides])


@pytest.fixture
def trainer(data) -> MiniBatchTrainer:
    made = make_trainer(config_of(data))
    yield made
    made.store.close()


def edges_of(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    sources, targets = dataset.to_dgl().edges(order="eid")
    return sources, targets


def as_pairs(sources, targets) -> Counter:
    """How many edges there are between nodes; in small graphs also several."""
    return Counter(zip(sources.tolist(), targets.tolist(), strict=True))


def without(edges: Counter, batch: Counter) -> Counter:
    """The edges that join other nodes, whatever their direction."""
    return Counter(
        {(s, t): count for (s, t), count in edges.items() if not {(s, t), (t, s)} & batch.keys()}
    )


def ends_of(pairs: dgl.DGLGraph) -> tuple[torch.Tensor, torch.Tensor]:
    """In the ids of the graph."""
    nodes, (sources, targets) = pairs.ndata[dgl.NID].long(), pairs.edges()
    return nodes[sources.long()], nodes[targets.long()]


def embeddings(model, edges: Counter, dataset: Dataset) -> torch.Tensor:
    """A model's rows of all nodes, by DGL, on the whole graph of some edges."""
    ends = torch.tensor(list(edges.elements())).T
    graph = dgl.graph((ends[0], ends[1]), num_nodes=dataset.num_nodes)
    return model(graph, {"feat": torch.as_tensor(dataset.node_features["feat"])})


def test_held_out_edges_are_not_there(trainer, data):
    config = config_of(data)
    whole = as_pairs(*edges_of(load_dataset(config)))
    dataset, task = load(config)
    left = as_pairs(*edges_of(dataset))
    held_out = {name: as_pairs(*ends) for name, ends in task.held_out.items()}
    assert left + held_out["valid"] + held_out["test"] == whole
    assert all(held_out.values())
    graph = trainer.store.graph
    for sources, targets in task.held_out.values():
        assert not graph.has_edges_between(sources, targets).any()
        assert not graph.has_edges_between(targets, sources).any()

    seen = Counter()
    for batch in trainer._make_loader(trainer._train):
        _, edges, _, blocks = batch
        own = as_pairs(*ends_of(edges))
        seen += own
        for block in blocks:
            sources, targets = block.edges()
            of_block = as_pairs(
                block.srcdata[dgl.NID][sources.long()], block.dstdata[dgl.NID][targets.long()]
            )
            assert of_block <= without(left, own)
    assert seen == Counter({pair: count for pair, count in left.items() if pair[0] != pair[1]})
    assert max(seen.values()) > 1


def test_batches_may_be_made_ahead(trainer):
    assert is_pure(trainer._train.sampler) and is_pure(trainer._valid.sampler)


def test_a_step_is_that_of_plain_torch_without_the_batchs_edges(trainer, data):
    dataset, _ = load(config_of(data))
    left = as_pairs(*edges_of(dataset))
    for batch in trainer._make_loader(trainer._train):
        _, edges, others, _ = batch
        (sources, targets), (again, negatives) = ends_of(edges), ends_of(others)
        assert torch.equal(again, sources.repeat_interleave(3))
        assert not as_pairs(again, negatives) & left and (again != negatives).all()

        rows = embeddings(trainer.model, without(left, as_pairs(sources, targets)), dataset)
        scores = (rows[sources] * rows[targets]).sum(1)
        other_scores = (rows[again] * rows[negatives]).sum(1)
        count = 4 * len(sources)
        loss = (softplus(-scores).sum() + softplus(other_scores).sum()) / count
        expected = torch.autograd.grad(loss, list(trainer.model.parameters()))

        trainer.optimizer.zero_grad()
        outputs = trainer._outputs(batch)
        ours = trainer._mean_loss(outputs, trainer._objective.targets(batch))
        ours.backward()
        assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
        for parameter, gradient in zip(trainer.model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
        trainer.optimizer.step()


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat", "gin", "rgcn"])
def test_evaluation_is_the_share_of_pairs_in_which_the_edge_scores_higher(data, model):
    config = config_of(data, f"model={model}", "model.dropout=0")
    trainer = make_trainer(config)
    dataset, task = load(config)
    left = as_pairs(*edges_of(dataset))
    for name, split in (("valid", trainer._valid), ("test", trainer._test_split)):
        trainer.model.eval()
        rows = embeddings(trainer.model, left, dataset).detach().double()
        sources, targets = task.held_out[name].long()
        others = split.sampler._others.long()
        assert others.shape == (len(sources), 3)
        compared = as_pairs(sources.repeat_interleave(3), others.flatten())
        for edges in (left, *(as_pairs(*each) for each in task.held_out.values())):
            assert not compared & edges
        num_correct = [
            float(rows[s] @ rows[t] > rows[s] @ rows[other])
            for s, t, three in zip(sources, targets, others, strict=True)
            for other in three
        ]
        # Scores that are nearly equal may be compared otherwise.
        assert trainer.evaluate(split) == pytest.approx(np.mean(num_correct), abs=0.005)
        assert trainer.evaluate(split) == trainer.evaluate(split)
    trainer.store.close()


def _complete(num_nodes: int) -> tuple[GlobalStore, LinkTask]:
    """A store's graph of a complete graph's other half, and the task with the edges held out."""
    src, dst = (torch.arange(num_nodes**2) // num_nodes, torch.arange(num_nodes**2) % num_nodes)
    stays = (src < dst) & ((src + dst) % 2 == 0)
    held = (src != dst) & ~stays & (dst != 0)
    store = GlobalStore.from_dgl(
        dgl.graph((src[stays], dst[stays]), num_nodes=num_nodes), edges=True
    )
    edges = torch.stack([src[held], dst[held]])
    task = LinkTask(
        seeds={}, num_outputs=1, width=1, held_out={"valid": edges, "test": edges},
        next_edge=torch.arange(int(stays.sum())), longest_ring=1, negatives=2, seed=3,
    )  # fmt: skip
    return store, task


def test_pairs_that_edges_are_compared_with_are_no_edges_held_out_either():
    store, task = _complete(5)
    sources = torch.arange(1, 5, device=store.graph.device)
    others = task._negatives("valid", sources, store.graph)
    assert (others == 0).all()  # the only destination that is left
    with pytest.raises(InvalidInputError, match="edges to all nodes"):
        task._negatives("valid", torch.tensor([0], device=store.graph.device), store.graph)
    store.close()


def test_a_batch_leaves_out_all_edges_of_long_rings_once():
    next_edge = torch.tensor([1, 2, 3, 0, 5, 4, 6])  # rings of four, two and one
    found = WithParallels(next_edge, 4)(torch.tensor([2, 4, 6]))
    assert sorted(found.tolist()) == [0, 1, 2, 3, 4, 5, 6, 6]


def test_random_scores_are_right_half_the_time_and_ties_count_half():
    link = LinkPrediction().criterion
    scores = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros_like(scores)
    assert link.num_correct(scores, targets).item() / 4000 == pytest.approx(0.5, abs=0.02)
    assert link.num_correct(torch.ones(7, 4), torch.zeros(7, 4)).item() == 3.5
    by_hand = torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 0.0], [3.0, 1.0, 2.0]])
    assert link.num_correct(by_hand, torch.zeros(3, 3)).item() == 0.5 + 0.75 + 1


def epoch_of(config: Config, folder: Path | None = None) -> tuple[EpochReport, float]:
    """An epoch's report and the test after it; the first rank keeps them."""
    trainer = make_trainer(config)
    *_, progress = trainer.run_epoch(last=True)
    (report,) = trainer.reports
    assert progress.seeds == report.seeds  # of all ranks
    test = trainer.test()
    trainer.store.close()
    if folder is not None and trainer._ranks.rank == 0:
        torch.save((report.to_dict(), test), folder / "report.pt")
    return report, test


def test_ranks_and_workers_have_the_batches_of_one(tmp_path, data):
    # No change of the model: a step's batches are others for another number of ranks.
    options = data, "trainer.lr=0", "trainer.batch_size=1000"
    one, test = epoch_of(config_of(*options))
    assert one.seeds % 2000 < 1000  # a rank has no batch in the last round
    launch(epoch_of, 2, config_of(*options, "trainer.ranks=2"), tmp_path)
    two, test_of_two = torch.load(tmp_path / "report.pt")
    assert (two["seeds"], two["ranks"], two["figure"]) == (one.seeds, 2, "AUC")
    assert two["loss"] == pytest.approx(one.loss, rel=1e-5)
    for name in ("train_accuracy", "valid_accuracy"):
        assert two[name] == pytest.approx(getattr(one, name), abs=1e-3)
    assert test_of_two == pytest.approx(test, abs=1e-3)

    with_workers, _ = epoch_of(config_of(*options, "sampler.num_workers=2"))
    assert with_workers.loss == pytest.approx(one.loss, rel=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_stops_in_an_epoch_goes_on_as_if_it_had_not(tmp_path, data, workers):
    config = config_of(data, "model.dropout=0.5", f"sampler.num_workers={workers}")
    whole = make_trainer(config)
    reports = [train_epoch(whole, last) for last in (False, True)]
    begun = make_trainer(config)
    train_epoch(begun)
    for progress in begun.run_epoch(True):
        if progress.step == 3:
            begun.stop()
    assert progress.step == 3 and begun.epoch == 1
    begun.checkpoint(asdict(config)).save(tmp_path / "checkpoints")
    rest = make_trainer(config)
    rest.resume(Checkpoint.load(tmp_path))
    report = train_epoch(rest, last=True)
    assert report.seeds == reports[1].seeds
    # The same steps, whose sums were begun anew.
    assert report.loss == pytest.approx(reports[1].loss, rel=1e-12)
    assert report.train_accuracy == pytest.approx(reports[1].train_accuracy, rel=1e-12)
    assert all(
        torch.equal(mine, its)
        for mine, its in zip(rest.model.parameters(), whole.model.parameters(), strict=True)
    )
    for each in (whole, begun, rest):
        each.store.close()


def test_a_run_says_what_its_figures_are(tmp_path, data, capsys):
    folder = tmp_path / "run"
    options = [data, "trainer.epochs=2", "trainer.lr=0.01", f"hydra.run.dir={folder}"]
    assert main(["train", *SMALL, *options]) == 0
    shown = capsys.readouterr().out
    assert "valid AUC" in shown and "test AUC" in shown and "accuracy" not in shown
    assert "AUC: how often an edge scores higher" in " ".join(shown.split())
    page = (folder / "report.html").read_text()
    assert "<dt>test AUC</dt>" in page and "AUC: how often" in page and "accuracy" not in page
    reports, summary = read_metrics(folder / "metrics.jsonl")
    assert [report.metric_name for report in reports] == ["AUC", "AUC"]
    assert reports[0].valid_accuracy != 0.5 and 0 < summary["test_accuracy"] < 1


@pytest.mark.usefixtures("without_pictures")
def test_links_of_cora_are_learned(tmp_path, real_data):
    folder = tmp_path / "run"
    options = [f"data.root={real_data}", "data=cora", "store.device=cpu"]
    learning = ["model.dropout=0", "trainer.weight_decay=0", "trainer.epochs=8"]
    assert (
        main(["train", "task=link_prediction", *options, *learning, f"hydra.run.dir={folder}"]) == 0
    )
    assert read_metrics(folder / "metrics.jsonl")[1]["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["links.negatives=2", "links.test=0.2"], "links.negatives=2 links.test=0.2: only runs of"),
        (["links.valid=0.2", "mode=fullgraph"], "add task=link_prediction, or leave them out"),
        (["fullgraph.exchange=foo"], "fullgraph.exchange=foo: only runs of mode=fullgraph use"),
        (["task=link_prediction", "fullgraph.by=metis"], "add mode=fullgraph, or leave"),
    ],
)
def test_options_of_other_runs_are_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=links"], "choose from node_classification, link_prediction"),
        (["trainer.cuda_graphs=true"], "leave trainer.cuda_graphs out"),
        (["model=pinsage"], "random walks use the edges"),
        (["data=generated-relations", "model=rgcn"], "data.name=generated-relations"),
        (["links.negatives=0"], "links.negatives=0"),
        (["links.valid=-0.1"], "links.valid=-0.1"),
        (["links.test=0"], "use shares above 0"),
        (["links.valid=0.5", "links.test=0.5"], "leave none to train on"),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(["task=link_prediction", *overrides])
