"""Edges by their ids, of a store on a GPU."""

from __future__ import annotations

import importlib.util

import dgl
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import GlobalUniform, Uniform

import dgl_mgpu
from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops.device import raise_faults
from tests.sampling.loaders import assert_pairs_are_right, link_graph
from tests.store.test_edges import (
    assert_finds_all,
    assert_same_graph,
    assert_typed_batches_are_right,
    bought_graph,
    learn_links,
    negatives_of,
    sparse_graph,
)

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
        reason="no GPU, or no CuPy",
    ),
    pytest.mark.filterwarnings("ignore:Dataloader CPU affinity"),
]


@pytest.fixture
def store_of(request):
    """Makes stores, and gives their memory back."""

    def make(g, **options):
        store = dgl_mgpu.GlobalStore.from_dgl(g, device="cuda", **options)
        request.addfinalizer(store.close)
        return store

    return make


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_ends_are_dgls(store_of, idtype, in_order, share):
    g = sparse_graph(idtype, in_order)
    graph = store_of(g, edges=True, graph_ratio=share, feature_ratio=share).graph
    assert graph.device.type == "cuda"
    assert_finds_all(graph, g)
    eids = torch.tensor([7, 3, 3, 90, 12], dtype=idtype)
    found = graph.edge_subgraph(eids.to(graph.device), relabel_nodes=False)
    assert found.device == graph.device
    assert_same_graph(found.to("cpu"), dgl.edge_subgraph(g, eids, relabel_nodes=False))
    u, v = torch.cat([torch.randint(0, 500, (2, 900)).to(idtype), torch.stack(g.edges())], dim=1)
    there = graph.has_edges_between(u.to(graph.device), v.to(graph.device))
    assert torch.equal(there.cpu(), g.has_edges_between(u, v))
    # What is no edge is not read, and said by a later call.
    for bad in (-1, g.num_edges()):
        with pytest.raises(IdOutOfRangeError):
            graph.find_edges(torch.tensor([0, bad], dtype=idtype, device=graph.device))
            raise_faults(graph.device, wait=True)


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("negative", [None, Uniform(3), GlobalUniform(2)])
@pytest.mark.parametrize("ahead", ["0", "1"])
def test_pairs_and_blocks_are_the_graphs(store_of, exclude, negative, ahead, monkeypatch):
    monkeypatch.setenv("DGL_MGPU_PREFETCH", ahead)
    g, reverse = link_graph("cpu")
    graph = store_of(g, edges=True).graph
    g, reverse = g.to(graph.device), reverse.to(graph.device)
    options = {"reverse_eids": reverse} if exclude == "reverse_id" else {}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4]), exclude=exclude, negative_sampler=negative, **options
    )
    assert_pairs_are_right(g, reverse, sampler, exclude, negative is not None, sampled=graph)


@pytest.mark.parametrize("negative", [Uniform(2), GlobalUniform(3)])
def test_typed_negatives(store_of, negative):
    g = bought_graph()
    assert_typed_batches_are_right(store_of(g, edges=True, graph_ratio=0.5).graph, g, negative)


def test_batches_are_those_of_a_store_on_the_cpu(store_of):
    g = sparse_graph()
    expected = negatives_of(dgl_mgpu.GlobalStore.from_dgl(g, seed=1, device="cpu").graph)
    assert negatives_of(store_of(g, seed=1, graph_ratio=0.5).graph) == expected


def test_edges_on_the_cpu_for_a_store_on_the_gpu(store_of):
    g, _ = link_graph("cpu")
    graph = store_of(g, edges=True).graph
    sampler = as_edge_prediction_sampler(NeighborSampler([4]), negative_sampler=Uniform(1))
    for _, positive, negative, blocks in DataLoader(graph, torch.arange(90), sampler, batch_size=9):
        assert positive.device == negative.device == blocks[0].device == graph.device


def test_links_of_cora_are_learned(real_data):
    learn_links(real_data, use_ddp=False, device="cuda")
