"""Edges dropped from a partitioned graph, against DGL's C++ on the whole graph without them."""

from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch
import torch.distributed as dist
from dgl.transforms import DropEdge

import dgl_mgpu
from dgl_mgpu.distributed.graph import PartitionedGraph
from tests.distributed.both import Both, random_rows, same, uneven
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too

_GRAPHS = {
    "skewed": lambda: (homogeneous("skewed"), "random"),
    "by ranges": lambda: (homogeneous("skewed"), "order"),
    "int32": lambda: (dgl.add_self_loop(homogeneous()).int(), "metis"),
    "a rank without nodes": lambda: uneven("no nodes"),
    "a rank without edges": lambda: uneven("no edges"),
}


def _ids_on_all_ranks(ids: torch.Tensor) -> torch.Tensor:
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, ids.long().cpu())
    return torch.cat(by_rank).sort().values


class _Dropped(Both):
    """A graph and its parts, both without the edges that the parts have dropped."""

    def __init__(self, name: str, exchange: str, transform) -> None:
        super().__init__(*_GRAPHS[name](), exchange=exchange)
        self.pg = transform(self.pg)
        own = self.pg.edata[dgl.EID].long().cpu()
        self.kept = _ids_on_all_ranks(own)
        gone = torch.ones(self.g.num_edges(), dtype=torch.bool)
        gone[self.kept] = False
        self.g = dgl.remove_edges(self.g, gone.nonzero().squeeze(1).to(self.g.idtype))
        self.edges = torch.searchsorted(self.kept, own)


def _messages(name: str, exchange: str) -> None:
    torch.manual_seed(dist.get_rank() * 5)  # ranks need not draw the same
    both = _Dropped(name, exchange, DropEdge(0.4))
    g, pg = both.g, both.pg
    assert isinstance(pg, PartitionedGraph) and pg.idtype == g.idtype
    own = both.nodes.to(g.idtype)
    assert torch.equal(pg.in_degrees().cpu(), g.in_degrees(own))
    assert torch.equal(pg.out_degrees().cpu(), g.out_degrees(own))
    for frame, of_part, rows in ((g.ndata, pg.ndata, both.nodes), (g.edata, pg.edata, both.edges)):
        for key, column in frame.items():
            assert torch.equal(of_part[key].cpu(), column[rows]), key

    def run(graph, rows, by):
        graph.ndata["h"], graph.edata["e"] = rows["x"], rows["w"]
        graph.update_all(fn.u_mul_e("h", "e", "m"), by("m", "o"))
        return graph.ndata["o"] + dgl.ops.copy_u_sum(graph, rows["x"])

    nodes = {"x": random_rows(g.num_nodes(), 3)}
    edges = {"w": random_rows(g.num_edges(), 3)}
    for turn, reducer in ((False, fn.max), (False, fn.mean), (True, fn.sum)):
        both.compare(lambda g, r: run(g, r, reducer), nodes, edges, turn=turn, what=(turn, reducer))  # noqa: B023


@pytest.mark.parametrize("name", _GRAPHS)
def test_messages_go_along_the_edges_that_are_left(ranks, name):
    for exchange in ranks.exchanges if name == "skewed" else ranks.exchanges[:1]:
        ranks.run(_messages, name, exchange)


def _chance() -> None:
    g = dgl.rand_graph(500, 20_000)
    parts = [dgl_mgpu.partition_graph(g, by=by) for by in ("order", "random")]
    kept = []
    for seed, part, p in ((1, 0, 0.3), (1, 1, 0.3), (2, 1, 0.3), (2, 1, 0), (2, 1, 1)):
        torch.manual_seed(seed)
        left = DropEdge(p)(parts[part])
        kept.append(_ids_on_all_ranks(left.edata[dgl.EID]))
        # Five standard deviations of a binomial distribution.
        assert abs(len(kept[-1]) - (1 - p) * 20_000) <= 5 * (20_000 * p * (1 - p)) ** 0.5
    assert torch.equal(kept[0], kept[1])  # whoever has which edges
    torch.manual_seed(1)
    transform = DropEdge(0.3)
    one, another = (_ids_on_all_ranks(transform(parts[0]).edata[dgl.EID]) for _ in range(2))
    for first, second in ((kept[1], kept[2]), (one, another)):
        in_both = torch.isin(first, second).sum() / 20_000
        assert abs(in_both - 0.49) < 0.02  # independently of each other
    assert parts[0].num_edges() == len(parts[0].edata[dgl.EID])
    assert int(parts[0].in_degrees().sum()) == parts[0].num_edges()


def test_each_edge_is_dropped_by_chance(ranks):
    ranks.run(_chance)


def _then_loops() -> None:
    both = _Dropped("int32", "halo", DropEdge(0.5))
    for change in (dgl.remove_self_loop, dgl.add_self_loop):
        both.g, both.pg = change(both.g), change(both.pg)
        both.compare(
            lambda graph, rows: dgl.ops.copy_u_sum(graph, rows["x"]),
            {"x": random_rows(both.g.num_nodes(), 3)},
        )
        ids = _ids_on_all_ranks(both.pg.edata[dgl.EID])
        assert len(ids.unique()) == len(ids) == both.g.num_edges()


def test_loops_can_be_added_and_taken_afterwards(ranks):
    ranks.run(_then_loops)


def _of_types() -> None:
    g = heterogeneous(6)
    pg = dgl_mgpu.partition_graph(g)
    torch.manual_seed(3)
    left = DropEdge(0.5)(pg)
    for etype in g.canonical_etypes:
        kept = _ids_on_all_ranks(left.edges[etype].data[dgl.EID])
        assert 0 < len(kept) < g.num_edges(etype)
        gone = torch.ones(g.num_edges(etype), dtype=torch.bool)
        gone[kept] = False
        whole = dgl.remove_edges(g, gone.nonzero().squeeze(1), etype)
        for graph in (whole, left):
            graph.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "y"), etype=etype)
        found = left.gather(left.nodes[etype[2]].data["y"], etype[2])
        same(found, whole.nodes[etype[2]].data["y"], etype)
        assert pg.num_edges(etype) >= left.num_edges(etype)


def test_every_relation_loses_edges(ranks):
    ranks.run(_of_types)
