"""Rows of all nodes, dealt out over ranks as nodes are."""

from __future__ import annotations

import dgl
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.errors import InvalidInputError, RankFailedError
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.ranks import on_gpus_too


def _check(first_alone: bool) -> None:
    passes = not first_alone or dist.get_rank() == 0
    draw = torch.Generator().manual_seed(1)
    for kind in ("skewed", "two nodes", "isolated"):
        g = homogeneous(kind)
        for by in ("random", "order"):
            pg = dgl_mgpu.partition_graph(g, by=by)
            for rows in (
                torch.randn(g.num_nodes(), 3, generator=draw),
                torch.randint(9, (g.num_nodes(),), generator=draw).short(),
                torch.randn(g.num_nodes(), 2, 2, generator=draw).bfloat16(),
            ):
                wanted = rows[pg.ndata[dgl.NID].long().cpu()]
                for device, where in ((None, pg.device), ("cpu", torch.device("cpu"))):
                    found = pg.scatter(rows if passes else None, device=device)
                    assert found.device == where
                    assert torch.equal(found.cpu(), wanted)
    g = heterogeneous()
    pg = dgl_mgpu.partition_graph(g)
    for ntype in g.ntypes:
        rows = g.nodes[ntype].data["x"]
        found = pg.scatter(rows if passes else None, ntype)
        assert torch.equal(pg.gather(found, ntype).cpu(), rows)


@on_gpus_too
@pytest.mark.parametrize("first_alone", [False, True])
def test_ranks_get_the_rows_of_their_nodes(ranks, first_alone):
    ranks.run(_check, first_alone)


def test_a_single_rank_gets_all():
    g = homogeneous()
    pg = dgl_mgpu.partition_graph(g)
    assert torch.equal(pg.scatter(g.ndata["x"]), g.ndata["x"][pg.ndata[dgl.NID]])


def _refused(lengths: list[int | None]) -> str:
    """What is raised, where ranks pass so many rows."""
    pg = dgl_mgpu.partition_graph(homogeneous())
    length = lengths[dist.get_rank()]
    try:
        pg.scatter(None if length is None else torch.zeros(length, 2))
    except (InvalidInputError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("lengths", "rank", "reason"),
    [([None, 23, 23], 0, "the first rank passed None"), ([23, None, 22], 2, r"shape (22, 2)")],
)
def test_bad_rows_are_refused_on_every_rank(ranks, lengths, rank, reason):
    found = ranks.run(_refused, lengths)
    assert found[rank].startswith("InvalidInputError") and reason in found[rank]
    assert "a row for each of the graph's 23 nodes" in found[rank]
    assert all(text.startswith("RankFailedError") for r, text in enumerate(found) if r != rank)
