"""Neighbour sampling on graphs of tensors, against DGL's C++ and by statistics."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import dgl
import numpy as np
import pytest
import torch
from dgl.sampling import (
    sample_etype_neighbors,
    sample_neighbors,
    sample_neighbors_biased,
    sample_neighbors_fused,
    select_topk,
)

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from dgl_mgpu.graph import random
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from tests.sampling.graphs import check_edges, edges_of, is_like, multigraph, on_cpp, regular, shop

SEEDS = [5, 0, 89, 3, 40, 2, 79, 1]


def own_ends(sample: dgl.DGLGraph, edge_dir: str) -> list[int]:
    return edges_of(sample)[1 if edge_dir == "in" else 0]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("prob", [None, "w", "mask"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [0, 1, 4, 1000, -1])
def test_counts_are_those_of_dgl_and_edges_those_of_seeds(
    device, fanout, replace, prob, edge_dir, idtype
):
    g, cpp = multigraph(device, idtype), on_cpp(multigraph, idtype)
    seeds = torch.tensor(SEEDS, dtype=idtype)
    options = dict(edge_dir=edge_dir, prob=prob, replace=replace)
    sample = sample_neighbors(g, seeds.to(device), fanout, **options)
    assert isinstance(sample._graph, TensorIndex)
    check_edges(sample, g)
    ends = own_ends(sample, edge_dir)
    assert [seed for seed, _ in groupby(ends)] == [seed for seed in SEEDS if seed in ends]
    with tensor_backed_graphs(False):
        expected = sample_neighbors(cpp, seeds, fanout, **options)
    assert Counter(ends) == Counter(own_ends(expected, edge_dir))
    eids = sample.edata[dgl.EID]
    if prob is not None:
        assert bool((g.edata[prob][eids.long()] > 0).all())
    if not replace:
        assert len(eids.unique()) == len(eids)
    if fanout == -1:
        assert sorted(eids.tolist()) == sorted(expected.edata[dgl.EID].tolist())


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(
    ("fanout", "edge_dir", "replace"), [(4, "in", 0), (-1, "out", 0), (9, "in", 1)]
)
def test_a_graph_of_one_type_is_sampled_as_one_of_several(
    device, fanout, edge_dir, replace, copies
):
    g, seeds = multigraph(device, torch.int64), torch.tensor(SEEDS, device=device)
    g.ndata["x"] = torch.randn(g.num_nodes(), 2, device=device)
    options = dict(edge_dir=edge_dir, replace=bool(replace), copy_ndata=copies, copy_edata=copies)
    samples = []
    for nodes in (seeds, {g.ntypes[0]: seeds}):  # at once, and through DGL's C function
        dgl.seed(7)
        samples.append(sample_neighbors(g, nodes, fanout, **options))
    found, expected = samples
    for end, other in zip(found.edges(), expected.edges(), strict=True):
        assert torch.equal(end, other)
    for side in ("ndata", "edata"):
        columns = dict(getattr(found, side)), dict(getattr(expected, side))
        assert columns[0].keys() == columns[1].keys()
        assert all(torch.equal(columns[0][name], columns[1][name]) for name in columns[0])
    with pytest.raises(dgl.DGLError, match="-2"):
        sample_neighbors(g, seeds, -2)
    with pytest.raises(dgl.DGLError, match=str(g.num_nodes())):
        sample_neighbors(g, seeds.new_tensor([g.num_nodes()]), 3)


@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("prob", [None, "w"])
def test_edge_types(device, edge_dir, prob):
    g, cpp = shop(device), on_cpp(shop)
    seeds = {"user": torch.tensor([3, 1, 7]), "item": torch.tensor([24, 0])}
    fanouts = {"follows": 2, ("user", "buys", "item"): -1, "bought": 0}
    here = {ntype: ids.to(device) for ntype, ids in seeds.items()}
    for nodes, others in ((here, seeds), ({"user": here["user"]}, {"user": seeds["user"]})):
        sample = sample_neighbors(g, nodes, fanouts, edge_dir=edge_dir, prob=prob)
        check_edges(sample, g)
        with tensor_backed_graphs(False):
            expected = sample_neighbors(cpp, others, fanouts, edge_dir=edge_dir, prob=prob)
        for etype in g.canonical_etypes:
            side = 1 if edge_dir == "in" else 0
            found = Counter(edges_of(sample, etype)[side])
            assert found == Counter(edges_of(expected, etype)[side])


def test_types_between_the_same_nodes_are_sampled_apart(device):
    edges = regular(torch.device("cpu"), 200, 6).edges()
    edges = tuple(ends.to(device) for ends in edges)
    g = dgl.heterograph({("n", "one", "n"): edges, ("n", "other", "n"): edges})
    sample = sample_neighbors(g, torch.arange(200, device=device), 2)
    assert edges_of(sample, "one") != edges_of(sample, "other")


def test_a_seed_that_is_mentioned_twice_and_no_seeds(device):
    g = multigraph(device)
    sample = sample_neighbors(g, torch.tensor([3, 0, 3], device=device), 2)
    assert edges_of(sample)[1] == [3, 3, 0, 0, 3, 3]
    none = torch.empty(0, dtype=torch.int64, device=device)
    for edge_dir in ("in", "out"):
        sample = sample_neighbors(g, none, 2, edge_dir=edge_dir)
        assert sample.num_edges() == 0 and sample.num_nodes() == g.num_nodes()
    empty = dgl.graph(([], []), num_nodes=4, device=device)
    assert sample_neighbors(empty, torch.tensor([1, 3], device=device), 2).num_edges() == 0


@pytest.mark.parametrize("replace", [False, True])
def test_all_edges_are_equally_likely(device, replace):
    nodes = 20_000
    g = regular(device, nodes, 5)
    sample = sample_neighbors(g, torch.arange(nodes, device=device), 2, replace=replace)
    src, dst, _ = map(np.array, edges_of(sample))
    assert np.array_equal(dst, np.arange(nodes).repeat(2))
    pairs = np.histogram2d(src[::2], src[1::2], bins=5, range=[[0, 5], [0, 5]])[0]
    # A seed's edges are in no order that says anything.
    above = np.triu_indices(5, 1)
    assert is_like((pairs + pairs.T)[above], np.ones(10))
    assert is_like([pairs.trace(), pairs.sum() - pairs.trace()], [0.2, 0.8] if replace else [0, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_probabilities(device, edge_dir, dtype):
    nodes, weights = 20_000, torch.tensor([1, 0, 5, 2, 4])
    g = regular(device, nodes, 5)
    g = g if edge_dir == "in" else g.reverse(copy_edata=True)
    g.edata["w"] = weights.to(dtype).repeat(nodes).to(device)
    sample = sample_neighbors(
        g, torch.arange(nodes, device=device), 1, edge_dir=edge_dir, prob="w", replace=True
    )
    src, dst, _ = edges_of(sample)
    found = np.bincount(src if edge_dir == "in" else dst, minlength=5)
    assert is_like(found, [1, 0, 1, 1, 1] if dtype == torch.int8 else weights)


def test_edges_without_probability(device):
    g = regular(device, 6, 4)
    g.edata["w"] = torch.rand(24, device=device) + 0.1
    g.edata["w"][4:12] = 0
    g.edata["column"] = g.edata["w"][:, None]
    everyone = torch.arange(6, device=device)
    for prob in ("w", "column"):
        for fanout, replace in ((2, False), (7, True), (-1, False)):
            sample = sample_neighbors(g, everyone, fanout, prob=prob, replace=replace)
            each = 4 if fanout < 0 else fanout
            assert Counter(edges_of(sample)[1]) == dict.fromkeys([0, 3, 4, 5], each)
    # Others are sampled as without the seeds that have none.
    dgl.seed(1)
    some = sample_neighbors(g, everyone[3:], 2, prob="w")
    dgl.seed(1)
    assert edges_of(sample_neighbors(g, everyone, 2, prob="w"))[2][-6:] == edges_of(some)[2]


@pytest.mark.parametrize("prob", [None, "w"])
@pytest.mark.parametrize("fanout", [2, 1000, -1])
def test_excluded_edges_are_left_out_of_the_sample(device, fanout, prob):
    g, seeds = multigraph(device), torch.arange(90, device=device)
    excluded = torch.arange(0, 500, 3, device=device)
    dgl.seed(1)
    whole = edges_of(sample_neighbors(g, seeds, fanout, prob=prob))
    dgl.seed(1)
    sample = sample_neighbors(g, seeds, fanout, prob=prob, exclude_edges=excluded)
    check_edges(sample, g)
    expected = [edge for edge in zip(*whole, strict=True) if edge[2] % 3]
    assert [*zip(*edges_of(sample), strict=True)] == expected


def test_as_many_edges_are_left_out_as_in_dgl(device):
    g, cpp = regular(device, 20_000, 5), on_cpp(regular, 20_000, 5)
    seeds, excluded = torch.arange(20_000), torch.arange(100_000)
    excluded = excluded[excluded % 5 < 2]
    sample = sample_neighbors(g, seeds.to(device), 2, exclude_edges=excluded.to(device))
    with tensor_backed_graphs(False):
        expected = sample_neighbors(cpp, seeds, 2, exclude_edges=excluded)
    for each in (sample, expected):
        counts = np.bincount(np.bincount(edges_of(each)[1], minlength=20_000))
        assert is_like(counts, [0.1, 0.6, 0.3])


def test_excluded_edge_types(device):
    g = shop(device)
    excluded = {("user", "follows", "user"): torch.arange(150, device=device)}
    users = {"user": torch.arange(40, device=device)}
    sample = sample_neighbors(g, users, -1, exclude_edges=excluded)
    assert sorted(edges_of(sample, "follows")[2]) == list(range(150, 200))
    assert sample.num_edges("bought") == 120


def test_one_seed_gives_one_sequence_of_samples(device):
    g, seeds = multigraph(device), torch.arange(90, device=device)

    def samples() -> list:
        return [
            edges_of(sample_neighbors(g, seeds, 2, prob=prob, replace=replace))
            for prob in (None, "w")
            for replace in (False, True)
        ]

    dgl.seed(7)
    first, second = samples(), samples()
    dgl.seed(7)
    assert [samples(), samples()] == [first, second]
    assert all(a != b for a, b in zip(first, second, strict=True))
    dgl.seed(8)
    assert samples() != first


def test_without_dgls_seed_torchs_is_taken(device, monkeypatch):
    g, seeds = multigraph(device), torch.arange(90, device=device)
    samples = []
    for number in (3, 3, 4):
        monkeypatch.setattr(random, "_common", random._Sequences())
        torch.manual_seed(number)
        samples.append(edges_of(sample_neighbors(g, seeds, 2)))
    assert samples[0] == samples[1] != samples[2]


def test_samples_are_the_same_on_a_gpu_as_on_the_cpu(device):
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    found = {}
    for where in (device, torch.device("cpu")):
        with tensor_backed_graphs():
            g, seeds = multigraph(where), torch.arange(90, device=where)
            dgl.seed(5)
            found[where.type] = [
                edges_of(sample_neighbors(g, seeds, 2)),
                edges_of(sample_neighbors(g, seeds, 2, prob="w")),
                edges_of(dgl.sampling.sample_labors(g, seeds, 2)[0]),
                dgl.sampling.random_walk(g, seeds, length=4, return_eids=True)[1].tolist(),
                dgl.sampling.random_walk(g, seeds, length=4, prob="w")[0].tolist(),
                dgl.sampling.node2vec_random_walk(g, seeds, 0.5, 2.0, 4).tolist(),
            ]
    assert found["cuda"] == found["cpu"]


def test_bad_seeds_and_weights(device):
    g = multigraph(device)
    with pytest.raises(IdOutOfRangeError):
        sample_neighbors(g, torch.tensor([3, 90], device=device), 2)
    for bad in (float("nan"), -1.0):
        g.edata["w"][:] = 1.0
        g.edata["w"][7] = bad
        node = g.find_edges(torch.tensor([7], device=device))[1]
        with pytest.raises(InvalidWeightError):
            sample_neighbors(g, node, 2, prob="w")
    with pytest.raises(InvalidInputError, match="edge_dir"):
        sample_neighbors(g, torch.tensor([3], device=device), 2, edge_dir="both")


def test_a_graph_on_the_cpu_is_to_be_pinned_for_nodes_on_a_gpu():
    from dgl_mgpu.sampling.seed_edges import resolve_graph

    g = on_cpp(multigraph)
    with pytest.raises(InvalidInputError, match="pin it"):
        resolve_graph(g._graph, [torch.tensor([3])])


def test_a_tensor_among_the_arguments_leaves_a_graph_on_the_cpu_to_dgl():
    """DGL takes a list of int there."""
    g = on_cpp(multigraph)
    with pytest.raises(TypeError, match="Tensor"):
        dgl.sampling.sample_etype_neighbors(
            g, torch.tensor([3]), torch.tensor([0, 500]), torch.tensor([2])
        )


# -- edge types in one graph ------------------------------------------------------------------


OFFSETS = [0, 150, 320, 500]


def etype_of(eids: list[int]) -> np.ndarray:
    return np.searchsorted(OFFSETS, eids, side="right") - 1


@pytest.mark.parametrize("offsets", [OFFSETS, OFFSETS[:-1]])
@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[2, 2, 2], [1, -1, 3], [0, 4, 1]])
def test_etypes_of_one_graph(device, fanouts, replace, edge_dir, offsets):
    g, cpp = multigraph(device), on_cpp(multigraph)
    nodes, fanout = torch.tensor(SEEDS), torch.tensor(fanouts)
    options = dict(edge_dir=edge_dir, replace=replace)
    sample = sample_etype_neighbors(g, nodes.to(device), offsets, fanout, **options)
    check_edges(sample, g)
    ends, eids = own_ends(sample, edge_dir), edges_of(sample)[2]
    found = [*zip(ends, etype_of(eids).tolist(), strict=True)]
    order = [(seed, etype) for seed in SEEDS for etype in range(3)]
    assert [pair for pair, _ in groupby(found)] == [pair for pair in order if pair in found]
    with tensor_backed_graphs(False):
        expected = sample_etype_neighbors(cpp, nodes, OFFSETS, fanout, **options)
    theirs = zip(
        own_ends(expected, edge_dir), etype_of(edges_of(expected)[2]).tolist(), strict=True
    )
    assert Counter(found) == Counter(theirs)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert sample_etype_neighbors(g, none, offsets, fanout).num_edges() == 0


def test_etypes_of_one_graph_with_probabilities(device):
    nodes = 20_000
    g = regular(device, nodes, 5)
    # Edges of the second half of the nodes are of the second type.
    offsets, half = [0, 5 * nodes // 2], 5 * nodes // 2
    weights = [torch.tensor([1.0, 2, 3, 0, 4]).repeat(nodes // 2), torch.ones(half)]
    sample = sample_etype_neighbors(
        g,
        torch.arange(nodes, device=device),
        offsets,
        torch.tensor([1, 1]),
        prob=[each.to(device) for each in weights],
    )
    src = np.array(edges_of(sample)[0])
    assert len(src) == nodes
    assert is_like(np.bincount(src[: nodes // 2], minlength=5), [1, 2, 3, 0, 4])
    assert is_like(np.bincount(src[nodes // 2 :], minlength=5), np.ones(5))


# -- by tag ---------------------------------------------------------------------------------------


def tagged(device: torch.device, edge_dir: str) -> dgl.DGLGraph:
    """Nodes 0 to 4 have the tags 1, 0, 2, 0, 1; `_TAG_OFFSET` says where each tag's edges are."""
    nodes, tags = 3000, torch.tensor([1, 0, 2, 0, 1])
    order = tags.argsort(stable=True)
    src, dst = order.repeat(nodes), torch.arange(nodes).repeat_interleave(5)
    ends = (src, dst) if edge_dir == "in" else (dst, src)
    g = dgl.graph(tuple(end.to(device) for end in ends), num_nodes=nodes)
    g.ndata["_TAG_OFFSET"] = torch.tensor([0, 2, 4, 5], device=device).expand(nodes, 4)
    return g


@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("replace", [False, True])
def test_tags(device, replace, edge_dir):
    g = tagged(device, edge_dir)
    nodes = torch.arange(3000, device=device)
    bias = torch.tensor([1.0, 0, 3], device=device)
    sample = sample_neighbors_biased(g, nodes, 1, bias, edge_dir=edge_dir, replace=replace)
    check_edges(sample, g)
    assert own_ends(sample, edge_dir) == nodes.tolist()
    far = edges_of(sample)[0 if edge_dir == "in" else 1]
    assert is_like(np.bincount(far, minlength=5), [0, 1, 3, 1, 0])
    sample = sample_neighbors_biased(g, nodes[:4], -1, bias, edge_dir=edge_dir)
    assert Counter(own_ends(sample, edge_dir)) == dict.fromkeys(range(4), 3)


def test_tags_of_a_graph_that_is_not_sorted(device):
    g = tagged(device, "in")
    g.ndata["_TAG_OFFSET"] = g.ndata["_TAG_OFFSET"] + torch.tensor([0, 0, 0, 1], device=device)
    with pytest.raises(InvalidInputError, match="sort_csc_by_tag"):
        sample_neighbors_biased(
            g, torch.tensor([1], device=device), 1, torch.ones(3, device=device)
        )


def test_tags_after_sorting(device):
    g = multigraph(device)
    tags = (torch.arange(90, device=device) * 7) % 4
    g = dgl.sort_csc_by_tag(g, tags)
    bias = torch.tensor([0.0, 1, 2, 0], device=device)
    sample = sample_neighbors_biased(g, torch.arange(90, device=device), -1, bias)
    src, _ = g.edges(order="eid")
    wanted = ((tags[src.long()] == 1) | (tags[src.long()] == 2)).nonzero().flatten()
    assert sorted(edges_of(sample)[2]) == wanted.tolist()


# -- by weight's rank -----------------------------------------------------------------------------


@pytest.mark.parametrize("edge_dir", ["in", "out"])
@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 1000, -1])
def test_topk_is_that_of_dgl(device, count, ascending, edge_dir):
    g, cpp = multigraph(device), on_cpp(multigraph)
    distinct = torch.randperm(500, generator=torch.Generator().manual_seed(3)).float()
    g.edata["w"], cpp.edata["w"] = distinct.to(device), distinct
    options = dict(edge_dir=edge_dir, ascending=ascending)
    nodes = torch.tensor(SEEDS)
    with tensor_backed_graphs(False):
        expected = [select_topk(cpp, count, "w", seeds, **options) for seeds in (nodes, None)]
    found = [select_topk(g, count, "w", s, **options) for s in (nodes.to(device), None)]
    for sample, other in zip(found, expected, strict=True):
        check_edges(sample, g)
        assert edges_of(sample) == edges_of(other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_topk_of_edge_types(device, dtype):
    g, cpp = shop(device), on_cpp(shop)
    for graph in (g, cpp):
        for etype in graph.canonical_etypes:
            numbers = (torch.arange(graph.num_edges(etype)) * 89) % 211
            graph.edges[etype].data["w"] = numbers.to(dtype).to(graph.device)
    counts = {"follows": 2, "buys": -1, "bought": 1}
    with tensor_backed_graphs(False):
        expected = select_topk(cpp, counts, "w")
    found = select_topk(g, counts, "w")
    for etype in g.canonical_etypes:
        assert edges_of(found, etype) == edges_of(expected, etype)


# -- blocks at once -------------------------------------------------------------------------------


def test_fused_sampling_gives_a_block():
    with tensor_backed_graphs():
        g = shop(torch.device("cpu"))
        seeds = {"user": torch.tensor([3, 1, 7]), "item": torch.tensor([24, 0])}
        block = sample_neighbors_fused(g, seeds, 2, mapping={})
        for ntype, nodes in seeds.items():
            assert torch.equal(block.dstnodes[ntype].data[dgl.NID], nodes)
            assert torch.equal(block.srcnodes[ntype].data[dgl.NID][: len(nodes)], nodes)
        for etype in g.canonical_etypes:
            src, dst = block.edges(etype=etype)
            ends = (
                block.srcnodes[etype[0]].data[dgl.NID][src],
                block.dstnodes[etype[2]].data[dgl.NID][dst],
            )
            expected = g.find_edges(block.edges[etype].data[dgl.EID], etype=etype)
            assert all(map(torch.equal, ends, expected))
            assert int(block.in_degrees(etype=etype).max()) == 2


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_fused_sampling_again_and_again_finds_edges_of_the_graph(idtype):
    """Also of DGL's own graphs, whose int32 ids it numbers wrongly from the second call on."""
    random = torch.Generator().manual_seed(5)
    src, dst = torch.randint(40, (2, 200), generator=random)
    g = dgl.graph((src, dst), num_nodes=43, idtype=idtype)
    mapping: dict = {}
    for seeds in torch.arange(42, dtype=idtype).view(14, 3):
        block = sample_neighbors_fused(g, seeds, -1, mapping=mapping)
        assert torch.equal(block.dstdata[dgl.NID], seeds)
        u, v = block.edges()
        found = zip(
            block.srcdata[dgl.NID][u.long()].tolist(), seeds[v.long()].tolist(), strict=True
        )
        expected = [(int(s), int(d)) for s, d in zip(src, dst, strict=True) if d in seeds]
        assert sorted(found) == sorted(expected)
