"""Random walks on graphs of tensors, against DGL's C++ and by statistics."""

from __future__ import annotations

from collections import Counter

import dgl
import numpy as np
import pytest
import torch
from dgl.sampling import (
    PinSAGESampler,
    RandomWalkNeighborSampler,
    global_uniform_negative_sampling,
    node2vec_random_walk,
    pack_traces,
    random_walk,
)
from dgl.sampling.pinsage import _select_pinsage_neighbors

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.ops.philox import draw_blocks
from dgl_mgpu.sampling import walks
from dgl_mgpu.sampling.views import edges_view
from tests.sampling.graphs import is_like, multigraph, on_cpp, shop


def fan(device: torch.device, count: int, degree: int) -> dgl.DGLGraph:
    """Nodes 0, 1, … have an edge to each of the last ``degree`` nodes, which have none."""
    src = torch.arange(count).repeat_interleave(degree)
    dst = torch.arange(count, count + degree).repeat(count)
    return dgl.graph((src, dst), num_nodes=count + degree).to(device)


def check_walks(g, traces, eids, metapath):
    """Every step is along the edge that is named, and walks end once."""
    traces, eids = traces.cpu(), eids.cpu()
    assert traces.dtype == eids.dtype == g.idtype and traces.shape[1] == eids.shape[1] + 1
    for step, etype in enumerate(metapath):
        on = eids[:, step] >= 0
        assert torch.equal(on, traces[:, step + 1] >= 0)
        assert not bool((on & (traces[:, step] < 0)).any())
        src, dst = g.find_edges(eids[on, step].to(g.device), etype=etype)
        assert torch.equal(src.cpu(), traces[on, step])
        assert torch.equal(dst.cpu(), traces[on, step + 1])
        if not bool(on.any()):
            assert bool((traces[:, step + 1 :] == -1).all())


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("prob", [None, "w"])
@pytest.mark.parametrize("restart", [None, 0.3, [0.0, 0.5, 0.0, 1.0, 0.0, 0.0]])
def test_walks_follow_edges(device, restart, prob, idtype):
    g = multigraph(device, idtype)
    starts = torch.arange(90, dtype=idtype, device=device).repeat(3)
    options = dict(length=6, prob=prob, return_eids=True)
    if restart is not None:
        options["restart_prob"] = torch.tensor(restart) if type(restart) is list else restart
    traces, eids, types = random_walk(g, starts, **options)
    assert torch.equal(traces[:, 0], starts) and types.tolist() == [0] * 7
    check_walks(g, traces, eids, ["_E"] * 6)
    if restart is None:
        # A walk ends where nothing leads on.
        src, weights = g.edges(order="eid")[0].long(), torch.ones(500, device=device).double()
        weights = weights if prob is None else g.edata["w"]
        out = torch.zeros(90, dtype=torch.float64, device=device).index_add_(0, src, weights)
        ends = ((traces[:, :-1] >= 0) & (traces[:, 1:] < 0)).nonzero()
        assert bool((out[traces[ends[:, 0], ends[:, 1]].long()] == 0).all())
        assert not bool((out[traces[:, :-1][traces[:, 1:] >= 0].long()] == 0).any())
    if type(restart) is list:
        assert bool((traces[:, 4:] == -1).all()) and bool((traces[:, 3] >= 0).any())
    if prob is not None:
        assert bool((g.edata["w"][eids[eids >= 0].long()] > 0).all())


@pytest.mark.parametrize("prob", [None, "w"])
@pytest.mark.parametrize(
    "metapath",
    [
        ["follows"] * 3,
        ["follows", "buys", "bought"] * 2,
        ["buys"],
        ["follows", "buys"],
        ["buys", "bought", "follows", "buys", "bought"],
    ],
)
def test_metapaths(device, metapath, prob):
    g, cpp = shop(device), on_cpp(shop)
    starts = torch.arange(40).repeat(5)
    traces, eids, types = random_walk(
        g, starts.to(device), metapath=metapath, prob=prob, return_eids=True
    )
    check_walks(g, traces, eids, metapath)
    with tensor_backed_graphs(False):
        expected = random_walk(cpp, starts, metapath=metapath)[1]
    assert types.tolist() == expected.tolist()


def test_bad_walks(device):
    g = shop(device)
    starts = torch.tensor([1, 2], device=device)
    with pytest.raises(InvalidInputError, match="metapath"):
        random_walk(g, starts, metapath=["buys", "follows"])
    for prob in (None, "w"):
        with pytest.raises(IdOutOfRangeError):
            random_walk(g, starts + 39, metapath=["buys"], prob=prob)
    with pytest.raises(InvalidInputError, match="restart"):
        random_walk(g, starts, metapath=["buys"], restart_prob=torch.tensor([0.1, 0.2]))
    g.edges["buys"].data["column"] = g.edges["buys"].data["w"][:, None]
    with pytest.raises(dgl.DGLError, match=r"\(150, 1\)"):
        random_walk(g, starts, metapath=["buys"], prob="column")
    g.edges["buys"].data["w"][0] = -1
    with pytest.raises(InvalidWeightError):
        random_walk(g, starts, metapath=["buys"], prob="w")
    g = multigraph(device)
    for p, q in ((0.0, 1.0), (1.0, -2.0), (float("inf"), 1.0)):
        with pytest.raises(InvalidInputError, match="above 0"):
            node2vec_random_walk(g, starts, p, q, 3)


@pytest.mark.parametrize("prob", [None, "w"])
def test_a_graph_in_other_memory_gives_the_same_walks(device, prob):
    g = multigraph(device)
    relation = g._graph.relations[0]
    weights = torch.empty(0) if prob is None else g.edata[prob]
    near = walks._steps(relation, weights, device)
    rows = None if prob is None else weights.__getitem__
    far = walks.StepsByRow(edges_view(relation, "csr", device), rows)
    nodes = torch.tensor([3, -1, 0, 89, 3, 2, 0, 40] * 20, device=device)
    draws, _ = draw_blocks(torch.arange(160, device=device), 0, 0, key=3)
    for found, expected in zip(far.step(nodes, draws), near.step(nodes, draws), strict=True):
        assert torch.equal(found, expected)


def test_no_walks_and_no_edges(device):
    none = torch.empty(0, dtype=torch.int64, device=device)
    g = multigraph(device)
    for prob in (None, "w"):
        assert random_walk(g, none, length=3, prob=prob)[0].shape == (0, 4)
        assert random_walk(g, torch.tensor([4], device=device), length=0)[0].tolist() == [[4]]
    assert node2vec_random_walk(g, none, 1.0, 1.0, 3).shape == (0, 4)
    empty = dgl.graph(([], []), num_nodes=3, device=device)
    empty.edata["w"] = torch.empty(0, device=device)
    for prob in (None, "w"):
        starts = torch.tensor([2], device=device)
        traces = random_walk(empty, starts, length=2, prob=prob)[0]
        assert traces.tolist() == [[2, -1, -1]]
        traces = node2vec_random_walk(empty, starts, 1.0, 2.0, 2, prob)
        assert traces.tolist() == [[2, -1, -1]]


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_steps_by_probability(device, scale):
    count, weights = 20_000, torch.tensor([1.0, 0, 5, 2, 4], dtype=torch.float64)
    g = fan(device, count, 5)
    rows = torch.ones(count, 1, dtype=torch.float64)
    rows[::2] = scale
    g.edata["w"] = (rows * weights).flatten().to(device)
    # Every node is mentioned twice: the two walks from it have nothing to do with each other.
    starts = torch.arange(count, device=device).repeat(2)
    traces, _ = random_walk(g, starts, length=1, prob="w")
    steps = (traces[:, 1] - count).reshape(2, count).cpu().numpy()
    pairs = np.histogram2d(*steps, bins=5, range=[[0, 5], [0, 5]])[0]
    assert is_like(pairs, np.outer(weights, weights))


@pytest.mark.parametrize("prob", [None, "w"])
def test_lengths_with_restart(device, prob):
    count = 20_000
    g = dgl.graph((torch.arange(count), torch.arange(count).roll(1)), device=device)
    g.edata["w"] = torch.rand(count, device=device) + 0.1
    starts = torch.arange(count, device=device)
    traces, _ = random_walk(g, starts, length=4, restart_prob=0.3, prob=prob)
    lengths = np.bincount((traces >= 0).sum(dim=1).cpu() - 1, minlength=5)
    assert is_like(lengths, [0.3, 0.7 * 0.3, 0.7**2 * 0.3, 0.7**3 * 0.3, 0.7**4])


def test_one_seed_gives_one_sequence_of_walks(device):
    g, starts = multigraph(device), torch.arange(90, device=device)

    def walk() -> list:
        return [
            random_walk(g, starts, length=4)[0].tolist(),
            random_walk(g, starts, length=4, prob="w")[0].tolist(),
            node2vec_random_walk(g, starts, 0.5, 2.0, 4).tolist(),
            [ends.tolist() for ends in global_uniform_negative_sampling(g, 20)],
        ]

    dgl.seed(3)
    first, second = walk(), walk()
    dgl.seed(3)
    assert [walk(), walk()] == [first, second]
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_packed_walks_are_those_of_dgl(device, idtype):
    traces = torch.tensor([[1, 2, -1], [3, -1, -1], [4, 5, 6], [-1, -1, -1]], dtype=idtype)
    types = torch.tensor([0, 1, 0], dtype=idtype)
    with tensor_backed_graphs(False):
        expected = pack_traces(traces, types)
    for found, theirs in zip(pack_traces(traces.to(device), types), expected, strict=True):
        assert found.device == device and torch.equal(found.cpu(), theirs)


# -- node2vec ---------------------------------------------------------------------------------


def triangle_and_leaf(device: torch.device, copies: int) -> dgl.DGLGraph:
    """From 0 to 1; from 1 back to 0, to 2, which has an edge to 0, and to 3, which has none."""
    src, dst = torch.tensor([0, 1, 1, 1, 2]), torch.tensor([1, 0, 2, 3, 0])
    shift = 4 * torch.arange(copies)[:, None]
    return dgl.graph(((src + shift).flatten(), (dst + shift).flatten())).to(device)


@pytest.mark.parametrize("most", [1 << 22, 0], ids=["listed", "proposed"])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5, 1.0, 1.0]])
@pytest.mark.parametrize("p, q", [(1.0, 1.0), (0.25, 4.0), (4.0, 0.5)])
def test_node2vec_weighs_where_it_came_from(device, monkeypatch, p, q, weights, most):
    monkeypatch.setattr(walks, "_MAX_LISTED", most)
    copies = 6000
    g = triangle_and_leaf(device, copies)
    starts = 4 * torch.arange(copies, device=device)
    if weights is not None:
        g.edata["w"] = torch.tensor(weights * copies, device=device)
    prob = None if weights is None else "w"
    traces, eids = node2vec_random_walk(g, starts, p, q, 2, prob, return_eids=True)
    check_walks(g, traces, eids, ["_E"] * 2)
    to = np.bincount((traces[:, 2] - starts).cpu(), minlength=4)
    edges = np.array(weights or [1.0] * 5)[1:4]
    assert is_like(to, [edges[0] / p, 0, edges[1], edges[2] / q])


@pytest.mark.parametrize("prob", [None, "w"])
def test_node2vec_walks_follow_edges(device, prob):
    g = multigraph(device)
    starts = torch.arange(90, device=device).repeat(4)
    traces, eids = node2vec_random_walk(g, starts, 2.0, 0.5, 5, prob, return_eids=True)
    check_walks(g, traces, eids, ["_E"] * 5)
    if prob is not None:
        assert bool((g.edata["w"][eids[eids >= 0]] > 0).all())


def test_node2vec_has_the_distribution_of_dgl(device):
    g, cpp = multigraph(device), on_cpp(multigraph)
    starts = torch.full((30_000,), 2)
    found = node2vec_random_walk(g, starts.to(device), 0.3, 3.0, 3).cpu()
    with tensor_backed_graphs(False):
        expected = node2vec_random_walk(cpp, starts, 0.3, 3.0, 3)
    for step in (1, 2, 3):
        ours, theirs = (
            np.bincount(traces[:, step] + 1, minlength=91) for traces in (found, expected)
        )
        common = theirs > 50
        assert is_like_sample(ours[common], theirs[common])


def is_like_sample(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two counts of equally many may be of one distribution."""
    from scipy import stats

    return stats.chi2_contingency([first, second]).pvalue > 1e-6


# -- PinSAGE --------------------------------------------------------------------------------------


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_selected_neighbors_are_those_of_dgl(device, count, idtype):
    random = torch.Generator().manual_seed(1)
    src = torch.randint(-1, 9, (60 * 12,), generator=random).to(idtype)
    dst = torch.randperm(60, generator=random).repeat_interleave(12).to(idtype)
    with tensor_backed_graphs(False):
        expected = _select_pinsage_neighbors(src, dst, 12, count)
    found = _select_pinsage_neighbors(src.to(device), dst.to(device), 12, count)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device == device and torch.equal(ours.cpu(), theirs)


def test_samplers_of_pinsage(device):
    g = shop(device)
    both = dgl.heterograph(
        {etype: g.edges(etype=etype) for etype in g.canonical_etypes if etype[1] != "follows"},
        {ntype: g.num_nodes(ntype) for ntype in g.ntypes},
    )
    seeds = torch.tensor([3, 9, 1], device=device)
    for sampler in (
        PinSAGESampler(both, "user", "item", 3, 0.2, 20, 4),
        RandomWalkNeighborSampler(g, 3, 0.2, 20, 4, ["buys", "bought"]),
    ):
        neighbors = sampler(seeds)
        assert neighbors.device == device and neighbors.num_nodes() == 40
        dst = neighbors.edges(order="eid")[1].tolist()
        assert set(Counter(dst)) <= {3, 9, 1} and max(Counter(dst).values()) <= 4
        visits = neighbors.edata["weights"]
        assert int(visits.min()) > 0
        for seed in set(dst):
            mine = visits[[place for place, node in enumerate(dst) if node == seed]]
            assert int(mine.sum()) <= 60 and bool((mine.diff() <= 0).all())
    homogeneous = RandomWalkNeighborSampler(multigraph(device), 2, 0.5, 5, 3)
    assert homogeneous(torch.arange(90, device=device)).num_edges() > 90


# -- pairs that are no edges ----------------------------------------------------------------------


@pytest.mark.parametrize("etype", ["follows", "buys"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("exclude_self_loops", [False, True])
def test_negative_pairs(device, exclude_self_loops, replace, etype):
    g = shop(device)
    src, dst = global_uniform_negative_sampling(
        g, 300, exclude_self_loops=exclude_self_loops, replace=replace, etype=etype
    )
    assert len(src) == len(dst) == 300 and src.dtype == g.idtype and src.device == device
    assert not bool(g.has_edges_between(src, dst, etype=etype).any())
    pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
    assert replace or len(pairs) == 300
    if etype == "follows":
        assert bool((src == dst).any()) != exclude_self_loops


def test_negative_pairs_of_a_graph_that_has_nearly_all(device):
    src, dst = (1 - torch.eye(12)).nonzero(as_tuple=True)
    g = dgl.graph((src[1:], dst[1:]), num_nodes=12, device=device)
    found = global_uniform_negative_sampling(g, 5, exclude_self_loops=True, replace=True)
    assert {(int(a), int(b)) for a, b in zip(*found, strict=True)} <= {(0, 1)}
