"""Random walks on a store's graph and PinSAGE's samplers, against DGL's own on the DGLGraph."""

from __future__ import annotations

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import BlockSampler, DataLoader
from dgl.sampling import PinSAGESampler, RandomWalkNeighborSampler, random_walk
from scipy import stats

import dgl_mgpu
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    InvalidWeightError,
    StoreClosedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.ops.view import PARTS
from dgl_mgpu.train.launch.launch import launch
from tests.sampling.graphs import FALSE_ALARM, is_like
from tests.store.test_graph import power_law_graph
from tests.store.unread_ids import unread

pytestmark = pytest.mark.usefixtures("in_shared_memory")

USERS, ITEMS = 60, 41
METAPATH = ["bought-by", "follows", "buys"]


def both_ways(edges, idtype=torch.int64, **num_nodes):
    """A graph of edge types, each with another that has edge i as its edge i, the other way."""
    back = {"buys": "bought-by", "follows": "followed-by"}
    types = {}
    for (source, name, target), (u, v) in edges.items():
        types[source, name, target] = u, v
        types[target, back[name], source] = v, u
    g = dgl.heterograph(types, num_nodes).astype(idtype)
    draw = torch.Generator().manual_seed(5)
    for etype in g.canonical_etypes:
        count = g.num_edges(etype)
        g.edges[etype].data["w"] = torch.rand(count, generator=draw) * (torch.arange(count) % 3)
    return g


def shop(idtype=torch.int64):
    """Users who buy items, some more than once, and follow others; some do neither."""
    draw = torch.Generator().manual_seed(4)

    def ends(count, below):
        return (torch.rand(count, generator=draw) ** 2 * below).long()

    return both_ways(
        {
            ("user", "buys", "item"): (ends(400, USERS), ends(400, ITEMS)),
            ("user", "follows", "user"): (ends(300, USERS), ends(300, USERS)),
        },
        idtype,
        user=USERS,
        item=ITEMS,
    )


def chain(idtype=torch.int64):
    """User k follows user k + 1 and buys item 2k: nodes have at most one edge of a type."""
    user = torch.arange(USERS)
    return both_ways(
        {
            ("user", "buys", "item"): (user[:-5], 2 * user[:-5]),
            ("user", "follows", "user"): (user[:-1], user[1:]),
        },
        idtype,
        user=USERS,
        item=2 * USERS,
    )


def of_items_and_buyers(g):
    return dgl.edge_type_subgraph(g, ["buys", "bought-by"])


def store_of(g, **options):
    return dgl_mgpu.GlobalStore.from_dgl(g, seed=3, **options).graph


def is_like_sample(first, second):
    """Whether two counts may be of one distribution; what hardly occurs is taken together."""
    counts = np.stack([first, second])
    rare = counts.sum(axis=0) < 20
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(axis=1)])
    return stats.chi2_contingency(counts[:, counts.sum(axis=0) > 0]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("prob", [None, "w"])
@pytest.mark.parametrize("path", [METAPATH * 2, ["bought-by"], ["bought-by", "buys"] * 3])
def test_walks_without_a_choice_are_dgls(path, prob, idtype):
    g = chain(idtype)
    for etype in g.canonical_etypes:
        g.edges[etype].data["w"].fill_(0.5)
    nodes = torch.arange(g.num_nodes("item"), dtype=idtype)
    for restart_prob in (None, torch.tensor([0.0] * (len(path) - 1) + [1.0])):
        options = {
            "metapath": path, "prob": prob, "restart_prob": restart_prob, "return_eids": True
        }  # fmt: skip
        found = random_walk(store_of(g), nodes, **options)
        for ours, theirs in zip(found, random_walk(g, nodes, **options), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert (found[0][:, 1] == -1).any() and (found[0][:, -2] >= 0).any()


@pytest.mark.parametrize("prob", [None, "w"])
@pytest.mark.parametrize("restart_prob", [None, 0.3, torch.tensor([0.0, 0.5, 0.2, 0.0])])
def test_walks_are_distributed_as_dgls(restart_prob, prob):
    g = shop()
    etypes = ["bought-by", "follows", "buys", ("item", "bought-by", "user")]
    options = {"metapath": etypes, "prob": prob, "restart_prob": restart_prob, "return_eids": True}
    starts = torch.full((30_000,), 2)
    found, expected = (random_walk(each, starts, **options) for each in (store_of(g), g))
    assert torch.equal(found[2], expected[2])
    for step, etype in enumerate(etypes):
        for place, count in ((0, g.num_nodes(g.to_canonical_etype(etype)[2])), (1, 400)):
            ours, theirs = (
                np.bincount(each[place][:, step + 1 - place] + 1, minlength=count + 1)
                for each in (found, expected)
            )
            assert is_like_sample(ours, theirs)
        taken = found[1][:, step] >= 0
        source, target = g.find_edges(found[1][taken, step], etype=etype)
        assert torch.equal(source, found[0][taken, step])
        assert torch.equal(target, found[0][taken, step + 1])


def test_walks_from_a_node_have_nothing_to_do_with_each_other():
    g = shop()
    degree = int(g.out_degrees(2, etype="bought-by"))
    _, eids, _ = random_walk(
        store_of(g), torch.full((40_000,), 2), metapath=["bought-by"], return_eids=True
    )
    _, edge = eids[:, 0].unique(return_inverse=True)
    pairs = np.histogram2d(*edge.view(2, -1).numpy(), bins=degree)[0]
    assert is_like(pairs, np.ones((degree, degree)))


@pytest.mark.parametrize("traversals, termination_prob", [(1, 0.0), (3, 0.5)])
def test_visits_are_distributed_as_dgls(traversals, termination_prob):
    g = of_items_and_buyers(shop())
    seeds = torch.tensor([3, 0])
    counts = []
    for graph in (store_of(g), g):
        sampler = PinSAGESampler(graph, "item", "user", traversals, termination_prob, 8000, ITEMS)
        neighbors = sampler(seeds)
        visits = torch.zeros(ITEMS, ITEMS, dtype=torch.int64)
        visits[neighbors.edges()] = neighbors.edata["weights"]
        assert neighbors.num_nodes() == ITEMS
        counts.append(visits[:, seeds].T.numpy())
    share = [each / each.sum(axis=1, keepdims=True) for each in counts]
    # A walk's visits are not independent of each other, at worst they are all of one node.
    deviation = np.sqrt(traversals * 2 * share[1].clip(1e-4) / counts[1].sum(axis=1)[:, None])
    assert (abs(share[0] - share[1]) < 6 * deviation).all()
    visited = [each.sum(axis=1) / 8000 for each in counts]
    expected = sum((1 - termination_prob) ** each for each in range(traversals))
    assert visited[0] == pytest.approx(expected, abs=0.07)
    assert visited[1] == pytest.approx(expected, abs=0.07)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_neighbors_without_a_choice_are_dgls(idtype):
    g = chain(idtype)
    graph, seeds = store_of(g), torch.tensor([4, 0, 5, 90], dtype=idtype)
    pairs = [
        tuple(RandomWalkNeighborSampler(each, 3, 0.0, 4, 2, METAPATH) for each in (graph, g)),
        tuple(
            PinSAGESampler(each, "item", "user", 3, 0.0, 4, 2, "visits")
            for each in (store_of(of_items_and_buyers(g)), of_items_and_buyers(g))
        ),
    ]
    for sampler, dgls in pairs:
        found, expected = sampler(seeds), dgls(seeds)
        assert found.canonical_etypes == expected.canonical_etypes
        assert found.idtype == idtype and found.num_nodes() == expected.num_nodes()
        for ours, theirs in zip(found.edges(), expected.edges(), strict=True):
            assert torch.equal(ours, theirs)
        assert found.edata.keys() == expected.edata.keys()
        for name, column in expected.edata.items():
            assert torch.equal(found.edata[name], column)
    # Item 4 is user 2's, who follows 3, who bought 6, ...: each four times.
    neighbors = graph.pinsage_neighbors(seeds, 4, 3, 2, METAPATH)
    assert neighbors.canonical_etypes == [("item", "_E", "item")]
    assert [each.tolist() for each in neighbors.edges()] == [
        [6, 8, 2, 4, 92, 94],
        [4, 4, 0, 0, 90, 90],
    ]
    assert neighbors.edata["visits"].tolist() == [4] * 6


def test_neighbors_selected_at_once_are_those_most_visited():
    g = of_items_and_buyers(shop())
    sampler = PinSAGESampler(g, "item", "user", 2, 0.5, 20_000, 5)
    found = store_of(g).pinsage_neighbors(
        torch.tensor([1]), 20_000, 2, 5, ["bought-by", ("user", "buys", "item")], 0.5
    )
    expected = sampler(torch.tensor([1]))
    ours, theirs = (
        dict(zip(each.edges()[0].tolist(), visits.tolist(), strict=True))
        for each, visits in (
            (found, found.edata["visits"]), (expected, expected.edata["weights"])
        )
    )  # fmt: skip
    assert len(ours) == 5 and len(ours.keys() & theirs.keys()) >= 4
    for node in ours.keys() & theirs.keys():
        assert ours[node] == pytest.approx(theirs[node], abs=6 * (2 * theirs[node]) ** 0.5)


def test_samples_depend_on_the_seed_the_epoch_and_the_nodes():
    g = of_items_and_buyers(shop())

    def samples(graph):
        sampler = PinSAGESampler(graph, "item", "user", 2, 0.5, 10, 3)
        nodes, found = torch.arange(20), []
        for _ in range(2):
            neighbors = sampler(nodes)
            found.append([each.tolist() for each in neighbors.edges()])
            nodes = dgl.to_block(neighbors, nodes).srcdata[dgl.NID]
        return found

    graph = store_of(g)
    first = samples(graph)
    graph.set_epoch(1)
    assert samples(graph) != first
    graph.set_epoch(0)
    assert samples(graph) == samples(store_of(g, gpu_memory="2KiB")) == first
    assert samples(dgl_mgpu.GlobalStore.from_dgl(g, seed=4).graph) != first


class ItemsOfItems(BlockSampler):
    """As DGL's example of PinSAGE has it."""

    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        sampler = PinSAGESampler(g, "item", "user", 2, 0.5, 10, 3)
        nodes, blocks = seed_nodes["item"], []
        for _ in range(2):
            frontier = sampler(nodes)
            block = dgl.to_block(frontier, nodes)
            block.edata["weights"] = frontier.edata["weights"][block.edata[dgl.EID]]
            nodes = block.srcdata[dgl.NID]
            blocks.insert(0, block)
        return {"item": nodes}, seed_nodes, blocks


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_items_of_items(workers):
    g = of_items_and_buyers(shop())
    g.nodes["item"].data["feat"] = torch.rand(ITEMS, 3)
    sampler = ItemsOfItems(prefetch_node_feats={"item": ["feat"]})
    loader = DataLoader(
        store_of(g), {"item": torch.arange(ITEMS)}, sampler, batch_size=7, num_workers=workers
    )
    passes = []
    for _ in range(2):
        drawn = {}
        for inputs, outputs, blocks in loader:
            rows = blocks[0].srcdata["feat"]
            assert torch.equal(rows, g.nodes["item"].data["feat"][inputs["item"]])
            assert blocks[-1].in_degrees().max() <= 3
            drawn[tuple(outputs["item"].tolist())] = blocks[-1].edata["weights"].tolist()
        passes.append(drawn)
    assert passes[0].keys() == passes[1].keys() and passes[0] != passes[1]
    assert sum(map(len, passes[0])) == ITEMS


def test_undirected_graphs_of_one_type():
    g = dgl.add_reverse_edges(undirected())
    found, expected = (
        np.bincount(random_walk(each, torch.zeros(20_000).long(), length=3)[0][:, 3], minlength=300)
        for each in (store_of(g), g)
    )
    assert is_like_sample(found, expected)
    sampler = RandomWalkNeighborSampler(store_of(g), 2, 0.2, 5, 3)
    assert sampler(torch.arange(300)).in_degrees().max() == 3
    with pytest.raises(UnsupportedByStoreError, match="ids"):
        random_walk(store_of(g), torch.arange(5), length=2, return_eids=True)
    with pytest.raises(UnsupportedByStoreError, match="other way round"):
        random_walk(store_of(power_law_graph()), torch.arange(5), length=2)
    assert random_walk(store_of(g), torch.tensor([4]), length=0)[0].tolist() == [[4]]


def undirected():
    draw = torch.Generator().manual_seed(1)
    return dgl.graph(tuple(torch.randint(0, 300, (2, 900), generator=draw)), num_nodes=300)


def walks_both_ways(buys, bought_by, **options):
    g = dgl.heterograph(
        {("user", "buys", "item"): buys, ("item", "bought-by", "user"): bought_by},
        {"user": USERS, "item": ITEMS},
    )
    g.edges["buys"].data["w"] = torch.ones(g.num_edges("buys"))
    path = ["buys", "bought-by"]
    return random_walk(store_of(g), torch.arange(USERS), metapath=path, **options), g


def test_edge_types_are_taken_for_each_others_reverse_only_if_they_are():
    user, item = shop().edges(etype="buys")
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
    (traces, _), g = walks_both_ways((user, item), (item[order], user[order]))
    went = traces[:, 1] >= 0
    assert torch.equal(went, g.out_degrees(etype="buys") > 0)
    assert g.has_edges_between(traces[went, 0], traces[went, 1], etype="buys").all()
    for options in ({"return_eids": True}, {"prob": "w"}):
        with pytest.raises(UnsupportedByStoreError, match="under other ids"):
            walks_both_ways((user, item), (item[order], user[order]), **options)
    # They do not matter to edges that have no probabilities.
    nodes = torch.arange(ITEMS)
    traces, _ = random_walk(store_of(g), nodes, metapath=["bought-by"], prob="w")
    assert torch.equal(traces[:, 1] >= 0, g.out_degrees(etype="bought-by") > 0)
    # One edge less, one other edge, two edges that swapped their users, and the same way round.
    other, swapped = user.clone(), user.clone()
    other[7] = (other[7] + 1) % USERS
    first, second = 0, int((user != user[0]).nonzero()[0])
    swapped[[first, second]] = user[[second, first]]
    assert item[first] != item[second]
    for wrong in ((item[1:], user[1:]), (item, other), (item, swapped), (user % ITEMS, item)):
        with pytest.raises(UnsupportedByStoreError, match=r"'item', 'reverse-buys', 'user'"):
            walks_both_ways((user, item), wrong)


def test_of_several_reversed_types_the_one_with_the_same_ids_is_taken():
    user, item = shop().edges(etype="buys")
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
    g = dgl.heterograph(
        {
            ("item", "a", "user"): (item[order], user[order]),
            ("user", "buys", "item"): (user, item),
            ("item", "z", "user"): (item, user),
        },
        {"user": USERS, "item": ITEMS},
    )
    traces, eids, _ = random_walk(
        store_of(g), torch.arange(USERS), metapath=["buys"], return_eids=True
    )
    went = eids[:, 0] >= 0
    assert torch.equal(user[eids[went, 0]], traces[went, 0])
    assert torch.equal(item[eids[went, 0]], traces[went, 1])


def test_bad_walks():
    g = shop()
    graph, nodes = store_of(g), torch.arange(5)
    for metapath in (["buys", "buys"], ["sells"], ["buys", ("user", "buys", "item")], None):
        with pytest.raises(InvalidInputError):
            random_walk(graph, nodes, metapath=metapath)
    with pytest.raises(InvalidInputError, match="homogeneous"):
        random_walk(graph, nodes, length=3)
    for wrong in (torch.tensor([USERS]), torch.tensor([-1])):
        for options in {"metapath": ["buys"]}, {"metapath": ["buys"], "prob": "w"}:
            for ids in wrong, unread(wrong):
                with pytest.raises(IdOutOfRangeError):
                    random_walk(graph, ids, **options)
        one_type = store_of(dgl.edge_type_subgraph(g, ["follows"]))
        with pytest.raises(IdOutOfRangeError):  # of walks without a step
            one_type.random_walk(unread(wrong), length=0)
    for restart_prob in (torch.tensor([0.1, 0.2]), torch.tensor(0.1), 1.5, float("nan"), "0.1"):
        for prob in (None, "w"):
            with pytest.raises(InvalidInputError, match=r"probabilit|restart_prob="):
                random_walk(graph, nodes, metapath=["buys"], prob=prob, restart_prob=restart_prob)
    for metapath in (["buys"], [], None):
        with pytest.raises(InvalidInputError, match="PinSAGE"):
            graph.pinsage_neighbors(nodes, 4, 2, 3, metapath)
    with pytest.raises(InvalidInputError, match="termination_prob"):
        graph.pinsage_neighbors(nodes, 4, 2, 3, ["buys", "bought-by"], 1.5)
    g.edges["buys"].data["w"][0] = -1
    with pytest.raises(InvalidWeightError):
        random_walk(store_of(g), torch.arange(USERS), metapath=["buys"], prob="w")
    store = dgl_mgpu.GlobalStore.from_dgl(g)
    random_walk(store.graph, nodes, metapath=["buys"])
    store.close()
    with pytest.raises(StoreClosedError):
        random_walk(store.graph, nodes, metapath=["buys"])


@pytest.mark.parametrize("users", [0, 3])
def test_graphs_without_edges(users):
    g = both_ways({("user", "buys", "item"): ([], [])}, user=users, item=4)
    graph = store_of(g)
    assert PinSAGESampler(graph, "item", "user", 2, 0.5, 10, 3)(torch.arange(4)).num_edges() == 0
    assert graph.sample_neighbors({"item": torch.arange(4)}, 2).num_edges() == 0
    for nodes in (torch.arange(4), torch.arange(0)):
        for prob in (None, "w"):
            traces, _ = random_walk(graph, nodes, metapath=["bought-by", "buys"], prob=prob)
            assert traces.tolist() == [[int(node), -1, -1] for node in nodes]


def test_types_are_those_of_dgls_metagraph():
    g = shop()
    found, expected = store_of(g).metagraph(), g.metagraph()
    assert sorted(found.edges(keys=True)) == sorted(expected.edges(keys=True))


def _walk_on_a_rank(expected):
    g = of_items_and_buyers(shop())
    graph = store_of(
        g if dist.get_rank() == 0 else None, device="cpu", graph_ratio=0.7, gpu_memory="6KiB"
    )
    assert int(graph.view("buys").tiers[:, PARTS].max()) == 2
    for ours, theirs in zip(walks_of(graph), expected, strict=True):
        assert torch.equal(ours, theirs)


def walks_of(graph):
    items, users = (torch.arange(count, dtype=graph.idtype) for count in (ITEMS, USERS))
    neighbors = PinSAGESampler(graph, "item", "user", 2, 0.5, 10, 3)(items)
    walks = random_walk(graph, users, metapath=["buys", "bought-by"], return_eids=True, prob="w")
    return *neighbors.edges(), neighbors.edata["weights"], *walks


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_share_a_store_walk_as_one_alone():
    launch(_walk_on_a_rank, 2, walks_of(store_of(of_items_and_buyers(shop()))))
