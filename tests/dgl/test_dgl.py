"""DGL's main functions on this torch and NumPy, without a warning of theirs."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import warnings

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from dgl import function as fn

pytestmark = [
    pytest.mark.filterwarnings("error::DeprecationWarning"),
    pytest.mark.filterwarnings("error::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("error::FutureWarning"),
    pytest.mark.filterwarnings("error:Sparse invariant checks"),
    # Python 3.12's own, at every fork of a process with threads: torch's DataLoader, not DGL.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Torch 2.4's, of how it copies its own storages.
    pytest.mark.filterwarnings("ignore:You are using .torch.load:FutureWarning"),
]

NUM_NODES, NUM_EDGES = 30, 120


@pytest.fixture
def g() -> dgl.DGLGraph:
    dgl.seed(0)
    torch.manual_seed(0)
    graph = dgl.rand_graph(NUM_NODES, NUM_EDGES)
    graph.ndata["x"] = torch.rand(NUM_NODES, 3)
    graph.edata["weight"] = torch.rand(NUM_EDGES, 1)
    return graph


@pytest.fixture
def hetero() -> dgl.DGLGraph:
    return dgl.heterograph(
        {
            ("user", "follows", "user"): ([0, 1, 2], [1, 2, 0]),
            ("user", "plays", "game"): ([0, 1, 2, 2], [0, 0, 1, 0]),
        }
    )


def same(a: dgl.DGLGraph, b: dgl.DGLGraph) -> bool:
    return a.canonical_etypes == b.canonical_etypes and all(
        torch.equal(x, y)
        for etype in a.canonical_etypes
        for x, y in zip(a.edges(etype=etype), b.edges(etype=etype), strict=True)
    )


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("message", ["copy_u", "u_mul_e", "u_add_v"])
def test_message_passing_equals_a_loop_over_the_edges(g, message, reduce):
    x, w = g.ndata["x"].requires_grad_(), g.edata["weight"].requires_grad_()
    source, target = g.edges()
    messages = {"copy_u": x[source], "u_mul_e": x[source] * w, "u_add_v": x[source] + x[target]}
    built_in = {
        "copy_u": fn.copy_u("x", "m"),
        "u_mul_e": fn.u_mul_e("x", "weight", "m"),
        "u_add_v": fn.u_add_v("x", "x", "m"),
    }
    g.update_all(built_in[message], getattr(fn, reduce)("m", "h"))
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    expected = torch.zeros(NUM_NODES, 3).scatter_reduce(
        0, target[:, None].expand(-1, 3), messages[message], name, include_self=False
    )
    torch.testing.assert_close(g.ndata["h"], expected)
    torch.testing.assert_close(
        torch.autograd.grad(g.ndata["h"].sum(), x, retain_graph=True),
        torch.autograd.grad(expected.sum(), x),
    )


def test_user_defined_functions(g):
    g.update_all(lambda e: {"m": e.src["x"]}, lambda n: {"h": n.mailbox["m"].sum(1)})
    udf = g.ndata["h"]
    g.update_all(fn.copy_u("x", "m"), fn.sum("m", "h"))
    torch.testing.assert_close(udf, g.ndata["h"])


def test_saving_and_loading(g, hetero, tmp_path):
    path = str(tmp_path / "graphs.bin")
    dgl.save_graphs(path, [g, g], {"label": torch.ones(2)})
    (a, b), labels = dgl.load_graphs(path)
    assert same(a, g) and same(b, g) and torch.equal(a.ndata["x"], g.ndata["x"])
    assert torch.equal(labels["label"], torch.ones(2))
    dgl.save_graphs(path, [hetero])
    assert same(dgl.load_graphs(path)[0][0], hetero)
    dgl.data.utils.save_info(str(tmp_path / "info"), {"a": np.ones(3)})
    assert dgl.data.utils.load_info(str(tmp_path / "info"))["a"].sum() == 3


def test_pickling_and_copying(g, hetero):
    for graph in (g, hetero, dgl.to_block(g, [0, 1]), dgl.batch([g, g])):
        assert same(pickle.loads(pickle.dumps(graph)), graph)
        assert same(copy.deepcopy(graph), graph)


def test_exchange_with_networkx_and_scipy(g):
    back = dgl.from_networkx(g.to_networkx(edge_attrs=["weight"]), edge_attrs=["weight"])
    assert back.num_edges() == NUM_EDGES
    assert dgl.from_networkx(nx.path_graph(5)).num_edges() == 8
    matrix = scipy.sparse.random(5, 4, 0.5, random_state=0)
    bipartite = dgl.bipartite_from_scipy(matrix, "u", "e", "v")
    assert (bipartite.adj_external(scipy_fmt="coo").toarray() == (matrix.toarray() != 0)).all()
    dense = torch.zeros(NUM_NODES, NUM_NODES).index_put(
        g.edges(), torch.ones(NUM_EDGES), accumulate=True
    )
    assert torch.equal(g.adj_external().to_dense(), dense)
    assert torch.equal(g.inc("in").to_dense().sum(1), g.in_degrees().float())


def test_structure_and_transforms(g, hetero):
    homogeneous = dgl.to_homogeneous(hetero)
    assert same(dgl.to_heterogeneous(homogeneous, hetero.ntypes, hetero.etypes), hetero)
    assert dgl.node_subgraph(g, [0, 1, 2]).num_nodes() == 3
    assert dgl.in_subgraph(g, [0]).num_edges() == g.in_degrees(0)
    assert same(dgl.reverse(dgl.reverse(g)), g)
    assert [same(part, g) for part in dgl.unbatch(dgl.batch([g, g]))] == [True, True]
    assert dgl.remove_self_loop(dgl.add_self_loop(g)).num_nodes() == NUM_NODES
    assert dgl.to_bidirected(g).num_edges() >= NUM_EDGES
    assert dgl.metapath_reachable_graph(hetero, ["follows", "plays"]).num_edges() > 0
    assert dgl.knn_graph(torch.rand(9, 3), 3).num_edges() == 27
    assert dgl.reorder_graph(g, node_permute_algo="metis", permute_config={"k": 2})
    for transform in (
        dgl.LineGraph(),
        dgl.KHopGraph(2),
        dgl.GCNNorm(),
        dgl.PPR(avg_degree=2),
        dgl.HeatKernel(avg_degree=2),
        dgl.GDC([0.3, 0.2, 0.1], avg_degree=2),
        dgl.DropNode(),
        dgl.DropEdge(),
        dgl.RandomWalkPE(3),
        dgl.LapPE(3),
        dgl.SVDPE(3),
        dgl.RowFeatNormalizer(node_feat_names=["x"]),
        dgl.SIGNDiffusion(2, in_feat_name="x"),
    ):
        transform(g.clone())


def test_sampling_repeats_with_the_seed(g, hetero):
    def draw() -> list[torch.Tensor]:
        dgl.seed(3)
        sampled = dgl.sampling.sample_neighbors(g, torch.arange(9), 2)
        walks, _ = dgl.sampling.random_walk(g, [0, 1], length=4)
        typed, _ = dgl.sampling.random_walk(hetero, [0], metapath=["follows", "plays"])
        return [*sampled.edges(), walks, typed]

    # DGL keeps a generator a thread: with several, which one draws is up to the scheduler.
    threads = dgl.utils.get_num_threads()
    dgl.utils.set_num_threads(1)
    try:
        torch.testing.assert_close(draw(), draw(), rtol=0, atol=0)
    finally:
        dgl.utils.set_num_threads(threads)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_neighbour_loading_with_workers(g, num_workers):
    sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["x"])
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(NUM_NODES), sampler, batch_size=8, num_workers=num_workers
    )
    seen = []
    for inputs, seeds, blocks in loader:
        seen.append(seeds)
        assert torch.equal(blocks[0].srcdata["x"], g.ndata["x"][inputs])
        source, target = blocks[-1].edges()
        assert g.has_edges_between(
            blocks[-1].srcdata[dgl.NID][source], blocks[-1].dstdata[dgl.NID][target]
        ).all()
    # With workers, DGL gives each a stretch of the ids: all come, in another order.
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NUM_NODES))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cpu_affinity_is_advised_where_there_are_workers(g, num_workers):
    """DGL advises it always, and raises when it is enabled without workers."""
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(9), dgl.dataloading.NeighborSampler([3]), num_workers=num_workers
    )
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert len(list(loader)) == 9
    is_advised = any("CPU affinity" in str(each.message) for each in given)
    assert is_advised == (num_workers > 0)


def test_the_other_samplers(g, tmp_path):
    loading = dgl.dataloading
    edges = loading.as_edge_prediction_sampler(
        loading.NeighborSampler([3]), negative_sampler=loading.negative_sampler.Uniform(2)
    )
    samplers = {
        loading.MultiLayerFullNeighborSampler(2): NUM_NODES,
        loading.ShaDowKHopSampler([3, 3]): NUM_NODES,
        loading.LaborSampler([3, 3]): NUM_NODES,
        loading.ClusterGCNSampler(g, 4, cache_path=str(tmp_path / "parts")): 4,
        loading.SAINTSampler(mode="node", budget=5): 3,
        edges: NUM_EDGES,
    }
    for sampler, count in samplers.items():
        assert len(list(loading.DataLoader(g, torch.arange(count), sampler, batch_size=2)))


def test_data_sets_that_need_no_download(tmp_path, monkeypatch):
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path))
    data = dgl.data
    shapes = data.BAShapeDataset(num_base_nodes=20, num_motifs=2, raw_dir=str(tmp_path))
    split = data.AsNodePredDataset(shapes, [0.6, 0.2, 0.2])
    assert split[0].ndata["train_mask"].any()
    assert len(data.MiniGCDataset(4, 5, 8)) == 4
    assert data.TreeCycleDataset(3, 2, raw_dir=str(tmp_path))[0].num_nodes() > 0
    assert len(data.SBMMixtureDataset(2, 10, 2)) == 2


def test_csv_data_set(tmp_path):
    pytest.importorskip("pydantic", reason="DGL reads CSV data sets with pydantic")
    (tmp_path / "meta.yaml").write_text(
        "dataset_name: tiny\nedge_data: [{file_name: e.csv}]\nnode_data: [{file_name: n.csv}]\n"
    )
    (tmp_path / "e.csv").write_text("src_id,dst_id\n0,1\n1,2\n")
    (tmp_path / "n.csv").write_text('node_id,label,feat\n0,0,"0.5,1"\n1,1,"2,3"\n2,0,"4,5"\n')
    graph = dgl.data.CSVDataset(str(tmp_path))[0]
    assert torch.equal(graph.ndata["feat"].float(), torch.tensor([[0.5, 1], [2, 3], [4, 5]]))


def test_a_partition_on_disk_names_its_files(g, tmp_path):
    dgl.distributed.partition_graph(g, "p", 2, str(tmp_path), part_method="metis")
    assert json.loads((tmp_path / "p.json").read_text())["num_parts"] == 2


def test_the_adjacency_matrix_is_there_as_other_libraries_have_it():
    g = dgl.graph(([0, 1, 2], [1, 2, 0]))
    expected = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0.0]])
    assert torch.equal(g.adj_external().to_dense(), expected)
    assert (g.adj_external(scipy_fmt="csr").toarray() == expected.numpy()).all()


def test_cpu_graphs_work_without_the_tensoradapter():
    # It lends torch's allocator to DGL's C++ library; without it, DGL allocates by itself, and
    # its DataLoader does not use alternate CUDA streams.
    assert not sys.modules["dgl._ffi.base"].is_tensor_adaptor_enabled()
    g = dgl.graph(([0, 1, 2], [1, 2, 0]))
    x = torch.arange(3.0)[:, None]
    assert dgl.ops.copy_u_sum(g, x).flatten().tolist() == [2, 0, 1]
