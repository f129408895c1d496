"""The scripts whose steps are timed train, and the graph of several types has one graph's edges."""

from __future__ import annotations

import pytest
import torch

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl

from benchmarks import unmodified_scripts
from benchmarks.unmodified_scripts import CASES, ETYPES, NTYPES, Case, graph_for, made_graph, script

STEPS = 12


@pytest.fixture
def g(monkeypatch):
    monkeypatch.setattr(unmodified_scripts, "this_device", lambda: torch.device("cpu"))
    torch.manual_seed(0)
    ends = torch.randint(301, (2, 4000), dtype=torch.int32)
    g = dgl.graph((ends[0], ends[1]), num_nodes=301)
    return made_graph(*g.adj_tensors("csc")[:2])


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.name)
def test_losses_fall(g, case):
    case = Case(case.model, 64, case.fanouts)
    of = script(graph_for(case, g), case, STEPS)
    # The same mini-batch: features and labels of others tell nothing of it.
    batch, losses = next(iter(of.loader)), []
    for _ in range(STEPS):
        loss = of.loss(batch)
        of.optimizer.zero_grad()
        loss.backward()
        of.optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(of.loader) == STEPS


def ends(g, etype):
    indptr, src, _ = g.adj_tensors("csc", etype)
    return src, torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())


def test_a_graph_of_several_types(g):
    typed = graph_for(next(case for case in CASES if case.is_typed), g)
    found = []
    for source, name, target in ETYPES:
        src, dst = ends(typed, name)
        src, dst = 2 * src + NTYPES.index(source), 2 * dst + NTYPES.index(target)
        found += [*zip(src.tolist(), dst.tolist(), strict=True)]
    src, dst = ends(g, None)
    assert sorted(found) == sorted(zip(src.tolist(), dst.tolist(), strict=True))
    for odd, ntype in enumerate(NTYPES):
        for feature in ("feat", "label"):
            assert torch.equal(typed.nodes[ntype].data[feature], g.ndata[feature][odd::2])
