"""Ids that a graph on the CPU does not have: told, where DGL's C++ reads other memory or ends."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl import DGLError
from dgl.dataloading import (
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs


def _graph():
    g = dgl.graph(([0, 1, 2, 0], [1, 2, 0, 2]))
    g.edata["w"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    g.edata[dgl.ETYPE] = torch.zeros(4, dtype=torch.int32)
    return g


def _etypes(g, ids):
    return dgl.sampling.sample_etype_neighbors(g, ids, [0, 4], torch.tensor([1]))


def _loaded(sampler):
    return lambda g, ids: list(DataLoader(g, ids, sampler, batch_size=len(ids)))


_OF_NODES = {
    "neighbors": lambda g, ids: dgl.sampling.sample_neighbors(g, ids, 2),
    "list": lambda g, ids: dgl.sampling.sample_neighbors(g, ids.tolist(), 2),
    "fused": lambda g, ids: dgl.sampling.sample_neighbors_fused(g, ids, 2, mapping={}),
    "etypes": _etypes,
    "topk": lambda g, ids: dgl.sampling.select_topk(g, 1, "w", ids),
    "labors": lambda g, ids: dgl.sampling.sample_labors(g, ids, 2),
    "walk": lambda g, ids: dgl.sampling.random_walk(g, ids, length=2),
    "restart": lambda g, ids: dgl.sampling.random_walk(g, ids, length=2, restart_prob=0.1),
    "node2vec": lambda g, ids: dgl.sampling.node2vec_random_walk(g, ids, 1.0, 1.0, 2),
    "pinsage": lambda g, ids: dgl.sampling.RandomWalkNeighborSampler(g, 2, 0.5, 3, 2)(ids),
    "in_subgraph": lambda g, ids: dgl.in_subgraph(g, ids),
    "out_subgraph": lambda g, ids: dgl.out_subgraph(g, ids),
    "khop": lambda g, ids: dgl.khop_in_subgraph(g, ids, 1),
    "bfs": lambda g, ids: dgl.bfs_nodes_generator(g, ids),
    "bfs edges": lambda g, ids: dgl.bfs_edges_generator(g, ids),
    "dfs": lambda g, ids: dgl.dfs_edges_generator(g, ids),
    "dfs labels": lambda g, ids: dgl.dfs_labeled_edges_generator(g, ids),
    "in_degrees": lambda g, ids: g.in_degrees(ids),
    "in_edges": lambda g, ids: g.in_edges(ids),
    "NeighborSampler": _loaded(NeighborSampler([2])),
    "prob": _loaded(NeighborSampler([2], prob="w")),
    "full": _loaded(MultiLayerFullNeighborSampler(1)),
    "labor": _loaded(LaborSampler([2])),
    "shadow": _loaded(ShaDowKHopSampler([2])),
}
_OF_EDGES = {
    "edge_subgraph": lambda g, ids: dgl.edge_subgraph(g, ids),
    "relabel": lambda g, ids: dgl.edge_subgraph(g, ids, relabel_nodes=False),
    "pairs": _loaded(as_edge_prediction_sampler(NeighborSampler([2]))),
}


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 3, -(10**6), 10**9])
@pytest.mark.parametrize("use", _OF_NODES.values(), ids=_OF_NODES)
def test_nodes_that_are_none(use, bad, idtype):
    with tensor_backed_graphs(False):
        g = _graph().astype(idtype)
        use(g, torch.tensor([0, 2], dtype=idtype))
        with pytest.raises(
            IdOutOfRangeError, match=rf"node {bad} is not among .* 3 nodes; pass ids in \[0, 3\)"
        ) as e:
            use(g, torch.tensor([0, bad, 2], dtype=idtype))
        assert isinstance(e.value, DGLError)


@pytest.mark.parametrize("bad", [-1, 4, -(10**6), 10**9])
@pytest.mark.parametrize("use", _OF_EDGES.values(), ids=_OF_EDGES)
def test_edges_that_are_none(use, bad):
    with tensor_backed_graphs(False):
        g = _graph()
        use(g, torch.tensor([0, 3]))
        with pytest.raises(
            IdOutOfRangeError, match=rf"edge {bad} is not among .* 4 edges; pass ids in \[0, 4\)"
        ):
            use(g, torch.tensor([0, bad]))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "make",
    [
        lambda ids, other: dgl.graph((ids, other)),
        lambda ids, other: dgl.graph((other, ids)),
        lambda ids, other: dgl.graph(("csr", (torch.arange(3).to(ids), ids, [])), num_nodes=2),
        lambda ids, other: dgl.graph(("csc", (torch.arange(3).to(ids), ids, [])), num_nodes=2),
        lambda ids, other: dgl.create_block((ids, other), 2, 2),
    ],
    ids=["from", "to", "csr", "csc", "block"],
)
def test_ends_of_edges_that_are_none(make, idtype):
    with tensor_backed_graphs(False):
        ids = torch.tensor([0, 1], dtype=idtype)
        assert make(ids, ids).num_edges() == 2
        with pytest.raises(IdOutOfRangeError, match=r"node -7 is not among .* 2 nodes") as e:
            make(torch.tensor([1, -7], dtype=idtype), ids)
        assert isinstance(e.value, DGLError)


@pytest.mark.parametrize(
    "sample",
    [
        lambda g, ids, fanout: dgl.sampling.sample_neighbors(g, ids, fanout),
        lambda g, ids, fanout: dgl.sampling.sample_neighbors_fused(g, ids, fanout, mapping={}),
        lambda g, ids, fanout: dgl.sampling.select_topk(g, fanout, "w", ids),
        lambda g, ids, fanout: dgl.sampling.sample_labors(g, ids, fanout)[0],
        lambda g, ids, fanout: dgl.sampling.sample_etype_neighbors(
            g, ids, [0, 4], torch.tensor([fanout])
        ),
    ],
    ids=["neighbors", "fused", "topk", "labors", "etypes"],
)
def test_fanouts_that_are_none(sample):
    with tensor_backed_graphs(False):
        g, ids = _graph(), torch.arange(3)
        assert [sample(g, ids, fanout).num_edges() for fanout in (-1, 0)] == [4, 0]
        with pytest.raises(InvalidInputError, match=r"a fanout is -5; pass 0 or more") as e:
            sample(g, ids, -5)
        assert isinstance(e.value, DGLError)


def test_nodes_of_a_type_are_counted_by_themselves():
    with tensor_backed_graphs(False):
        g = dgl.heterograph({("user", "buys", "item"): ([0, 1], [4, 2])}, {"user": 2, "item": 6})
        assert dgl.sampling.sample_neighbors(g, {"item": [5, 4]}, 1).num_edges() == 1
        assert g.in_degrees(5, "buys") == 0 and g.out_degrees(1, "buys") == 1
        for use in (
            lambda: dgl.sampling.sample_neighbors(g, {"user": [2]}, 1),
            lambda: dgl.in_subgraph(g, {"item": [0], "user": [2]}),
            lambda: dgl.sampling.random_walk(g, [2], metapath=["buys"]),
        ):
            with pytest.raises(IdOutOfRangeError, match="node 2 is not among the graph's 2 nodes"):
                use()


def test_a_workers_loader_tells_them_too():
    with tensor_backed_graphs(False):
        loader = DataLoader(_graph(), torch.tensor([3]), NeighborSampler([2]), num_workers=1)
        with pytest.raises(IdOutOfRangeError, match="node 3 is not among the graph's 3 nodes"):
            next(iter(loader))


def test_walks_of_no_steps_are_refused():
    with tensor_backed_graphs(False), pytest.raises(InvalidInputError, match="no steps"):
        dgl.sampling.random_walk(_graph(), [0], length=0)
