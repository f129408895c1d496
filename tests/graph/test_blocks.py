"""Blocks of graphs made of tensors: against DGL's C++, and against blocks made the ordinary way."""

from __future__ import annotations

import pickle
import subprocess
import sys

import dgl
import pytest
import torch
from dgl.base import DGLError
from dgl.dataloading import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.heterograph import DGLBlock
from dgl.utils import get_num_threads, set_num_threads
from hypothesis import given
from hypothesis import strategies as st

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.sampling import block_sampling
from tests.environment import search_path
from tests.sampling.loaders import assert_blocks_are_right

IDTYPES = [torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def on_tensors():
    with tensor_backed_graphs():
        yield


def homogeneous(idtype=torch.int64, num_nodes=60, num_edges=400):
    draw = torch.Generator().manual_seed(4)
    # Few of many: parallel edges and nodes without edges.
    ends = (num_nodes * torch.rand(2, num_edges, generator=draw) ** 2).to(idtype)
    g = dgl.graph((ends[0], ends[1]), num_nodes=num_nodes)
    g.ndata["feat"] = torch.rand(num_nodes, 3, generator=draw)
    g.edata["weight"] = torch.rand(num_edges, generator=draw) + 0.1
    g.edata["mask"] = torch.rand(num_edges, generator=draw) < 0.5
    return g


def heterogeneous(idtype=torch.int64):
    draw = torch.Generator().manual_seed(5)

    def pairs(sources, targets, count):
        return tuple(
            torch.randint(0, nodes, (count,), generator=draw, dtype=idtype)
            for nodes in (sources, targets)
        )

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): pairs(30, 30, 120),
            ("user", "buys", "item"): pairs(30, 20, 90),
            ("item", "bought-by", "user"): pairs(20, 30, 90),
        },
        {"user": 30, "item": 20, "shop": 4},
    )
    g.nodes["user"].data["feat"] = torch.rand(30, 2, generator=draw)
    g.edges["buys"].data["price"] = torch.rand(90, generator=draw)
    g.edges["buys"].data["weight"] = torch.rand(90, generator=draw) + 0.1
    return g


def assert_same(found, expected):
    """Two blocks that nobody can tell apart but by what their graph index is made of."""
    assert type(found) is type(expected) is DGLBlock
    for name in vars(expected).keys() - {"_graph", "_node_frames", "_edge_frames"}:
        assert vars(found)[name] == vars(expected)[name], name
    assert vars(found).keys() == vars(expected).keys()
    assert found.idtype == expected.idtype
    for etype in expected.canonical_etypes:
        for end, expected_end in zip(
            found.edges(etype=etype, order="eid"),
            expected.edges(etype=etype, order="eid"),
            strict=True,
        ):
            assert torch.equal(end, expected_end), etype
    for frames, expected_frames in (
        (found._node_frames, expected._node_frames),
        (found._edge_frames, expected._edge_frames),
    ):
        for frame, expected_frame in zip(frames, expected_frames, strict=True):
            assert frame.num_rows == expected_frame.num_rows
            assert list(frame) == list(expected_frame)
            assert frame.schemes == expected_frame.schemes
            for name, column in expected_frame.items():
                assert torch.equal(frame[name], column), name


# -- to_block ----------------------------------------------------------------------------------


def both(make, convert):
    """What ``convert`` makes of a graph, here and by DGL's C++."""
    threads = get_num_threads()
    set_num_threads(1)  # more of them number nodes in the order in which they come
    try:
        with tensor_backed_graphs(False):
            expected = convert(make())
    finally:
        set_num_threads(threads)
    return convert(make()), expected


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize("include_dst_in_src", [True, False])
def test_to_block_of_all_nodes_with_edges(idtype, include_dst_in_src):
    for make in (homogeneous, heterogeneous):
        found, expected = both(
            lambda make=make: make(idtype),
            lambda g: dgl.to_block(g, include_dst_in_src=include_dst_in_src),
        )
        assert isinstance(found._graph, TensorIndex)
        assert_same(found, expected)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_to_block_of_the_edges_of_some_nodes(idtype):
    seeds = torch.tensor([7, 59, 0, 3, 12], dtype=idtype)

    def convert(g):
        return dgl.to_block(dgl.in_subgraph(g, seeds), seeds)

    assert_same(*both(lambda: homogeneous(idtype), convert))
    by_type = {"user": seeds % 20, "item": seeds[1:4] % 20}

    def convert_types(g):
        return dgl.to_block(dgl.in_subgraph(g, by_type), by_type)

    assert_same(*both(lambda: heterogeneous(idtype), convert_types))


@given(st.data())
def test_to_block_of_any_edges(data):
    num_nodes = data.draw(st.integers(1, 6))
    node = st.integers(0, num_nodes - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=12))
    targets = {dst for _, dst in edges} | set(data.draw(st.lists(node)))
    seeds = torch.tensor(data.draw(st.permutations(sorted(targets))), dtype=torch.int64)

    def make():
        ends = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2)
        return dgl.graph((ends[:, 0].contiguous(), ends[:, 1].contiguous()), num_nodes=num_nodes)

    with tensor_backed_graphs():
        assert_same(*both(make, lambda g: dgl.to_block(g, seeds)))


def test_given_sources_are_the_sources():
    # DGL's own loses them: its block has features for sources and no sources.
    g = dgl.graph(([0, 1, 2, 0], [1, 2, 1, 2]))
    sources = torch.tensor([2, 1, 0])
    for include_dst_in_src, targets in ((True, [2, 1]), (False, [1, 2])):
        for given_as in (sources, {"_N": sources}):
            block = dgl.to_block(g, torch.tensor(targets), include_dst_in_src, given_as)
            assert torch.equal(block.srcdata[dgl.NID], sources)
            src, dst = block.edges()
            assert torch.equal(block.srcdata[dgl.NID][src], g.edges()[0])
            assert torch.equal(block.dstdata[dgl.NID][dst], g.edges()[1])
            assert block.num_src_nodes() == 3


def test_edges_at_nodes_that_are_not_given_are_refused():
    g = dgl.graph(([0, 1, 2], [1, 2, 0]))
    with pytest.raises(DGLError, match="end at node 0, which is not in dst_nodes"):
        dgl.to_block(g, torch.tensor([1, 2]))
    with pytest.raises(DGLError, match="begin at node 2, which is not in src_nodes"):
        dgl.to_block(g, torch.tensor([1, 2, 0]), False, torch.tensor([0, 1]))
    with pytest.raises(DGLError, match="pass dst_nodes as a dict"):
        dgl.to_block(heterogeneous(), torch.tensor([1]))
    with pytest.raises(DGLError, match="pass src_nodes as a dict"):
        dgl.to_block(heterogeneous(), {"user": torch.tensor([1])}, src_nodes=torch.tensor([1]))


def test_to_block_of_edges_grouped_by_seed_is_made_with_its_csc():
    seeds = torch.tensor([5, 2])
    g = dgl.graph(([1, 9, 2, 5, 9], [5, 5, 5, 2, 2]), num_nodes=10)
    (relation,) = dgl.to_block(g, seeds)._graph.relations
    assert "csc" in relation.created
    indptr, indices, eids = relation.csc()
    assert (indptr.tolist(), indices.tolist(), eids) == ([0, 3, 5], [2, 3, 1, 0, 3], None)
    (relation,) = dgl.to_block(g, seeds.flip(0))._graph.relations
    assert relation.created == ("coo",)
    assert relation.csc().eids is not None


def test_the_c_function_is_served():
    g = heterogeneous(torch.int32)
    targets = [torch.arange(g.num_nodes(ntype), dtype=torch.int32) for ntype in g.ntypes]
    function = sys.modules["dgl.transforms.to_block"]._CAPI_DGLToBlock
    index, sources, eids = function(g._graph, targets, True, [])
    assert isinstance(index, TensorIndex) and index.is_metagraph_unibipartite()
    assert [len(nodes) for nodes in sources] == [g.num_nodes(ntype) for ntype in g.ntypes]
    assert [len(ids) for ids in eids] == [g.num_edges(etype) for etype in g.canonical_etypes]


# -- blocks of all hops at once ----------------------------------------------------------------


def sampled_hops(g, seeds, fanouts, **options):
    return NeighborSampler(fanouts, **options).sample(g, seeds)


def ordinary(block, g):
    """The same block, made as DGL makes them."""
    again = DGLBlock(block._graph, (g.ntypes, g.ntypes), g.etypes)
    sources = [block.srcnodes[ntype].data[dgl.NID] for ntype in g.ntypes]
    targets = [block.dstnodes[ntype].data[dgl.NID] for ntype in g.ntypes]
    edges = [block.edges[etype].data[dgl.EID] for etype in g.canonical_etypes]
    dgl.utils.set_new_frames(
        again,
        node_frames=dgl.utils.extract_node_subframes_for_block(g, sources, targets),
        edge_frames=dgl.utils.extract_edge_subframes(g, edges),
    )
    return again


@pytest.mark.parametrize("idtype", IDTYPES)
def test_blocks_are_as_those_made_the_ordinary_way(idtype):
    for g, seeds in (
        (homogeneous(idtype), torch.arange(9, dtype=idtype)),
        (heterogeneous(idtype), {"item": torch.arange(5, dtype=idtype)}),
        (heterogeneous(idtype), {"shop": torch.arange(3), "user": torch.arange(8)}),
    ):
        if isinstance(seeds, dict):
            seeds = {ntype: ids.to(idtype) for ntype, ids in seeds.items()}
        _, outputs, blocks = sampled_hops(g, seeds, [3, 2])
        assert outputs is seeds
        for block in blocks:
            assert isinstance(block._graph, TensorIndex)
            expected = ordinary(block, g)
            assert_same(block, expected)
            assert_same(pickle.loads(pickle.dumps(block)), expected)
            assert_same(block.to(block.device), expected)
            assert_same(block.int().long(), expected.long())
            assert_same(block.local_var(), expected)
            assert repr(block) == repr(expected)
            assert block.is_block
            assert block.srctypes == expected.srctypes
            for ntype in g.ntypes:
                assert block.num_src_nodes(ntype) == expected.num_src_nodes(ntype)
                assert block.num_dst_nodes(ntype) == expected.num_dst_nodes(ntype)


def test_features_of_a_block_can_be_set_without_touching_the_graph_or_other_blocks():
    g = homogeneous()
    _, _, (first, second) = sampled_hops(g, torch.arange(9), [3, 2])
    before = g.ndata["feat"].clone()
    first.srcdata["feat"] = torch.zeros(first.num_src_nodes(), 1)
    first.edata["more"] = torch.zeros(first.num_edges())
    assert "more" not in second.edata and "more" not in g.edata
    assert torch.equal(g.ndata["feat"], before)
    assert second.srcdata["feat"].shape[1] == first.dstdata["feat"].shape[1] == 3
    with pytest.raises(DGLError, match="number of features"):
        first.dstdata["wrong"] = torch.zeros(first.num_dst_nodes() + 1)


def assert_hops_are_right(g, blocks):
    """Edges are the graph's, and the sources of a hop are the destinations of the next."""
    assert_blocks_are_right(g, blocks)
    for before, block in zip([None, *blocks], blocks, strict=False):
        for ntype in g.ntypes:
            sources = block.srcnodes[ntype].data[dgl.NID]
            targets = block.dstnodes[ntype].data[dgl.NID]
            assert len(sources.unique()) == len(sources)
            assert torch.equal(sources[: len(targets)], targets)
            if before is not None:
                assert torch.equal(before.dstnodes[ntype].data[dgl.NID], sources)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_samples_are_of_the_graph_and_of_the_right_size(idtype):
    g = homogeneous(idtype)
    seeds = torch.arange(0, 60, 3, dtype=idtype)
    degrees = g.in_degrees()
    inputs, _, blocks = sampled_hops(g, seeds, [4, 2])
    assert torch.equal(inputs, blocks[0].srcdata[dgl.NID])
    assert torch.equal(blocks[-1].dstdata[dgl.NID], seeds)
    assert_hops_are_right(g, blocks)
    for block, fanout in zip(blocks, (4, 2), strict=True):
        nodes = block.dstdata[dgl.NID].long()
        assert torch.equal(block.in_degrees(), degrees[nodes].clamp(max=fanout))
        assert len(block.edata[dgl.EID].unique()) == block.num_edges()
        assert torch.equal(block.srcdata["feat"], g.ndata["feat"][block.srcdata[dgl.NID].long()])
        assert torch.equal(block.edata["weight"], g.edata["weight"][block.edata[dgl.EID].long()])
    _, _, (block,) = sampled_hops(g, seeds, [7], replace=True)
    nodes = block.dstdata[dgl.NID].long()
    assert torch.equal(block.in_degrees(), torch.where(degrees[nodes] > 0, 7, 0).to(idtype))
    _, _, (block,) = sampled_hops(g, seeds, [-1], mask="mask")
    masked = g.edata["mask"][g.in_edges(seeds, form="eid").long()].sum()
    assert block.num_edges() == masked > 0
    assert block.edata["mask"].all()
    _, _, (block,) = sampled_hops(g, seeds, [2], prob="weight")
    assert torch.equal(block.in_degrees(), degrees[seeds.long()].clamp(max=2))
    assert_hops_are_right(g, [block])


def test_samples_of_several_types():
    g = heterogeneous()
    seeds = {"user": torch.arange(6), "shop": torch.tensor([2])}
    fanouts = [
        {"follows": 2, "buys": 3, "bought-by": -1},
        {("user", "follows", "user"): 1, "buys": 1, "bought-by": 0},
    ]
    for options in ({}, {"prob": "weight"}):
        inputs, _, blocks = sampled_hops(g, seeds, fanouts, **options)
        assert_hops_are_right(g, blocks)
        assert inputs.keys() == {"user", "item", "shop"}
        assert inputs["shop"].tolist() == [2]
        assert blocks[1].num_edges("bought-by") == 0
        assert blocks[1].in_degrees(etype="follows").max() == 1
        assert (
            blocks[0].num_edges("bought-by")
            == g.in_degrees(blocks[0].dstnodes["user"].data[dgl.NID], etype="bought-by").sum()
        )


def test_all_neighbours_are_those_of_dgl():
    seeds = torch.arange(0, 60, 7)
    # DGL's fused sampler needs more threads than one and would not be the one compared with.
    sampler = MultiLayerFullNeighborSampler(2, fused=False)
    (inputs, _, blocks), (expected_inputs, _, expected) = both(
        homogeneous, lambda g: sampler.sample(g, seeds)
    )
    assert set(inputs.tolist()) == set(expected_inputs.tolist())
    for block, reference in zip(blocks, expected, strict=True):
        assert sorted(block.edata[dgl.EID].tolist()) == sorted(reference.edata[dgl.EID].tolist())


def test_samples_are_repeated_by_the_seed_and_differ_otherwise():
    g = homogeneous()
    seeds = torch.arange(30)

    def eids():
        return [block.edata[dgl.EID].tolist() for block in sampled_hops(g, seeds, [3, 3])[2]]

    dgl.seed(11)
    first, second = eids(), eids()
    dgl.seed(11)
    assert [eids(), eids()] == [first, second]
    assert first != second
    dgl.seed(12)
    assert eids() != first


def test_every_edge_is_drawn_as_often_as_any_other():
    g = homogeneous()
    node = int(g.in_degrees().argmax())
    degree, fanout, rounds = int(g.in_degrees(node)), 5, 800
    assert degree > 2 * fanout
    dgl.seed(1)
    counts = torch.zeros(g.num_edges())
    for _ in range(rounds):
        _, _, (block,) = sampled_hops(g, torch.tensor([node]), [fanout])
        counts[block.edata[dgl.EID]] += 1
    counts = counts[g.in_edges(node, form="eid")]
    share = fanout / degree
    deviations = (counts - rounds * share) / (rounds * share * (1 - share)) ** 0.5
    assert deviations.abs().max() < 5


def test_what_is_not_sampled_at_once_takes_dgls_own_way(monkeypatch):
    calls = []

    def counted(function):
        def count(*arguments, **options):
            calls.append(1)
            return function(*arguments, **options)

        return count

    for name in ("sample_blocks_async", "start"):
        monkeypatch.setattr(block_sampling, name, counted(getattr(block_sampling, name)))
    g = homogeneous()
    seeds = torch.arange(5)
    sampled_hops(g, seeds, [2, 2])
    assert len(calls) == 1
    g.edata["half"] = g.edata["weight"].half()
    g.edata["column"] = g.edata["weight"][:, None]
    _, _, (block,) = NeighborSampler([2], fused=False).sample(g.formats(["coo"]), seeds)
    assert block.num_edges()
    with pytest.raises(DGLError, match="not in dst_nodes"):  # a block has in-edges
        NeighborSampler([2], edge_dir="out", fused=False).sample(g, seeds)
    excluded = g.in_edges(seeds, form="eid")[::2]
    _, _, (block,) = NeighborSampler([-1], fused=False).sample(g, seeds, excluded)
    assert set(block.edata[dgl.EID].tolist()).isdisjoint(excluded.tolist())
    for nodes, prob in (([1, 2], None), (seeds, "column"), (seeds, "half")):
        _, _, (block,) = NeighborSampler([2], prob=prob, fused=False).sample(g, nodes)
        assert block.num_dst_nodes() == len(nodes)
    with pytest.raises(DGLError, match="data type"):
        NeighborSampler([2], fused=False).sample(g, seeds.int())
    assert len(calls) == 1


def test_nodes_whose_weights_are_all_zero_have_no_edges():
    g = homogeneous()
    node = int(g.in_degrees().argmax())
    g.edata["weight"][g.in_edges(node, form="eid")] = 0
    _, _, (block,) = NeighborSampler([3], prob="weight", fused=False).sample(
        g, torch.tensor([node, (node + 1) % 60])
    )
    assert block.in_degrees(0) == 0


@pytest.mark.parametrize("node", [-1, 60])
def test_seeds_that_are_no_nodes_are_refused(node):
    with pytest.raises(DGLError, match=f"id {node}") as caught:
        sampled_hops(homogeneous(), torch.tensor([3, node]), [2, 2])
    assert isinstance(caught.value, IdOutOfRangeError)


def test_weights_set_anew_are_those_that_count():
    g = homogeneous()
    seeds = torch.arange(60)
    for parity in (0, 1, 0):
        g.edata["chosen"] = torch.arange(g.num_edges()) % 2 == parity
        _, _, (block,) = sampled_hops(g, seeds, [-1], mask="chosen")
        assert set((block.edata[dgl.EID] % 2).tolist()) == {parity}


GRAPHS_ON_THE_CPU = """
import sys
import dgl_mgpu, dgl, torch
from dgl.dataloading import NeighborSampler
g = dgl.rand_graph(100, 1000)
_, _, blocks = NeighborSampler([3, 3]).sample(g, torch.arange(10))
assert type(blocks[0]._graph).__name__ == "HeteroGraphIndex"
loaded = [name for name in sys.modules if name.startswith(("dgl_mgpu.ops", "numba"))]
sys.exit(", ".join(loaded) if loaded else 0)
"""


def test_graphs_of_dgls_own_load_nothing_of_ours():
    done = subprocess.run(
        [sys.executable, "-c", GRAPHS_ON_THE_CPU],
        env={"PYTHONPATH": search_path(), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
