"""Link prediction on partitioned graphs, against plain torch and DGL on the whole graph."""

from __future__ import annotations

from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import dgl_mgpu
from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.data import load
from dgl_mgpu.data.links import hold_out
from dgl_mgpu.distributed.pairs import Pairs
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.models.full_graph import build_model
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.fullgraph.links import FullGraphLinkTrainer, edges_of_splits
from dgl_mgpu.train.fullgraph.run import make_trainer
from tests.distributed.both import Both, random_rows, same, uneven
from tests.distributed.graphs import homogeneous
from tests.train.epochs import train_epoch

WIDTH, NEGATIVES = 4, 3


def _products(of_last: str) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous("skewed"))
    count = both.g.num_nodes()
    draw = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randint(99, (30 * min(len(both.nodes), 1),), generator=draw)
    rows %= max(len(both.nodes), 1)
    others = torch.randint(count, rows.shape, generator=draw)
    positions = both.pg.ownership["_N"].positions(torch.int64)[others]
    pairs = Pairs(both.pg, rows.to(both.pg.device), positions.to(both.pg.device))
    whole = random_rows(count, 5).requires_grad_()
    own = both.own_nodes(whole.detach()).requires_grad_()
    expected = (whole[both.nodes[rows]] * whole[others]).sum(1)
    found = pairs.products(own)
    same(found, expected)
    factors = torch.arange(1.0, 1.0 + len(rows), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * factors.to(found.device)).sum(), [own])
    (of_whole,) = torch.autograd.grad((expected * factors).sum(), [whole])
    dist.all_reduce(of_whole)  # of all ranks' pairs
    same(gradient, both.own_nodes(of_whole))


@pytest.mark.parametrize("of_last", ["", "no nodes", "no edges"])
def test_products_of_pairs(ranks, of_last):
    ranks.run(_products, of_last)


def _graph_and_edges(by: str) -> tuple[dgl.DGLGraph, dict[str, torch.Tensor]]:
    """A graph of the edges that are learned, and loops; and the edges of each split."""
    draw = torch.Generator().manual_seed(3)
    ends = torch.randint(40, (2, 130), generator=draw)
    ends = ends[:, ends[0] != ends[1]]
    edges = {"train": ends[:, :80], "valid": ends[:, 80:100], "test": ends[:, 100:]}
    if by == "order":  # the last rank's nodes are sources of no edge
        edges = {name: of_split[:, of_split[0] < 20] for name, of_split in edges.items()}
    g = dgl.add_self_loop(dgl.graph(tuple(edges["train"]), num_nodes=40))
    g.ndata["x"] = random_rows(40, 5)
    return g, edges


def _model() -> torch.nn.Module:
    torch.manual_seed(23)
    return build_model(ModelConfig("graphsage", 6, dropout=0.0), 5, WIDTH, 2).double()


def _trainer(by: str) -> tuple[FullGraphLinkTrainer, dgl.DGLGraph, dict[str, torch.Tensor]]:
    g, edges = _graph_and_edges(by)
    pg = dgl_mgpu.partition_graph(g, by=by)
    model = _model()
    first = not dist.is_initialized() or not dist.get_rank()
    trainer = FullGraphLinkTrainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.02),
        pg,
        {"feat": pg.ndata["x"]},
        edges if first else None,
        negatives=NEGATIVES,
        seed=5,
    )
    return trainer, g, edges


def _negatives(trainer: FullGraphLinkTrainer, split: str, epoch: int) -> torch.Tensor:
    """Those of all ranks, by the edges' numbers."""
    own = trainer._edges[split][0], trainer._other_destinations(split, epoch)
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    numbers, drawn = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
    assert torch.equal(numbers.sort().values, torch.arange(len(numbers)))
    return drawn[numbers.argsort()]


def _scores(rows: torch.Tensor, edges: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    sources, destinations = edges
    ends = torch.cat([destinations.unsqueeze(1), others], 1)
    return (rows[sources].unsqueeze(1) * rows[ends]).sum(2)


def _area(scores: torch.Tensor) -> float:
    higher = (scores[:, :1] > scores[:, 1:]).double()
    return float((higher + 0.5 * (scores[:, :1] == scores[:, 1:])).mean())


def _epochs(by: str) -> list[list[int]]:
    trainer, g, edges = _trainer(by)
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    drawn = []
    for epoch in range(4):
        others = _negatives(trainer, "train", epoch)
        drawn.append(others.flatten().tolist())
        scores = _scores(model(g, {"feat": g.ndata["x"]}), edges["train"], others)
        targets = torch.zeros_like(scores)
        targets[:, 0] = 1
        loss = functional.binary_cross_entropy_with_logits(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report = train_epoch(trainer)
        assert report.loss == pytest.approx(loss.item(), rel=1e-9)
        assert report.train_accuracy == pytest.approx(_area(scores))
        for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-10)
        with torch.no_grad():
            rows = model(g, {"feat": g.ndata["x"]})
        for split, found in (("valid", report.valid_accuracy), ("test", report.test_accuracy)):
            held_out = _negatives(trainer, split, 0)
            assert found == pytest.approx(_area(_scores(rows, edges[split], held_out)))
    torch.testing.assert_close(trainer.predict(), rows.float())
    return drawn


@pytest.mark.parametrize("by", ["random", "order"])
def test_epochs_are_those_of_the_whole_graph(ranks, by):
    drawn = ranks.run(_epochs, by)
    assert drawn[0][0] != drawn[0][1]  # others in each epoch


def _others_of(by: str) -> torch.Tensor:
    trainer, _, edges = _trainer(by)
    every = torch.cat(list(edges.values()), 1).tolist()
    pairs = set(zip(*every, strict=True))
    found = []
    for split, epoch in (("train", 0), ("train", 1), ("valid", 0), ("test", 0)):
        others = _negatives(trainer, split, epoch)
        for source, of_edge in zip(edges[split][0].tolist(), others.tolist(), strict=True):
            assert all((source, other) not in pairs and source != other for other in of_edge)
        found.append(others)
    return torch.cat(found)


def test_other_pairs_are_no_edges_and_the_same_however_nodes_are_dealt_out(ranks):
    (one, *_), (another, *_) = ranks.run(_others_of, "random"), ranks.run(_others_of, "metis")
    assert torch.equal(one, another)
    assert len(one.unique()) > 35  # any of 40 nodes


def _complete() -> None:
    g = dgl.graph(tuple(torch.cartesian_prod(*[torch.arange(12)] * 2).T))
    edges = torch.cartesian_prod(*[torch.arange(12)] * 2).T
    edges = edges[:, edges[0] != edges[1]]
    g.ndata["x"] = random_rows(12, 5)
    pg = dgl_mgpu.partition_graph(g)
    model = _model()
    splits = {"train": edges[:, :60], "valid": edges[:, 60:90], "test": edges[:, 90:]}
    with pytest.raises((InvalidInputError, dgl_mgpu.errors.RankFailedError), match="all nodes"):
        FullGraphLinkTrainer(
            model, torch.optim.Adam(model.parameters()), pg, {"feat": pg.ndata["x"]}, splits
        )


def test_a_complete_graph_has_no_other_pairs(ranks):
    ranks.run(_complete)


SMALL = [
    "mode=fullgraph", "task=link_prediction", "data.options.num_nodes=800",
    "data.options.num_edges=6000", "model.hidden=16", "model.dropout=0", "trainer.lr=0.02",
]  # fmt: skip


def _train(folder: Path, *overrides: str) -> list[float]:
    assert main(["train", *SMALL, f"hydra.run.dir={folder}", *overrides]) == 0
    return [report.loss for report in read_metrics(folder / "metrics.jsonl")[0]]


@pytest.mark.usefixtures("forked_ranks", "without_pictures")
def test_a_run_learns_and_goes_on_with_other_ranks(tmp_path, data):
    whole = _train(tmp_path / "whole", data, "trainer.epochs=25")
    reports, summary = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert reports[0].metric_name == "AUC" and summary["test_accuracy"] > 0.55
    assert whole[-1] < whole[0]
    half = _train(tmp_path / "half", data, "trainer.epochs=2", "trainer.ranks=2")
    assert half == pytest.approx(whole[:2], rel=1e-4)
    resumed = f"trainer.resume={tmp_path / 'half'}"
    again = _train(tmp_path / "again", data, resumed, "trainer.epochs=4", "trainer.ranks=1")
    assert again == pytest.approx(whole[:4], rel=1e-4)
    out = tmp_path / "rows.npz"
    assert main(["predict", str(tmp_path / "whole"), f"out={out}"]) == 0
    assert np.load(out)["embeddings"].shape == (800, 16)


def test_edges_held_out_are_not_in_the_graph(data):
    config = compose([*SMALL, data, "model=gcn"])
    trainer = make_trainer(config)
    dataset = load(
        "generated", data.partition("=")[2], num_nodes=800, num_edges=6000, self_loops=True
    )
    links = hold_out(dataset, config.links.valid, config.links.test, config.trainer.seed)
    edges = edges_of_splits(links)
    assert trainer._graph.num_edges() == links.dataset.num_edges
    loops = dataset.num_edges - sum(of_split.shape[1] for of_split in edges.values())
    assert loops == 800
    keys = [set((of_split[0] * 800 + of_split[1]).tolist()) for of_split in edges.values()]
    assert not keys[0] & keys[1] and not keys[0] & keys[2] and not keys[1] & keys[2]
