"""Batch normalisation on a partitioned graph, against torch's on the whole graph."""

from __future__ import annotations

import copy

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl import nn

import dgl_mgpu
from dgl_mgpu.errors import UnsupportedByPartitionError
from tests.distributed.both import Both, random_rows, same, uneven
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too


class _OfUser(torch.nn.Module):
    """Rows of nodes normalised after a convolution, those of its heads, and rows of edges."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.first = nn.SAGEConv(5, 12, "mean")
        self.of_nodes = torch.nn.BatchNorm1d(12, **options)
        self.of_heads = torch.nn.BatchNorm1d(3, **options)
        self.of_edges = torch.nn.BatchNorm1d(4, **options)

    def forward(self, graph, x, z):
        rows = self.of_nodes(self.first(graph, x))
        rows = self.of_heads(rows.view(-1, 3, 4)).mean(1)
        return dgl.ops.u_mul_e_sum(graph, rows, self.of_edges(z[:, :4]))


_OPTIONS = {
    "torch's own": {},
    "without parameters": {"affine": False},
    "the mean of all batches": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
}
_CALLS = {
    "positional": lambda model, graph, rows: model(graph, rows["x"], rows["z"]),
    "keywords": lambda model, graph, rows: model(graph=graph, x=rows["x"], z=rows["z"]),
}


def _both(of_last: str) -> Both:
    return Both(*uneven(of_last)) if of_last else Both(homogeneous("skewed"))


def _same_as_torchs(of_last: str, option: str, call: str) -> None:
    both = _both(of_last)
    torch.manual_seed(4)
    model = _OfUser(**_OPTIONS[option]).double()
    x, z = random_rows(both.g.num_nodes(), 5), random_rows(both.g.num_edges(), 5)
    both.compare(
        lambda graph, rows: _CALLS[call](model, graph, rows), {"x": x}, {"z": z}, model=model
    )
    whole = model.cpu()
    part = copy.deepcopy(whole).to(both.pg.device)
    _CALLS[call](whole, both.g, {"x": x, "z": z})
    _CALLS[call](part, both.pg, {"x": both.own_nodes(x), "z": both.own_edges(z)})
    for name, buffer in whole.named_buffers():
        same(dict(part.named_buffers())[name], buffer, name)
    both.compare(
        lambda graph, rows: _CALLS[call](model.eval(), graph, rows), {"x": x}, {"z": z}, model=model
    )


@pytest.mark.parametrize("of_last", ["no nodes", "no edges", ""])
@pytest.mark.parametrize("option", _OPTIONS)
def test_statistics_are_of_all_rows(ranks, of_last, option):
    ranks.run(_same_as_torchs, of_last, option, "positional")


def test_the_graph_may_be_passed_by_its_name(ranks):
    ranks.run(_same_as_torchs, "", "torch's own", "keywords")


def _of_a_convolution(last_is_idle: bool) -> None:
    both = _both("no edges" if last_is_idle else "")
    size = both.g.num_edges()
    torch.manual_seed(4)
    whole = nn.GatedGCNConv(5, 5, 4).double()
    both.compare(
        lambda graph, rows: whole(graph, rows["x"], rows["z"])[1],
        {"x": random_rows(both.g.num_nodes(), 5)},
        {"z": random_rows(size, 5)},
        model=whole,
        of_edges=True,
    )


@pytest.mark.parametrize("last_is_idle", [False, True])
def test_rows_of_edges_in_a_convolution(ranks, last_is_idle):
    ranks.run(_of_a_convolution, last_is_idle)


def _too_few_rows() -> None:
    g = dgl.graph(([0], [1]), num_nodes=dist.get_world_size())
    pg = dgl_mgpu.partition_graph(g)
    model = nn.EdgeConv(5, 4, batch_norm=True, allow_zero_in_degree=True).to(pg.device)
    with pytest.raises(ValueError, match="more than 1 value"):
        model(pg, torch.randn(pg.num_nodes(), 5, device=pg.device))


def test_batch_norm_of_one_row_raises_on_every_rank(ranks):
    ranks.run(_too_few_rows)


def _outside_of_models() -> None:
    both = _both("no nodes")
    norm = torch.nn.BatchNorm1d(5).double()
    rows = {"x": random_rows(both.g.num_nodes(), 5)}
    with pytest.raises(UnsupportedByPartitionError, match="sync_batch_norm"):
        norm.to(both.pg.device)(both.own_nodes(rows["x"]))

    def in_context(graph, rows):
        if graph is both.g:
            return norm(rows["x"])
        with graph.sync_batch_norm():
            return norm(rows["x"])

    both.compare(in_context, rows, model=norm)
    norm.eval()
    both.compare(lambda graph, rows: norm(rows["x"]), rows, model=norm)
    # Other rows are none of the graph's.
    norm.train().cpu()
    batch = random_rows(both.g.num_nodes() + both.g.num_edges() + 1, 5)
    expected = (batch - batch.mean(0)) / (batch.var(0, correction=0) + norm.eps).sqrt()
    same(norm(batch), expected)


def test_rows_outside_of_models_are_normalised_on_request(ranks):
    ranks.run(_outside_of_models)


def _after_the_graph() -> None:
    pg = dgl_mgpu.partition_graph(homogeneous())
    norm = torch.nn.BatchNorm1d(5).to(pg.device)
    rows = torch.randn(pg.num_nodes(), 5, device=pg.device)
    with pytest.raises(UnsupportedByPartitionError):
        norm(rows)
    del pg
    norm(rows)


def test_rows_are_a_batch_again_once_the_graph_is_gone(ranks):
    ranks.run(_after_the_graph)


def _half() -> None:
    both = _both("")
    norm = torch.nn.BatchNorm1d(5).to(both.pg.device)
    rows = random_rows(both.g.num_nodes(), 5).bfloat16()
    with both.pg.sync_batch_norm():
        found = norm(both.own_nodes(rows))
    assert found.dtype == torch.bfloat16
    expected = torch.nn.BatchNorm1d(5)(rows)
    torch.testing.assert_close(found, both.own_nodes(expected), rtol=0.01, atol=0.01)
    torch.testing.assert_close(
        norm.running_var.cpu(), torch.var(rows.float(), 0) * 0.1 + 0.9, rtol=1e-5, atol=1e-6
    )


def test_half_types(ranks):
    ranks.run(_half)
