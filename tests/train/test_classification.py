"""Losses and figures of labels, against plain torch, the ogb package and all pairs of nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from dgl_mgpu.train import objectives as auc
from dgl_mgpu.train.objectives import MultiLabel, SingleLabel
from tests.roc import roc_auc

CPU = torch.device("cpu")


def some(nodes: int, labels: int, unknown: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, many of them equal, and labels."""
    draw = torch.Generator().manual_seed(nodes + labels)
    logits = torch.randn(nodes, labels, generator=draw).mul(4).round().div(4)
    targets = (torch.rand(nodes, labels, generator=draw) < 0.3).to(torch.int8)
    targets[torch.rand(nodes, labels, generator=draw) < unknown] = -1
    return logits, targets


def test_a_class_each_is_cross_entropy_and_accuracy():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    labels = torch.tensor([0, 1, 1])
    one = SingleLabel()
    assert one.loss(logits, labels) == functional.cross_entropy(logits, labels)
    assert one.loss(logits, labels, "sum") == 3 * one.loss(logits, labels)
    assert one.num_correct(logits, labels) == 2
    halves = [(logits[:1], labels[:1]), (logits[1:], labels[1:])]
    assert one.score(halves, CPU) == pytest.approx(2 / 3)
    assert one.predictions(logits)["classes"].tolist() == [0, 1, 0]


def test_several_known_labels_are_binary_cross_entropy():
    logits, labels = some(50, 7)
    logits.requires_grad_()
    found = MultiLabel(7).loss(logits, labels)
    expected = functional.binary_cross_entropy_with_logits(logits, labels.float())
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each, logits)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(MultiLabel(7).loss(logits, labels, "sum"), 50 * expected)


def test_unknown_labels_have_no_part_in_a_nodes_loss():
    logits, labels = some(40, 5, unknown=0.4)
    labels[3] = -1
    logits.requires_grad_()
    of_nodes = []
    for row, targets in zip(logits, labels, strict=True):
        known = targets >= 0
        if known.any():
            of_nodes.append(
                functional.binary_cross_entropy_with_logits(row[known], targets[known].float())
            )
    found = MultiLabel(5).loss(logits, labels)
    torch.testing.assert_close(found, torch.stack(of_nodes).sum() / 40)
    (gradient,) = torch.autograd.grad(found, logits)
    assert (gradient[labels < 0] == 0).all() and (gradient[labels >= 0] != 0).all()


@pytest.mark.parametrize(("nodes", "labels", "unknown"), [(200, 6, 0.0), (90, 4, 0.5), (2, 3, 0.0)])
def test_areas_are_shares_of_pairs(nodes, labels, unknown):
    logits, targets = some(nodes, labels, unknown)
    targets[0], targets[1] = 1, 0
    found = auc.mean_area(logits, targets)
    assert found.item() == pytest.approx(roc_auc(logits, targets), abs=1e-12)
    assert MultiLabel(labels).num_correct(logits, targets).item() == pytest.approx(
        found.item() * nodes
    )


def test_it_is_the_figure_of_the_ogb_package(monkeypatch):
    package = pytest.importorskip("ogb.nodeproppred")
    logits, targets = some(300, 112)
    targets[:, 5], targets[:, 6] = 0, 1  # which has no area
    evaluator = package.Evaluator("ogbn-proteins")
    asked = {"y_true": targets.numpy(), "y_pred": logits.numpy()}
    parts = [(logits[at : at + 37], targets[at : at + 37]) for at in range(0, 300, 37)]
    found = MultiLabel(112).score(parts, CPU)
    assert found == pytest.approx(evaluator.eval(asked)["rocauc"], abs=1e-12)


def test_labels_are_ranked_some_at_a_time(monkeypatch):
    logits, targets = some(100, 9)
    expected = MultiLabel(9).score([(logits, targets)], CPU)
    seen = []
    areas = auc.areas
    monkeypatch.setattr(auc, "areas", lambda *both: seen.append(both[0].shape) or areas(*both))
    monkeypatch.setattr(auc, "_SCORES_AT_ONCE", 250)
    assert MultiLabel(9).score([(logits, targets)], CPU) == expected
    assert seen == [(100, 2)] * 4 + [(100, 1)]


def test_infinite_scores_are_compared_and_nan_is_told():
    targets = torch.tensor([[1], [0], [-1], [0]], dtype=torch.int8)
    inf = math.inf
    for scores, area in (([inf, 1, 5, inf], 0.75), ([-inf, -inf, 0, 1], 0.25)):
        assert auc.mean_area(torch.tensor(scores)[:, None].float(), targets) == area
    unknown_nan = torch.tensor([[1.0], [0.0], [math.nan], [0.0]])
    assert auc.mean_area(unknown_nan, targets) == 1
    assert auc.mean_area(unknown_nan[[2, 0, 1, 3]], targets).isnan()


def test_where_no_label_can_be_told_apart_it_is_as_good_as_guessing():
    logits = torch.randn(4, 2)
    assert auc.mean_area(logits, torch.ones(4, 2, dtype=torch.int8)) == 0.5
    assert MultiLabel(2).num_correct(logits[:0], torch.empty(0, 2, dtype=torch.int8)) == 0
    assert MultiLabel(2).score([], CPU) == 0.5


def test_half_precision_is_ranked_as_it_is():
    logits, targets = some(60, 3)
    assert auc.mean_area(logits.bfloat16(), targets) == auc.mean_area(
        logits.bfloat16().float(), targets
    )


def test_predictions_are_labels_that_nodes_rather_have():
    found = MultiLabel(2).predictions(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
    assert found["labels"].tolist() == [[1, 0], [0, 1]]
    assert found["labels"].numpy().dtype == np.int8 and set(found) == {"labels", "logits"}
