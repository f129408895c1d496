"""The trainer on partitioned graphs, step by step against DGL on the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl import DGLError
from torch.nn import functional

import dgl_mgpu
from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.data import load
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.models import homogeneous as models
from dgl_mgpu.models.full_graph import build_model, build_whole_relational_model
from dgl_mgpu.models.heterogeneous import HeteroInputs
from dgl_mgpu.train.fullgraph.trainer import FullGraphTrainer
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.ranks import RankProcesses
from tests.roc import roc_auc
from tests.train.epochs import train_epoch

EPOCHS = 20
CLASSES = 3
SPLITS = ("train", "valid", "test")


def prepared(g: dgl.DGLGraph, ntype: str = "_N", multi_label: bool = False) -> dgl.DGLGraph:
    """A graph with labels and a split; a node may be in several parts of it."""
    draw = torch.Generator().manual_seed(17)
    data, count = g.nodes[ntype].data, g.num_nodes(ntype)
    data["label"] = torch.randint(CLASSES, (count,), generator=draw)
    if multi_label:
        data["label"] = torch.randint(2, (count, CLASSES), generator=draw).to(torch.int8)
    for name in SPLITS:
        data[name] = torch.rand(count, generator=draw) < 0.5
        data[name][0] = True
    return g


def make_model(
    name: str, g: dgl.DGLGraph, build: Callable[..., torch.nn.Module] = build_model
) -> torch.nn.Module:
    torch.manual_seed(23)
    config = ModelConfig(name, 6, dropout=0.0, heads=2)
    if name == "rgcn" and len(g.etypes) > 1:
        return models.RGCN([5, 6, CLASSES], config, g.etypes, "item").double()
    if name == "rgat":
        widths = dict.fromkeys(g.ntypes, 5)
        inputs = HeteroInputs(g.ntypes, g.canonical_etypes, "item", widths)
        return build_whole_relational_model(config, 5, CLASSES, 2, inputs, {}).double()
    return build(config, 5, CLASSES, 2).double()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    zero = torch.zeros
    return [zero(p.shape) if p.grad is None else p.grad.clone() for p in model.parameters()]


def figure_of(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy, or the area under the ROC curve where nodes may have several labels."""
    if labels.dim() == 2:
        return roc_auc(logits, labels)
    return float((logits.argmax(1) == labels).double().mean())


def by_dgl(model: torch.nn.Module, g: dgl.DGLGraph, ntype: str, epochs: int) -> list[tuple]:
    """Loss, accuracies after it, and gradients of each epoch, by DGL alone."""
    data, inputs, optimizer = g.nodes[ntype].data, {"feat": g.ndata["x"]}, adam(model)
    found = []
    for _ in range(epochs):
        optimizer.zero_grad()
        train = data["train"]
        logits, labels = model(g, inputs)[train], data["label"][train]
        if labels.dim() == 1:
            loss = functional.cross_entropy(logits, labels)
        else:
            loss = functional.binary_cross_entropy_with_logits(logits, labels.double())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            logits = model(g, inputs)
        parts = [(logits[data[name]], data["label"][data[name]]) for name in SPLITS[1:]]
        accuracies = [figure_of(*each) for each in parts]
        found.append((loss.item(), accuracies, gradients(model)))
    return found


def trainer_of(
    model: torch.nn.Module,
    g: dgl.DGLGraph | None,
    ntype: str = "_N",
    slab_width: int | None = None,
    **how: Any,
) -> FullGraphTrainer:
    """A trainer; with a ``slab_width``, features stay in the host's memory."""
    pg = dgl_mgpu.partition_graph(g, **how)
    data, features = pg.nodes[ntype].data, pg.ndata["x"]
    masks = {name: data[name] for name in SPLITS}
    if slab_width is not None:

        def kept(rows: torch.Tensor) -> HostRows:
            return HostRows(rows.cpu(), pg.device, slab_width)

        several = isinstance(features, dict)
        features = {n: kept(rows) for n, rows in features.items()} if several else kept(features)
    return FullGraphTrainer(model, adam(model), pg, {"feat": features}, data["label"], masks)


def by_trainer(trainer: FullGraphTrainer, epochs: int) -> list[tuple]:
    found = []
    for _ in range(epochs):
        report = train_epoch(trainer)
        accuracies = [report.valid_accuracy, report.test_accuracy]
        found.append((report.loss, accuracies, gradients(trainer.model)))
    return found


def check_equal(
    name: str, g: dgl.DGLGraph, epochs: int = EPOCHS, ntype: str = "_N", **how: Any
) -> None:
    # Of its own for whole graphs, or of DGL's modules.
    expected = by_dgl(make_model(name, g, models.build_model), g, ntype, epochs)
    model = make_model(name, g)
    if dist.is_initialized() and dist.get_rank():
        # Ranks must not rely on having been seeded alike.
        model = make_model(name, g).apply(lambda each: getattr(each, "reset_parameters", int)())
    found = by_trainer(trainer_of(model, g, ntype, **how), epochs)
    for (loss, accuracies, of_dgl), (ours, shares, of_ours) in zip(expected, found, strict=True):
        assert ours == pytest.approx(loss, rel=1e-9)
        assert shares == pytest.approx(accuracies)
        scale = max(float(gradient.abs().max()) for gradient in of_dgl)
        for theirs, mine in zip(of_dgl, of_ours, strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-7, atol=1e-9 * scale)


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
@pytest.mark.parametrize("name", ["gcn", "gin", "graphsage", "gat", "rgcn"])
def test_epochs_are_those_of_the_whole_graph(ranks, name, exchange):
    ranks.run(_check_exchange, name, exchange)


def _check_exchange(name: str, exchange: str) -> None:
    check_equal(name, prepared(homogeneous("skewed")), exchange=exchange)


def _check_labels(exchange: str) -> None:
    g = prepared(homogeneous("skewed"), multi_label=True)
    check_equal("graphsage", g, exchange=exchange)
    g.ndata["train"][:] = torch.arange(g.num_nodes()) < 2  # those of one rank
    check_equal("gcn", g, 3, by="order", exchange=exchange)


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
def test_several_labels_of_a_node(ranks, exchange):
    ranks.run(_check_labels, exchange)


def _check_heterograph(name: str, exchange: str) -> None:
    # Of a relation there are no edges, or few; some ranks have none of it, or no node of a type.
    for num_marks in (0, 2):
        g = prepared(heterogeneous(num_marks), "item")
        check_equal(name, g, EPOCHS, "item", exchange=exchange)


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_models_of_relations_on_a_heterograph(ranks, name, exchange):
    ranks.run(_check_heterograph, name, exchange)


def _check_kind(kind: str, by: str) -> None:
    for name in ("gcn", "gat", "graphsage"):
        check_equal(name, prepared(homogeneous(kind)), 3, by=by)


@pytest.mark.parametrize("kind", ["two nodes", "one node", "isolated", "self-loops", "no edges"])
def test_graphs_that_leave_ranks_without_nodes_or_edges(ranks, kind):
    ranks.run(_check_kind, kind, "order")


def _check_on_host(name: str, exchange: str) -> None:
    for kind in ("skewed", "two nodes"):
        check_equal(name, prepared(homogeneous(kind)), 4, slab_width=2, exchange=exchange)
    if name == "rgcn":
        g = prepared(heterogeneous(), "item")
        check_equal("rgcn", g, 4, "item", slab_width=2, exchange=exchange)


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
@pytest.mark.parametrize("name", ["gcn", "gin", "graphsage", "gat", "rgcn"])
def test_epochs_with_features_in_host_memory(ranks, name, exchange):
    ranks.run(_check_on_host, name, exchange)


def _check_one_trains() -> None:
    # All training nodes are one rank's: the others take part in its backward pass.
    g = prepared(homogeneous("random"))
    g.ndata["train"][:] = torch.arange(g.num_nodes()) < 2
    check_equal("gcn", g, 3, by="order")


def test_ranks_without_training_nodes(ranks):
    ranks.run(_check_one_trains)


def _with_lonely_nodes(by: torch.Tensor) -> str:
    """What a rank raises where one of its nodes, or of others', has no in-edge."""
    g = prepared(homogeneous("isolated"))
    model = dgl.nn.GraphConv(5, CLASSES).double()
    try:
        trainer_of(model, g, by=by)
    except DGLError as error:
        found = str(error)
    total = torch.ones(())
    dist.all_reduce(total)  # nobody is left waiting
    assert int(total) == dist.get_world_size()
    return found


def test_zero_in_degrees_are_refused_on_every_rank(ranks):
    g = homogeneous("isolated")
    lonely = int((g.in_degrees() == 0).sum())
    # One rank has all nodes without in-edges.
    for found in ranks.run(_with_lonely_nodes, (g.in_degrees() == 0).long()):
        assert f"{lonely} nodes have no in-edges" in found
        assert "GraphConv" in found
        assert "allow_zero_in_degree" in found


def _without_split() -> str:
    g = prepared(homogeneous())
    g.ndata["valid"][:] = False
    try:
        trainer_of(make_model("gcn", g), g)
    except InvalidInputError as error:
        return str(error)
    return ""


def test_an_empty_split_is_refused_on_every_rank(ranks):
    assert all("no valid nodes" in found for found in ranks.run(_without_split))


def _cora(root: Path, exchange: str = "halo") -> list[float]:
    first = not dist.is_initialized() or dist.get_rank() == 0
    g = None
    if first:
        g = load("cora", root, self_loops=True).to_dgl()
        g.ndata["x"] = g.ndata.pop("feat").double()
        for name, mask in zip(SPLITS, ("train_mask", "val_mask", "test_mask"), strict=True):
            g.ndata[name] = g.ndata.pop(mask)
    torch.manual_seed(0)
    model = build_model(ModelConfig("gcn", 16, dropout=0.0), 1433, 7, 2).double()
    trainer = trainer_of(model, g, exchange=exchange)
    return [train_epoch(trainer).loss for _ in range(EPOCHS)]


@pytest.fixture
def four_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.mark.xdist_group("ranks")
def test_cora_on_four_ranks_is_cora_on_one(four_ranks, real_data):
    losses = _cora(real_data)
    for exchange in ("halo", "broadcast"):
        for found in four_ranks.run(_cora, real_data, exchange):
            assert found == pytest.approx(losses, rel=1e-9)
    assert losses[-1] < 0.95 * losses[0]
