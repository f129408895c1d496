"""Features of what is sampled from a store: read when they are looked at, and not before."""

from __future__ import annotations

import pickle

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    Sampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform

import dgl_mgpu
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    StoreClosedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.graph.block_frames import BlockFrame
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.train.launch.launch import launch
from tests.sampling.loaders import node_graph, typed_graph

pytestmark = pytest.mark.usefixtures("in_shared_memory")

_WAYS = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "persistent_workers": True},
    {"use_prefetch_thread": True},
    {"num_workers": 1, "use_prefetch_thread": True},
]


def assert_rows_are(g, part, names=None):
    """All features of a graph's nodes and edges are those of ``g`` by their ids, or all of them."""
    sides = [(part.srcnodes, part.srctypes), (part.dstnodes, part.dsttypes)]
    for side, ntypes in sides if part.is_block else [(part.nodes, part.ntypes)]:
        for ntype in ntypes:
            data, whole = side[ntype].data, g.nodes[ntype].data
            ids = data[dgl.NID] if dgl.NID in data else g.nodes(ntype)
            assert data.keys() - {dgl.NID} == set(whole)
            for name, rows in whole.items():
                assert torch.equal(data[name], rows[ids.long()])
                assert data[name].dtype == rows.dtype
    for etype in g.canonical_etypes:
        data, whole = part.edges[etype].data, g.edges[etype].data
        assert data.keys() - {dgl.EID} == set(whole)
        for name, rows in whole.items():
            assert torch.equal(data[name], rows[data[dgl.EID].long()])


@pytest.mark.parametrize("options", _WAYS)
@pytest.mark.parametrize("prefetched", [False, True])
def test_blocks_have_the_features_of_the_store(options, prefetched):
    g = node_graph("cpu")
    names = {"prefetch_node_feats": ["feat"], "prefetch_edge_feats": ["weight"]}
    sampler = NeighborSampler([4, 3], **(names if prefetched else {}))
    with dgl_mgpu.GlobalStore.from_dgl(g, gpu_memory="4KiB") as store:
        loader = DataLoader(store.graph, torch.arange(100), sampler, batch_size=30, **options)
        for _ in range(2):
            for _, _, blocks in loader:
                for block in blocks:
                    assert_rows_are(g, block)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("on_tensors", [False, True])
def test_blocks_of_several_types_have_their_features(idtype, on_tensors):
    g = typed_graph("cpu").astype(idtype)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store, tensor_backed_graphs(on_tensors):
        seeds = {"user": torch.arange(20).to(idtype), "item": torch.arange(9).to(idtype)}
        for sampler in (NeighborSampler([4, 3]), MultiLayerFullNeighborSampler(2)):
            for _, _, blocks in DataLoader(store.graph, seeds, sampler, batch_size=10):
                for block in blocks:
                    assert_rows_are(g, block)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_pair_graphs_have_features_as_in_dgl(options):
    g = node_graph("cpu")
    sampler = as_edge_prediction_sampler(
        NeighborSampler([3]), negative_sampler=GlobalUniform(2), exclude="self"
    )
    with dgl_mgpu.GlobalStore.from_dgl(g, edges=True) as store:
        kinds = [
            next(iter(DataLoader(graph, torch.arange(40), sampler, batch_size=40, **options)))
            for graph in (store.graph, g)
        ]
        (_, pairs, others, blocks), (_, dgls_pairs, dgls_others, _) = kinds
        assert_rows_are(g, pairs)
        assert_rows_are(g, blocks[0])
        assert torch.equal(pairs.ndata["feat"], dgls_pairs.ndata["feat"]) or len(pairs.ndata) == 3
        assert pairs.ndata.keys() == dgls_pairs.ndata.keys()
        assert pairs.edata.keys() == dgls_pairs.edata.keys()
        assert others.ndata.keys() == dgls_others.ndata.keys()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"use_prefetch_thread": True}])
def test_what_nobody_looks_at_is_not_read(options):
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        loader = DataLoader(
            store.graph, torch.arange(60), NeighborSampler([3, 3]), batch_size=20, **options
        )
        read = 0
        for _, _, blocks in loader:
            moved = [block.to("cpu").int().local_var() for block in blocks]
            # To ask whether a feature is in DGL's data reads it; to ask for names does not.
            assert {"feat", "label"} < moved[
                0
            ].srcdata.keys() and not store.graph.traffic.take().rows
            with moved[-1].local_scope():
                moved[-1].dstdata["label"]
            read += moved[-1].num_dst_nodes()
            assert [*store.graph.traffic.take().rows] == [("label", "device")]
        assert read == 60


def test_frames_of_blocks_on_tensors_make_columns_when_they_are_read():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store, tensor_backed_graphs():
        inputs, _, (block,) = store.graph.sample_blocks(torch.arange(9), [3])
        frames = [*block._node_frames, *block._edge_frames]
        assert all(type(frame) is BlockFrame for frame in frames)
        assert all(len(frame.unmade_ids) >= frame.num_rows for frame in frames)
        for frame in frames:
            assert frame.unmade_names == tuple(frame.keys())
            assert frame.unmade_ids is None
        assert torch.equal(inputs, block.srcdata[dgl.NID])
        assert_rows_are(g, block)
        block.srcdata["mine"] = torch.ones(block.num_src_nodes())
        _, _, (other,) = store.graph.sample_blocks(torch.arange(9), [3])
        assert "mine" not in other.srcdata
        other._node_frames[0].set_initializer(torch.ones)
        assert block._node_frames[0]._default_initializer is None


def test_rows_are_those_of_when_they_are_looked_at_first():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        loader = DataLoader(store.graph, torch.arange(9), NeighborSampler([3]), batch_size=9)
        [(inputs, _, [block])] = loader
        store.graph.ndata["feat"][inputs[:1]] = torch.full((1, 5), 7.0)
        expected = g.ndata["feat"][inputs]
        expected[0] = 7
        assert torch.equal(block.srcdata["feat"], expected)
        store.graph.ndata["feat"] = g.ndata["feat"]
        assert torch.equal(block.srcdata["feat"], expected)


def test_narrow_features_are_given_as_they_were():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes={"feat": "float16"}) as store:
        loader = DataLoader(store.graph, torch.arange(9), NeighborSampler([3]), num_workers=1)
        for inputs, _, [block] in loader:
            expected = g.ndata["feat"][inputs].half()
            assert torch.equal(block.srcdata["feat"], expected.float())
            assert torch.equal(block.to("cpu").srcdata["feat"], expected.float())


def test_types_can_change_before_rows_are_read():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        frontier = store.graph.sample_neighbors(torch.arange(9), 2)
        _, _, [block] = store.graph.sample_blocks(torch.arange(9), [2])
        for part in (block, frontier):
            ids = part.srcdata[dgl.NID] if part.is_block else g.nodes()
            rows = g.ndata["feat"][ids]
            half = dgl.to_half(part)
            assert torch.equal(half.srcdata["feat"], rows.half())
            assert torch.equal(
                dgl.to_double(dgl.to_half(part)).srcdata["feat"], rows.half().double()
            )


def test_rows_of_rows():
    g = node_graph("cpu")
    for on_tensors in (False, True):
        with (
            dgl_mgpu.GlobalStore.from_dgl(g, edges=True) as store,
            tensor_backed_graphs(on_tensors),
        ):
            part = store.graph.edge_subgraph(torch.arange(50, 90))
            fewer = dgl.node_subgraph(part, torch.arange(3, 9))
            ids = part.ndata[dgl.NID][fewer.ndata[dgl.NID]]
            assert torch.equal(fewer.ndata["feat"], g.ndata["feat"][ids])
            assert_rows_are(g, part)
            assert_rows_are(g, store.graph.edge_subgraph(torch.arange(9), relabel_nodes=False))
            plain = store.graph.edge_subgraph(torch.arange(5), store_ids=False)
            assert dgl.EID not in plain.edata
            assert torch.equal(plain.edata["weight"], g.edata["weight"][:5])


def test_a_batch_that_is_pickled_has_its_rows():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        _, _, [block] = store.graph.sample_blocks(torch.arange(9), [2])
        assert_rows_are(g, pickle.loads(pickle.dumps(block)))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_rows_of_a_store_that_was_closed(options):
    store = dgl_mgpu.GlobalStore.from_dgl(node_graph("cpu"))
    sampler = NeighborSampler([3])
    [(_, _, [block])] = DataLoader(store.graph, torch.arange(9), sampler, batch_size=9, **options)
    kept = block.srcdata["label"]
    store.close()
    assert torch.equal(block.srcdata["label"], kept)
    with pytest.raises(StoreClosedError):
        block.srcdata["feat"]


class _OfTheGuide(Sampler):
    """A sampler of one's own, as DGL's user guide writes it (section 6.4)."""

    def __init__(self, fanouts, exclude=None):
        super().__init__()
        self.fanouts, self.exclude = fanouts, exclude

    def sample(self, g, seed_nodes):
        output_nodes, subgs = seed_nodes, []
        for fanout in reversed(self.fanouts):
            sg = dgl.sampling.sample_neighbors(g, seed_nodes, fanout, exclude_edges=self.exclude)
            eids = sg.edata[dgl.EID]
            sg = dgl.to_block(sg, seed_nodes)
            sg.edata[dgl.EID] = eids
            seed_nodes = sg.srcdata[dgl.NID]
            subgs.insert(0, sg)
        return seed_nodes, output_nodes, subgs


@pytest.mark.parametrize("options", _WAYS)
def test_samplers_of_ones_own(options):
    g = node_graph("cpu")
    left_out = torch.arange(0, 3000, 2)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for exclude in (None, left_out):
            sampler = _OfTheGuide([3, 4], exclude)
            loader = DataLoader(store.graph, torch.arange(90), sampler, batch_size=30, **options)
            for inputs, outputs, blocks in loader:
                assert torch.equal(inputs, blocks[0].srcdata[dgl.NID])
                assert torch.equal(outputs, blocks[1].dstdata[dgl.NID])
                for block, fanout in zip(blocks, (3, 4), strict=True):
                    assert_rows_are(g, block)
                    eids = block.edata[dgl.EID]
                    sources, targets = g.find_edges(eids)
                    src, dst = block.edges()
                    assert torch.equal(block.srcdata[dgl.NID][src], sources)
                    assert torch.equal(block.dstdata[dgl.NID][dst], targets)
                    degrees = g.in_degrees(block.dstdata[dgl.NID])
                    if exclude is None:
                        assert torch.equal(block.in_degrees(), degrees.clamp(max=fanout))
                    else:
                        assert bool((eids % 2 == 1).all())


def test_dgls_function_samples_a_store_as_its_method_does():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        graph, seeds = store.graph, torch.arange(30)
        for options in ({}, {"prob": "weight"}, {"replace": True}, {"edge_dir": "in"}):
            graph.set_epoch(0)
            found = dgl.sampling.sample_neighbors(graph, seeds, 3, **options)
            graph.set_epoch(0)
            expected = graph.sample_neighbors(seeds, 3, **options)
            assert torch.equal(found.edata[dgl.EID], expected.edata[dgl.EID])
            ends = torch.stack(g.find_edges(found.edata[dgl.EID]))
            assert torch.equal(torch.stack(found.edges()), ends)
            assert_rows_are(g, found)
        every = dgl.sampling.sample_neighbors(graph, [3, 5], -1, copy_ndata=False)
        assert sorted(every.edata[dgl.EID].tolist()) == sorted(
            g.in_edges([3, 5], form="eid").tolist()
        )
        assert not every.ndata
        assert "weight" not in dgl.sampling.sample_neighbors(graph, [3], 1, copy_edata=False).edata
        with pytest.raises(IdOutOfRangeError, match="no seed node 300, the graph has 300"):
            dgl.sampling.sample_neighbors(graph, [300], 1)
        with pytest.raises(InvalidInputError, match="in-edges only"):
            dgl.sampling.sample_neighbors(graph, [3], 1, edge_dir="out")


@pytest.mark.parametrize("on_tensors", [False, True])
def test_blocks_that_are_made_of_a_frontier(on_tensors):
    for g, seeds in (
        (node_graph("cpu"), torch.arange(30)),
        (typed_graph("cpu"), {"user": torch.arange(9), "item": torch.arange(4)}),
    ):
        with dgl_mgpu.GlobalStore.from_dgl(g) as store, tensor_backed_graphs(on_tensors):
            frontier = store.graph.sample_neighbors(seeds, 3)
            eids = {etype: frontier.edges[etype].data[dgl.EID] for etype in g.canonical_etypes}
            block = dgl.to_block(frontier, seeds)
            for etype, ids in eids.items():
                block.edges[etype].data[dgl.EID] = ids
            assert not store.graph.traffic.take().rows
            assert_rows_are(g, block)
            assert store.graph.traffic.take().rows


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("options", [{}, {"gpu_memory": "2KiB"}])
def test_in_degrees(ordered, options):
    g = typed_graph("cpu")
    if ordered:  # edges are numbered as they lie
        g = dgl.heterograph(
            {
                etype: ("csc", (*g.adj_tensors("csc", etype=etype)[:2], torch.empty(0).long()))
                for etype in g.canonical_etypes
            },
            {ntype: g.num_nodes(ntype) for ntype in g.ntypes},
        )
    with dgl_mgpu.GlobalStore.from_dgl(g, **options) as store:
        graph = store.graph
        for etype in g.canonical_etypes:
            ids = torch.tensor([3, 0, 3, 39])
            assert torch.equal(graph.in_degrees(etype=etype), g.in_degrees(etype=etype))
            assert torch.equal(graph.in_degrees(ids, etype), g.in_degrees(ids, etype))
            assert graph.in_degrees(7, etype[1]) == g.in_degrees(7, etype)
            assert graph.in_degrees([], etype).tolist() == []
        for bad in (-1, 60):
            with pytest.raises(IdOutOfRangeError, match=f"no node {bad}, the graph has 60"):
                graph.in_degrees(torch.tensor([bad]), "follows")
        with pytest.raises(InvalidInputError):
            graph.in_degrees()  # of which type?


def test_features_are_shown_as_a_graph_shows_them():
    g, many = node_graph("cpu"), typed_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        graph = store.graph
        for found, expected in ((graph.ndata, g.ndata), (graph.edata, g.edata)):
            assert found.keys() == expected.keys() and len(found) == len(expected)
            for name, rows in expected.items():
                assert name in found
                assert (found[name].shape, found[name].dtype) == (rows.shape, rows.dtype)
                assert torch.equal(found[name][:], rows)
                some = torch.tensor([4, 4, 0], dtype=torch.int32)
                assert torch.equal(found[name][some], rows[some.long()])
                assert torch.equal(
                    found[name][rows.flatten(1).sum(1) > 1]
                    if rows.dim() > 1
                    else found[name][rows > 0.5],
                    rows[rows.flatten(1).sum(1) > 1] if rows.dim() > 1 else rows[rows > 0.5],
                )
                assert torch.equal(found[name][-3:], rows[-3:])
                assert torch.equal(found[name][5], rows[5])
        assert graph.srcdata.keys() == graph.dstdata.keys() == g.ndata.keys()
        assert torch.equal(graph.nodes(), g.nodes())
        assert "nothing" not in graph.ndata and graph.ndata.get("nothing") is None
        for kind in (KeyError, InvalidInputError):
            with pytest.raises(kind, match="the store holds"):
                graph.ndata["nothing"]
        with pytest.raises(UnsupportedByStoreError, match=r"'max' of a stored feature.*\[:\]"):
            graph.ndata["label"].max()
    with dgl_mgpu.GlobalStore.from_dgl(many) as store:
        graph = store.graph
        assert graph.ndata.keys() == many.ndata.keys()
        assert graph.ndata["feat"].keys() == many.ndata["feat"].keys()
        for ntype in many.ntypes:
            assert torch.equal(graph.nodes[ntype].data["feat"][:], many.nodes[ntype].data["feat"])
            assert torch.equal(graph.ndata["feat"][ntype][:], many.ndata["feat"][ntype])
            assert torch.equal(graph.nodes(ntype), many.nodes(ntype))
        rows = many.edges["buys"].data["weight"]
        assert torch.equal(graph.edges["buys"].data["weight"][:], rows)
        with pytest.raises(UnsupportedByStoreError, match="list all edges"):
            graph.edges()


@pytest.mark.parametrize("options", [{}, {"gpu_memory": "2KiB"}, {"dtypes": "float16"}])
def test_features_can_be_written(options):
    g = node_graph("cpu")
    dtypes = {"feature_dtypes": {"feat": "float16"}} if "dtypes" in options else options
    expected = {name: rows.clone() for name, rows in g.ndata.items()}

    def rounded(rows):
        return rows.half().float() if "dtypes" in options and rows.is_floating_point() else rows

    with dgl_mgpu.GlobalStore.from_dgl(g, **dtypes) as store:
        data = store.graph.ndata
        writes = [
            ("feat", torch.tensor([7, 0, 299]), torch.rand(3, 5)),
            ("feat", 5, torch.rand(5)),
            ("feat", slice(20, 30), torch.rand(10, 5)),
            ("feat", g.ndata["label"] == 3, 0.25),
            ("label", torch.tensor([1, 2]), torch.tensor([70, 80])),
            ("label", slice(None), torch.arange(300)),
        ]
        for name, at, rows in writes:
            expected[name][at] = rows
            data[name][at] = rows
            assert torch.equal(data[name][:], rounded(expected[name]))
        data["feat"] = 2 * g.ndata["feat"]
        assert torch.equal(data["feat"][:], rounded(2 * g.ndata["feat"]))
        before = data["feat"][:]
        wrong = [
            (torch.tensor([300]), torch.rand(1, 5), IdOutOfRangeError),
            (torch.tensor([1]), torch.rand(1, 4), InvalidInputError),
            (torch.tensor([1]), torch.rand(2, 5), InvalidInputError),
            (torch.tensor([1]), torch.rand(1, 5).double(), InvalidInputError),
            (torch.tensor([1.0]), torch.rand(1, 5), InvalidInputError),
            (slice(None), torch.rand(299, 5), InvalidInputError),
        ]
        for at, rows, kind in wrong:
            with pytest.raises(kind):
                data["feat"][at] = rows
        if "dtypes" in options:
            with pytest.raises(InvalidInputError, match="1e\\+09, and the largest"):
                data["feat"][3] = torch.full((5,), 1e9)
        assert torch.equal(data["feat"][:], before)
        with pytest.raises(UnsupportedByStoreError, match=r"add feature 'h'.*before from_dgl"):
            data["h"] = torch.zeros(300)
        with pytest.raises(UnsupportedByStoreError, match="remove feature 'feat'"):
            del data["feat"]
    with pytest.raises(StoreClosedError):
        data["feat"][0] = torch.zeros(5)


def test_features_of_several_types_can_be_written():
    g = typed_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        store.graph.ndata["feat"] = {"user": torch.ones(60, 3)}
        store.graph.edges["buys"].data["weight"] = torch.zeros(200)
        assert torch.equal(store.gather("feat", g.nodes("user"), "user"), torch.ones(60, 3))
        items = store.gather("feat", g.nodes("item"), "item")
        assert torch.equal(items, g.nodes["item"].data["feat"])
        assert not store.graph.edges["buys"].data["weight"][:].any()
        with pytest.raises(InvalidInputError, match="dict of rows by type"):
            store.graph.ndata["feat"] = torch.ones(60, 3)


def test_rows_on_disk_are_not_written(tmp_path):
    g = node_graph("cpu", num_nodes=4000)
    with dgl_mgpu.GlobalStore.from_dgl(
        g, gpu_memory="0B", host_memory="90KiB", disk_path=str(tmp_path)
    ) as store:
        assert any(tier.memory == "disk" for tier in store.plan.tables["node/_N/feat"].tiers)
        with pytest.raises(InvalidInputError, match=r"on disk; .*the store with more of it"):
            store.graph.ndata["feat"][0] = torch.zeros(5)


def test_weights_that_were_written_are_checked_anew():
    g = node_graph("cpu")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        sampler = NeighborSampler([2], prob="weight")
        loader = DataLoader(store.graph, torch.arange(40), sampler, batch_size=40)
        list(loader)
        # Of each node, one edge alone has a weight left.
        eids = torch.stack([g.in_edges(v, form="eid")[0] for v in range(300) if g.in_degrees(v)])
        weights = torch.zeros(3000)
        weights[eids] = 1
        store.graph.edata["weight"] = weights
        [(_, _, [block])] = loader
        assert set(block.edata[dgl.EID].tolist()) <= set(eids.tolist())
        store.graph.edata["weight"][int(eids[-1])] = -1.0  # at a node that is not sampled
        with pytest.raises(InvalidInputError, match="negative"):
            next(iter(loader))


def _writing(folder) -> None:
    rank = dist.get_rank()
    g = node_graph("cpu")
    store = dgl_mgpu.GlobalStore.from_dgl(g if rank == 0 else None, device="cpu")
    feat = store.graph.ndata["feat"]
    # Each rank writes rows of its own, and reads all.
    mine = torch.arange(rank, 20, 2)
    feat[mine] = torch.full((len(mine), 5), 10.0 + rank)
    expected = g.ndata["feat"].clone()
    expected[:20] = (10.0 + torch.arange(20) % 2)[:, None]
    assert torch.equal(feat[:], expected)
    feat[mine[: 3 * rank]] = torch.zeros(3 * rank, 5)  # the first has none
    expected[[1, 3, 5]] = 0
    assert torch.equal(feat[:], expected)
    store.graph.ndata["feat"] = 3 * g.ndata["feat"]
    assert torch.equal(feat[:], 3 * g.ndata["feat"])
    drawn = [
        [blocks[0].edata[dgl.EID].tolist() for *_, blocks in loader]
        for loader in (
            DataLoader(store.graph, torch.arange(40), NeighborSampler([3]), batch_size=20)
            for _ in range(2)
        )
    ]
    torch.save(drawn, folder / f"{rank}.pt")


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_write_together_and_draw_alike(tmp_path):
    launch(_writing, 2, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_features_are_refused(layout):
    g = node_graph("cpu")
    g.ndata["sparse"] = getattr(torch.eye(300), layout)()
    with pytest.raises(InvalidInputError, match=r"'sparse' has layout torch.sparse.*to_dense\(\)"):
        dgl_mgpu.GlobalStore.from_dgl(g)
    g.ndata["sparse"] = g.ndata["sparse"].to_dense()
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        assert torch.equal(store.gather("sparse", g.nodes()), torch.eye(300))
