"""Edges of a store's graph by their ids, against the DGLGraph that it was made from."""

from __future__ import annotations

import copy

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, Uniform
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu.data import load
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    StoreClosedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.ops import SampleKey
from dgl_mgpu.ops.view import EIDS, PAIRED
from dgl_mgpu.train.launch.launch import launch
from tests.sampling.loaders import assert_blocks_are_right, assert_pairs_are_right, link_graph

pytestmark = pytest.mark.usefixtures("in_shared_memory")


def sparse_graph(idtype=torch.int64, in_order=True):
    """A graph with runs of nodes without edges, also first, and with edges at the last, in CSC.

    Edges have the ids of their places, or others.
    """
    draw = np.random.default_rng(3)
    degrees = draw.integers(0, 9, 500) * draw.integers(0, 2, 500)
    degrees[[7, 300]] = 250
    for begin, stop in ((0, 5), (100, 180), (460, 499)):
        degrees[begin:stop] = 0
    degrees[499] = 3
    indptr = torch.from_numpy(np.concatenate([[0], degrees.cumsum()]))
    indices = torch.from_numpy(draw.integers(0, 500, degrees.sum()))
    eids = torch.from_numpy(np.arange(len(indices)) if in_order else draw.permutation(len(indices)))
    return dgl.graph(("csc", (indptr, indices, eids)), num_nodes=500).astype(idtype)


def bought_graph():
    """Two relations that are each other's reverse, edge by edge, and one of another type."""
    draw = torch.Generator().manual_seed(4)
    user, item = torch.randint(0, 60, (400,), generator=draw), torch.arange(400) // 10
    friends = torch.randint(0, 60, (2, 300), generator=draw)
    g = dgl.heterograph(
        {
            ("user", "buys", "item"): (user, item),
            ("item", "bought-by", "user"): (item, user),
            ("user", "follows", "user"): (friends[0], friends[1]),
        },
        {"user": 60, "item": 41},
    )
    for ntype in g.ntypes:
        g.nodes[ntype].data["feat"] = torch.rand(g.num_nodes(ntype), 3, generator=draw)
    g.edges["buys"].data["price"] = torch.rand(400, generator=draw)
    return g


def assert_finds_all(graph, g):
    """All edges, in any order and twice, and some at a time."""
    order = torch.randperm(2 * g.num_edges()) % g.num_edges()
    for eids in (order, order[:1], order[:0]):
        eids = eids.to(g.idtype)
        found, expected = graph.find_edges(eids.to(graph.device)), g.find_edges(eids)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == g.idtype and ours.device == graph.device
            assert torch.equal(ours.cpu(), theirs)
    assert [int(end) for end in graph.find_edges(5)] == [int(end) for end in g.find_edges(5)]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("memory", ["all in one", "tiers"])
def test_ends_are_dgls(idtype, in_order, memory, tmp_path):
    g = sparse_graph(idtype, in_order)
    options = {"gpu_memory": "4KiB", "host_memory": "8KiB", "disk_path": tmp_path}
    store = dgl_mgpu.GlobalStore.from_dgl(
        g, edges=not in_order, **(options if memory == "tiers" else {})
    )
    view = store.graph.view()
    assert (len(view.tiers) > 1) == (memory == "tiers")
    if in_order:
        assert int(view.pointers[0, EIDS]) == (PAIRED if memory == "tiers" else 0)
    assert_finds_all(store.graph, g)


def _finds_on_a_rank(in_order: bool) -> None:
    torch.manual_seed(dist.get_rank())
    g = sparse_graph(in_order=in_order)
    store = dgl_mgpu.GlobalStore.from_dgl(
        g, device="cpu", edges=True, graph_ratio=0.7, feature_ratio=0.7, gpu_memory="20KiB"
    )
    assert max(tier.parts for table in store.plan.tables.values() for tier in table.tiers) > 1
    assert_finds_all(store.graph, g)
    assert_finds_all(store.graph.for_pass(), g)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("in_order", [True, False])
def test_ends_of_rows_that_ranks_share(in_order):
    launch(_finds_on_a_rank, 3, in_order)


def test_a_data_sets_ends():
    g = sparse_graph(in_order=False)
    indptr, indices, eids = (each.numpy() for each in g.adj_tensors("csc"))
    some = np.arange(2)
    dataset = dgl_mgpu.Dataset(
        "sparse", 500, 2, indptr, indices, np.arange(500) % 2, some, some, some, eids=eids
    )
    assert_finds_all(dgl_mgpu.GlobalStore.from_dataset(dataset, edges=True).graph, g)


def assert_same_graph(found, expected):
    assert found.idtype == expected.idtype
    for ntype in expected.ntypes:
        assert found.num_nodes(ntype) == expected.num_nodes(ntype)
        assert (dgl.NID in found.nodes[ntype].data) == (dgl.NID in expected.nodes[ntype].data)
        if dgl.NID in expected.nodes[ntype].data:
            ids = expected.nodes[ntype].data[dgl.NID]
            assert torch.equal(found.nodes[ntype].data[dgl.NID], ids)
    for etype in expected.canonical_etypes:
        for ours, theirs in zip(found.edges(etype=etype), expected.edges(etype=etype), strict=True):
            assert torch.equal(ours, theirs)
        assert (dgl.EID in found.edges[etype].data) == (dgl.EID in expected.edges[etype].data)
        if dgl.EID in expected.edges[etype].data:
            ids = expected.edges[etype].data[dgl.EID]
            assert torch.equal(found.edges[etype].data[dgl.EID], ids)


@pytest.mark.parametrize("options", [{}, {"relabel_nodes": False}, {"store_ids": False}])
@pytest.mark.parametrize("with_types", [False, True])
def test_graphs_of_edges_are_dgls(options, with_types):
    g = bought_graph() if with_types else sparse_graph(torch.int32)
    for ntype in g.ntypes:
        g.nodes[ntype].data.clear()  # these come with DGL's
    edges = torch.tensor([7, 3, 3, 90, 12], dtype=g.idtype)
    edges = {"buys": edges, "follows": edges[:2]} if with_types else edges
    graph = dgl_mgpu.GlobalStore.from_dgl(g, edges=True).graph
    assert_same_graph(graph.edge_subgraph(edges, **options), dgl.edge_subgraph(g, edges, **options))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_whether_there_is_an_edge(idtype):
    g = sparse_graph(idtype, in_order=False)
    graph = dgl_mgpu.GlobalStore.from_dgl(g, graph_ratio=0.5).graph
    draw = torch.Generator().manual_seed(1)
    u, v = torch.randint(0, 500, (2, 3000), generator=draw).to(idtype)
    src, dst = g.edges()
    u, v = torch.cat([u, src, dst]), torch.cat([v, dst, src])
    expected = g.has_edges_between(u, v)
    assert expected.any() and not expected.all()
    assert torch.equal(graph.has_edges_between(u, v), expected)
    assert graph.has_edges_between(int(src[0]), int(dst[0])) is True
    assert torch.equal(graph.has_edges_between(u[:9], int(v[0])), g.has_edges_between(u[:9], v[:1]))
    assert not len(graph.has_edges_between(u[:0], v[:0]))
    typed = bought_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(typed).graph
    u, v = (
        each.flatten() for each in torch.meshgrid(torch.arange(60), torch.arange(41), indexing="ij")
    )
    found = graph.has_edges_between(u, v, "buys")
    assert torch.equal(found, typed.has_edges_between(u, v, "buys"))


@pytest.mark.parametrize("exclude_self_loops", [True, False])
@pytest.mark.parametrize("replace", [True, False])
def test_global_negatives_are_uniform_over_what_is_no_edge(exclude_self_loops, replace):
    draw = torch.Generator().manual_seed(2)
    src, dst = torch.randint(0, 30, (2, 300), generator=draw)
    g = dgl.graph((src, dst), num_nodes=30)
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    counts = torch.zeros(30, 30)
    for _ in range(200):
        u, v = graph.global_uniform_negative_sampling(100, exclude_self_loops, replace)
        assert len(u) == len(v) == 100
        if not replace:
            assert len((u * 30 + v).unique()) == 100
        counts.index_put_((u, v), torch.ones(100), accumulate=True)
    allowed = torch.ones(30, 30, dtype=torch.bool)
    allowed[src, dst] = False
    if exclude_self_loops:
        allowed.fill_diagonal_(False)
    assert not counts[~allowed].any()
    expected = counts.sum() / allowed.sum()
    chi_square = ((counts[allowed] - expected) ** 2 / expected).sum()
    freedom = int(allowed.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_no_negatives_where_there_are_none():
    every = torch.arange(6)
    g = dgl.graph((every.repeat_interleave(6), every.repeat(6)))
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    assert len(graph.global_uniform_negative_sampling(10)[0]) == 0
    assert len(graph.global_uniform_negative_sampling(0)[0]) == 0


def test_negative_destinations_are_no_edges_and_a_batchs_own():
    g = sparse_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g, seed=1)
    graph, sources = store.graph, torch.arange(30).repeat(20)

    def drawn(epoch, edges, key=None):
        graph.set_epoch(epoch)
        graph.edge_subgraph(torch.arange(edges))
        return graph.negative_destinations(sources, 4, key=key)

    first = drawn(1, 9)
    assert first.shape == (600, 4)
    pairs = sources.repeat_interleave(4), first.flatten()
    assert not g.has_edges_between(*pairs).any() and (pairs[0] != pairs[1]).all()
    assert torch.equal(first, drawn(1, 9))
    assert not torch.equal(first, drawn(2, 9)) and not torch.equal(first, drawn(1, 8))
    key = SampleKey(5)
    assert torch.equal(drawn(1, 9, key), drawn(2, 8, key))

    every = torch.arange(6)
    whole = dgl.graph((every.repeat_interleave(6), every.repeat(6)))
    others = dgl_mgpu.GlobalStore.from_dgl(whole).graph.negative_destinations(every, 2)
    assert torch.equal(others, ((every + 1) % 6)[:, None].expand(6, 2))  # there is none


def negatives_of(graph, epochs=2, **options):
    """The negative edges of each batch by its positive ones, epoch by epoch."""
    sampler = as_edge_prediction_sampler(NeighborSampler([2]), negative_sampler=GlobalUniform(2))
    edges = torch.arange(200, device=graph.device)
    loader = DataLoader(graph, edges, sampler, batch_size=32, **options)
    found = []
    for _ in range(epochs):
        batches = {}
        for _, positive, negative, _ in loader:
            ids = negative.ndata[dgl.NID]
            u, v = negative.edges()
            batches[tuple(positive.edata[dgl.EID].tolist())] = (ids[u].tolist(), ids[v].tolist())
        found.append(batches)
    return found


def test_global_negatives_depend_on_the_seed_the_epoch_and_the_edges_alone():
    g = sparse_graph()
    make = dgl_mgpu.GlobalStore.from_dgl
    dgl.seed(3)  # all workers' seed
    expected = negatives_of(make(g, seed=1).graph)
    assert expected[0].keys() == expected[1].keys() and len(expected[0]) == 7
    epochs = [list(batches.values()) for batches in expected]
    assert all(a != b for a, b in zip(*epochs, strict=True))
    assert len({str(each) for each in epochs[0]}) == 7
    for options in ({}, {"num_workers": 2}):
        graph = make(g, seed=1, graph_ratio=0.5).graph
        assert negatives_of(graph, **options) == expected
    assert negatives_of(make(g, seed=2).graph) != expected


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("negative", [None, Uniform(3), GlobalUniform(2)])
@pytest.mark.parametrize("where", ["here", "in a worker", "on tensors"])
def test_pairs_and_blocks_are_the_graphs(exclude, negative, where):
    g, reverse = link_graph("cpu")
    graph = dgl_mgpu.GlobalStore.from_dgl(g, edges=True).graph
    options = {"reverse_eids": reverse} if exclude == "reverse_id" else {}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4]), exclude=exclude, negative_sampler=negative, **options
    )
    with tensor_backed_graphs(where == "on tensors"):
        assert_pairs_are_right(
            g,
            reverse,
            sampler,
            exclude,
            negative is not None,
            sampled=graph,
            num_workers=int(where == "in a worker"),
        )


def assert_same_batches(graph, g, edges, make_sampler):
    """Pairs, and edges and features of all neighbours' blocks, are those of DGL's loader."""
    loaders = [DataLoader(each, edges, make_sampler(), batch_size=40) for each in (graph, g)]
    for ours, theirs in zip(*loaders, strict=True):
        assert_same_graph(ours[1], theirs[1])
        for etype in g.canonical_etypes:
            for name, rows in theirs[1].edges[etype].data.items():
                assert torch.equal(ours[1].edges[etype].data[name], rows)
        for found, expected in zip(ours[-1], theirs[-1], strict=True):
            for etype in g.canonical_etypes:
                eids, expected_eids = (
                    block.edges[etype].data[dgl.EID].sort().values for block in (found, expected)
                )
                assert torch.equal(eids, expected_eids)
        assert_blocks_are_right(g, ours[-1])
        inputs = ours[0] if isinstance(ours[0], dict) else {g.ntypes[0]: ours[0]}
        for ntype, nodes in inputs.items():
            rows = ours[-1][0].srcnodes[ntype].data["feat"]
            assert torch.equal(rows, g.nodes[ntype].data["feat"][nodes])


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id", "callable"])
def test_batches_without_negatives_are_dgls(exclude):
    g, reverse = link_graph("cpu")
    g.ndata["feat"] = torch.rand(120, 3)
    g.edata["label"] = torch.arange(1000)
    graph = dgl_mgpu.GlobalStore.from_dgl(g, edges=True).graph
    if exclude == "callable":
        exclude = lambda eids: (eids + 1) % 1000  # noqa: E731
    assert_same_batches(
        graph,
        g,
        torch.arange(0, 500, 3),
        lambda: as_edge_prediction_sampler(
            MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"]),
            exclude=exclude,
            reverse_eids=reverse,
            prefetch_labels=["label"],
        ),
    )


BOUGHT = {"buys": "bought-by", "bought-by": "buys"}


@pytest.mark.parametrize("exclude", [None, "self", "reverse_types"])
def test_typed_batches_without_negatives_are_dgls(exclude):
    g = bought_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g, edges=True, graph_ratio=0.5).graph
    assert_same_batches(
        graph,
        g,
        {"buys": torch.arange(0, 400, 3), "follows": torch.arange(17)},
        lambda: as_edge_prediction_sampler(
            MultiLayerFullNeighborSampler(
                2, prefetch_node_feats={"user": ["feat"], "item": ["feat"]}
            ),
            exclude=exclude,
            reverse_etypes=BOUGHT,
            prefetch_labels={("user", "buys", "item"): ["price"]},
        ),
    )


def assert_typed_batches_are_right(graph, g, negative):
    """Negative edges are, and blocks have none of those that are to be left out."""
    sampler = as_edge_prediction_sampler(
        NeighborSampler([3, 3]),
        exclude="reverse_types",
        reverse_etypes=BOUGHT,
        negative_sampler=negative,
    )
    edges = {"buys": torch.arange(400, device=graph.device)}
    batches = []
    for _, positive, unrelated, blocks in DataLoader(
        graph, edges, sampler, batch_size=64, shuffle=True
    ):
        assert unrelated.num_edges("follows") == positive.num_edges("follows") == 0
        users, items = (unrelated.nodes[ntype].data[dgl.NID] for ntype in g.ntypes[::-1])
        ends = []
        for pairs in (positive, unrelated):
            u, v = pairs.edges(etype="buys")
            ends += [users[u.long()].cpu(), items[v.long()].cpu()]
        taken = [block.edges[etype].data[dgl.EID].cpu() for block in blocks for etype in BOUGHT]
        batches.append((*ends, positive.edges["buys"].data[dgl.EID].cpu(), taken))
    assert sorted(torch.cat([batch[4] for batch in batches]).tolist()) == list(range(400))
    for u, v, sources, targets, eids, taken in batches:
        expected = g.find_edges(eids, "buys")
        assert torch.equal(u, expected[0]) and torch.equal(v, expected[1])
        assert len(sources) == len(targets) == len(eids) * negative.k
        assert int(sources.max()) < 60 and int(targets.max()) < 41
        if isinstance(negative, GlobalUniform):
            assert not g.has_edges_between(sources, targets, "buys").any()
        else:
            assert torch.equal(sources, u.repeat_interleave(negative.k))
        for sampled in taken:
            assert len(sampled) and not torch.isin(sampled, eids).any()


@pytest.mark.parametrize("negative", [Uniform(2), GlobalUniform(3)])
@pytest.mark.parametrize("on_tensors", [True, False])
def test_typed_negatives(negative, on_tensors):
    g = bought_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g, edges=True).graph
    if not on_tensors:
        return assert_typed_batches_are_right(graph, g, negative)
    with tensor_backed_graphs():
        assert_typed_batches_are_right(graph, bought_graph(), negative)


def test_edges_that_are_left_out_of_a_typed_sample():
    g = bought_graph()
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    nodes = {"user": torch.arange(60), "item": torch.arange(41)}
    frontier = graph.sample_neighbors(nodes, -1, exclude_edges={"buys": torch.arange(0, 400, 2)})
    left = frontier.edges["buys"].data[dgl.EID]
    assert sorted(left.tolist()) == list(range(1, 400, 2))
    src, dst = frontier.edges(etype="buys")
    assert torch.equal(src, g.find_edges(left, "buys")[0])
    assert torch.equal(dst, g.find_edges(left, "buys")[1])
    assert frontier.num_edges("bought-by") == 400 and frontier.num_edges("follows") == 300
    with pytest.raises(InvalidInputError, match="sells"):
        graph.sample_neighbors(nodes, 2, exclude_edges={"sells": torch.arange(3)})


def assert_same_blocks(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for etype in theirs.canonical_etypes:
            for each, other in zip(ours.edges(etype=etype), theirs.edges(etype=etype), strict=True):
                assert torch.equal(each, other)
            eids = theirs.edges[etype].data[dgl.EID]
            assert torch.equal(ours.edges[etype].data[dgl.EID], eids)
        for ntype in theirs.srctypes:
            assert torch.equal(
                ours.srcnodes[ntype].data[dgl.NID], theirs.srcnodes[ntype].data[dgl.NID]
            )
            assert torch.equal(
                ours.dstnodes[ntype].data[dgl.NID], theirs.dstnodes[ntype].data[dgl.NID]
            )


@pytest.mark.parametrize("with_types", [False, True])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"prob": "w"}])
@pytest.mark.parametrize("on_tensors", [True, False])
def test_blocks_without_edges_are_those_of_sampling_hop_by_hop(with_types, options, on_tensors):
    g = bought_graph() if with_types else sparse_graph(torch.int32, in_order=False)
    for etype in g.canonical_etypes:
        g.edges[etype].data["w"] = torch.rand(g.num_edges(etype)) + 0.1
    graph = dgl_mgpu.GlobalStore.from_dgl(g, graph_ratio=0.5).graph
    seeds, left_out = torch.arange(0, 500, 9, dtype=g.idtype), torch.arange(0, 999, 3)
    nothing, some = left_out[:0], left_out
    if with_types:
        seeds = {"user": torch.arange(0, 60, 9), "item": torch.arange(4)}
        nothing, some = {"buys": nothing}, {"buys": torch.arange(0, 400, 3), "follows": left_out}
    with tensor_backed_graphs(on_tensors):
        whole = graph.sample_blocks(seeds, [3, 4, 5], **options)[2]
        assert_same_blocks(
            graph.sample_blocks(seeds, [3, 4, 5], **options, exclude_edges=nothing)[2], whole
        )
        inputs, outputs, blocks = graph.sample_blocks(
            seeds, [3, 4, 5], **options, exclude_edges=some
        )
        assert outputs is seeds
        graph.set_epoch(0)  # forgets the hop
        nodes, expected = seeds, []
        for fanout in (5, 4, 3):
            frontier = graph.sample_neighbors(nodes, fanout, **options, exclude_edges=some)
            expected.insert(0, dgl.to_block(frontier, nodes))
            for etype in g.canonical_etypes:
                edges = expected[0].edges[etype].data
                edges[dgl.EID] = frontier.edges[etype].data[dgl.EID][edges[dgl.EID].long()]
            nodes = expected[0].srcdata[dgl.NID]
        assert sum(block.num_edges() for block in expected) < sum(b.num_edges() for b in whole)
        assert_same_blocks(blocks, expected)
        for ntype, ids in (inputs if with_types else {"_N": inputs}).items():
            assert torch.equal(ids, blocks[0].srcnodes[ntype].data[dgl.NID])


def test_bad_edges_are_refused():
    store = dgl_mgpu.GlobalStore.from_dgl(sparse_graph(torch.int32))
    graph, count = store.graph, store.graph.num_edges()
    for use in (graph.find_edges, graph.edge_subgraph):
        for bad in (-1, count):
            with pytest.raises(IdOutOfRangeError, match=f"no edge {bad}, the graph has {count}"):
                use(torch.tensor([0, bad], dtype=torch.int32))
        for ids in (torch.tensor([1.0]), torch.tensor([1]), torch.ones(count, dtype=torch.bool)):
            with pytest.raises(InvalidInputError, match=r"torch\.int32"):
                use(ids)
        with pytest.raises(InvalidInputError, match="shape"):
            use(torch.zeros((2, 2), dtype=torch.int32))
    with pytest.raises(InvalidInputError, match="sells"):
        graph.find_edges(torch.tensor([0], dtype=torch.int32), "sells")
    with pytest.raises(InvalidInputError, match="sells"):
        graph.edge_subgraph({"sells": torch.tensor([0], dtype=torch.int32)})
    with pytest.raises(IdOutOfRangeError, match="no destination node 500, the graph has 500"):
        graph.has_edges_between(0, 500)
    with pytest.raises(IdOutOfRangeError, match="no source node -3, the graph has 500"):
        graph.has_edges_between(-3, 5)
    three = torch.arange(3, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="there are 3 sources but 2 destinations"):
        graph.has_edges_between(three, three[:2])
    with pytest.raises(InvalidInputError, match="num"):
        graph.global_uniform_negative_sampling(-1)
    with pytest.raises(InvalidInputError, match="edge types fit: "):
        dgl_mgpu.GlobalStore.from_dgl(bought_graph()).graph.find_edges(torch.tensor([0]))
    store.close()
    with pytest.raises(StoreClosedError):
        graph.find_edges(three)


def test_without_a_table_of_ends_it_is_asked_for():
    g = sparse_graph(in_order=False)
    graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
    loader = DataLoader(
        graph, torch.arange(9), as_edge_prediction_sampler(NeighborSampler([2])), batch_size=3
    )
    for use in (lambda: graph.find_edges(torch.tensor([0])), lambda: next(iter(loader))):
        with pytest.raises(UnsupportedByStoreError, match="edges=True"):
            use()


class Links(torch.nn.Module):
    """GraphSAGE of two layers; a pair's score is the product of its nodes' embeddings."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, 32, "mean")
        self.second = dgl.nn.SAGEConv(32, 32, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], self.first(blocks[0], x).relu())


def auc(scores, is_edge):
    """The chance that an edge has a higher score than a pair that is none."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    edges, others = int(is_edge.sum()), int((~is_edge).sum())
    return float(ranks[is_edge].sum() - edges * (edges + 1) / 2) / (edges * others)


def cora_links(folder):
    """Cora without a tenth of its edges; these, and as many pairs that are none."""
    data = load("cora", folder)
    indices = torch.from_numpy(data.indices.astype(np.int64))
    whole = dgl.graph(("csc", (torch.from_numpy(data.indptr), indices, torch.tensor([]))))
    src, dst = whole.edges()
    once = (src < dst).nonzero().flatten()
    draw = torch.Generator().manual_seed(0)
    once = once[torch.randperm(len(once), generator=draw)]
    held, kept = once[: len(once) // 10], once[len(once) // 10 :]
    u, v = src[kept], dst[kept]
    g = dgl.graph((torch.cat([u, v]), torch.cat([v, u])), num_nodes=data.num_nodes)
    g.ndata["feat"] = torch.tensor(np.asarray(data.node_features["feat"]), dtype=torch.float32)
    pairs = torch.randint(0, data.num_nodes, (2, 4 * len(held)), generator=draw)
    free = ~whole.has_edges_between(*pairs) & (pairs[0] != pairs[1])
    pairs = pairs[:, free][:, : len(held)]
    return g, torch.cat([torch.stack([src[held], dst[held]]), pairs], dim=1)


def learn_links(folder, use_ddp: bool, device: str = "cpu") -> None:
    """Train on the edges of Cora, and tell those that were kept from pairs that are no edges."""
    torch.manual_seed(0)
    g, pairs = cora_links(folder)
    half = g.num_edges() // 2
    graph = dgl_mgpu.GlobalStore.from_dgl(g, edges=True, device=device).graph
    sampler = as_edge_prediction_sampler(
        NeighborSampler([10, 5], prefetch_node_feats=["feat"]),
        exclude="reverse_id",
        reverse_eids=torch.cat([torch.arange(half) + half, torch.arange(half)]).to(graph.device),
        negative_sampler=Uniform(1),
    )
    loader = DataLoader(
        graph,
        torch.arange(2 * half, device=graph.device),
        sampler,
        batch_size=256 if use_ddp else 512,
        shuffle=True,
        use_ddp=use_ddp,
    )
    links = Links(g.ndata["feat"].shape[1]).to(graph.device)
    model = DistributedDataParallel(links) if use_ddp else links
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    is_edge = torch.arange(pairs.shape[1]) < pairs.shape[1] // 2

    def held_out():
        with torch.no_grad():
            rows = copy.deepcopy(links).cpu()([g, g], g.ndata["feat"])
        return auc((rows[pairs[0]] * rows[pairs[1]]).sum(1), is_edge)

    for _ in range(5):
        for _, positive, negative, blocks in loader:
            rows = model(blocks, blocks[0].srcdata["feat"])
            scores = [(rows[u] * rows[v]).sum(1) for u, v in (positive.edges(), negative.edges())]
            labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                torch.cat(scores), torch.cat(labels)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if use_ddp:
        everyones = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, torch.tensor([held_out()], dtype=torch.float64))
        assert all(torch.equal(each, everyones[0]) for each in everyones)
    assert held_out() > 0.85


def test_links_of_cora_are_learned(real_data):
    learn_links(real_data, use_ddp=False)


@pytest.mark.usefixtures("forked_ranks")
def test_links_of_cora_are_learned_by_two_ranks(real_data):
    launch(learn_links, 2, real_data, True)
