"""DataLoaders with ``use_uva=True`` on a GPU, and their graph in a store there.

The graph is in the host's memory, which the GPU cannot read unless it is pinned.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref

import dgl
import pytest
import torch
from dgl.dataloading import (
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.runner_options import RunnerOptions
from dgl_mgpu.dgl.shared_graphs import SharedGraph
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.train.launch.launch import launch
from tests.sampling.loaders import (
    FEATURES,
    assert_blocks_are_right,
    assert_epoch_is_right,
    assert_pairs_are_right,
    link_graph,
    node_graph,
    typed_graph,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


@pytest.fixture(autouse=True, params=[{}, {"gpu_memory": "8KiB"}], ids=["on the GPU", "on both"])
def placement(request, monkeypatch):
    monkeypatch.setenv(runner_options.VARIABLE, "")  # so that it is taken back
    runner_options.hand_on(RunnerOptions(request.param, captures=False))


@pytest.fixture(autouse=True, params=["0", "1"], ids=["as asked for", "ahead"])
def ahead(request, monkeypatch):
    monkeypatch.setenv("DGL_MGPU_PREFETCH", request.param)


def load(g, ids, sampler, **options):
    ids = {ntype: each.cuda() for ntype, each in ids.items()} if isinstance(ids, dict) else ids
    return DataLoader(
        g,
        ids if isinstance(ids, dict) else ids.cuda(),
        sampler,
        **{"device": torch.device("cuda"), "use_uva": True, "batch_size": 32} | options,
    )


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"prob": "weight"}, {"replace": True}], ids=str)
def test_nodes(idtype, options):
    g = node_graph("cpu", idtype)
    ids = torch.arange(0, 300, 2, dtype=idtype, device="cuda")
    assert_epoch_is_right(g, ids, device="cuda", use_uva=True, on=TensorIndex, **options)
    assert not g.is_pinned()
    loader = load(g, ids, NeighborSampler([2]))
    assert isinstance(loader.graph, SharedGraph) and loader.graph.device == loader.device


def test_nodes_of_several_types():
    g = typed_graph("cpu")
    ids = {"user": torch.arange(40).cuda(), "item": torch.arange(10, 30).cuda()}
    assert_epoch_is_right(g, ids, device="cuda", use_uva=True, on=TensorIndex)
    assert not g.is_pinned()


def test_blocks_have_features_that_nobody_has_fetched():
    g = node_graph("cpu")
    for _, _, blocks in load(g, torch.arange(0, 300, 2), NeighborSampler([3, 4])):
        assert_blocks_are_right(g, blocks, fetched=True)
    assert not g.is_pinned() and not g.ndata["feat"].is_pinned()


def test_a_changed_feature_is_seen():
    g = node_graph("cpu")
    loader = load(g, torch.arange(300), NeighborSampler([2], **FEATURES), batch_size=50)
    for change in range(4):
        if change == 1:
            g.ndata["feat"] = torch.rand(300, 5)
        elif change == 2:
            g.ndata["feat"][:200] = 3
        elif change == 3:
            g.edata["weight"] = torch.rand(3000)
        storages = loader.graph.get_node_storage("feat"), loader.graph.get_edge_storage("weight")
        assert [isinstance(each, TableStorage) for each in storages] == [change == 0, change < 3]
        for _, _, blocks in loader:
            assert_blocks_are_right(g, blocks, fetched=True)


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("negative", [None, PerSourceUniform(3), GlobalUniform(2)])
def test_edges(exclude, negative):
    g, reverse = link_graph("cpu")
    options = {"reverse_eids": reverse.cuda()} if exclude == "reverse_id" else {}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4]), exclude=exclude, negative_sampler=negative, **options
    )
    has_negatives = negative is not None
    assert_pairs_are_right(g, reverse, sampler, exclude, has_negatives, device="cuda", use_uva=True)


@pytest.mark.parametrize("first", ["nodes", "edges"])
@pytest.mark.parametrize("exclude", [None, "self"])
def test_pairs_have_the_graphs_features(first, exclude):
    g = node_graph("cpu")
    here = {name: rows.cuda() for data in (g.ndata, g.edata) for name, rows in data.items()}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([2], prefetch_node_feats=["feat"]),
        negative_sampler=PerSourceUniform(1),
        prefetch_labels=["weight"],
        exclude=exclude,
    )
    if first == "nodes":
        load(g, torch.arange(3), NeighborSampler([1]))
    for inputs, positive, negative, blocks in load(g, torch.arange(0, 3000, 7), sampler):
        eids, nodes = positive.edata[dgl.EID], positive.ndata[dgl.NID]
        src, dst = (end.cuda() for end in g.find_edges(eids.cpu()))
        assert torch.equal(nodes[positive.edges()[0]], src)
        assert torch.equal(nodes[positive.edges()[1]], dst)
        for found, expected in (
            (positive.edata["weight"], here["weight"][eids]),
            (positive.ndata["label"], here["label"][nodes]),
            (negative.ndata[dgl.NID], nodes),
            (blocks[0].srcdata["feat"], here["feat"][inputs]),
            (blocks[0].dstdata["label"], here["label"][nodes]),
            (blocks[0].edata["weight"], here["weight"][blocks[0].edata[dgl.EID]]),
        ):
            assert found.is_cuda and torch.equal(found, expected)


def test_weights_that_a_store_refuses():
    g = node_graph("cpu")
    g.edata["p"] = torch.zeros(3000, dtype=torch.bool)
    g.edata["p"][::5] = True
    loader = load(g, torch.arange(300), NeighborSampler([2], prob="p"))
    edges = torch.cat([batch[2][0].edata[dgl.EID] for batch in loader]).cpu()
    assert g.edata["p"][edges].all()
    expected = torch.bincount(g.edges()[1][g.edata["p"]], minlength=300).clamp(max=2).sum()
    assert len(edges) == expected


def test_weights_that_change():
    g = node_graph("cpu")
    loader = load(g, torch.arange(300), NeighborSampler([1], prob="weight"))
    list(loader)
    heavy = torch.zeros(3000, dtype=torch.bool)
    heavy[::3] = True
    g.edata["weight"] = torch.where(heavy, 1.0, 1e-30)
    edges = torch.cat([batch[2][0].edata[dgl.EID] for batch in loader]).cpu()
    has_heavy = torch.bincount(g.edges()[1][heavy], minlength=300) > 0
    assert heavy[edges[has_heavy[g.edges()[1][edges]]]].all()


def test_other_samplers_of_dgls():
    g = node_graph("cpu")
    for inputs, outputs, blocks in load(g, torch.arange(100), LaborSampler([3, 4])):
        assert_blocks_are_right(g, blocks)
        assert torch.equal(blocks[0].srcdata["feat"].cpu(), g.ndata["feat"][inputs.cpu()])
        assert torch.equal(blocks[-1].dstdata["label"].cpu(), g.ndata["label"][outputs.cpu()])
    shadow = ShaDowKHopSampler([3, 2], prefetch_node_feats=["feat"])
    for inputs, _, subgraph in load(g, torch.arange(40), shadow, batch_size=5):
        assert torch.equal(subgraph.ndata[dgl.NID], inputs)
        assert torch.equal(subgraph.ndata["feat"].cpu(), g.ndata["feat"][inputs.cpu()])
        src, _ = g.find_edges(subgraph.edata[dgl.EID].cpu())
        assert torch.equal(inputs[subgraph.edges()[0]].cpu(), src)


def test_features_through_a_cache():
    g = node_graph("cpu")
    cache = {"node": {"feat": 64}}
    loader = load(g, torch.arange(300), NeighborSampler([2], **FEATURES), gpu_cache=cache)
    for _ in range(2):
        for _, _, blocks in loader:
            assert_blocks_are_right(g, blocks, fetched=True)


def test_a_store_goes_with_its_graph():
    g = node_graph("cpu")
    loader = load(g, torch.arange(300), NeighborSampler([2], **FEATURES))
    batch = next(iter(loader))
    store = weakref.ref(loader.graph._stored.store)
    del g, loader, batch
    gc.collect()
    assert store() is None


def _trains(folder) -> None:
    everyone = Communicator.of_all_machines()
    rank = everyone.rank
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    g = node_graph("cpu")
    y = torch.from_file(str(folder / "y"), shared=True, size=300 * 5).view(300, 5)
    sampler = NeighborSampler([3, 3], **FEATURES)
    seen = []
    loader = load(g, torch.arange(203), sampler, device=device, use_ddp=True, shuffle=True)
    for _, outputs, blocks in loader:
        assert_blocks_are_right(g, blocks, fetched=True)
        seen += outputs.tolist()
    full = MultiLayerFullNeighborSampler(1, prefetch_node_feats=["h"])
    g.ndata["h"] = g.ndata["feat"]
    for layer in range(2):
        inference = load(g, torch.arange(300), full, device=device, use_ddp=True)
        assert inference.graph._stored is loader.graph._stored
        storage = inference.graph.get_node_storage("h")
        assert isinstance(storage, TableStorage) == (layer == 0)
        for _, outputs, blocks in inference:
            with blocks[0].local_scope():
                blocks[0].update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "z"))
                y[outputs.cpu()] = blocks[0].dstdata["z"].cpu()
        everyone.all_gather(None)
        g.ndata["h"] = y.clone()
        everyone.all_gather(None)
    torch.save(seen, folder / f"{rank}.pt")


@pytest.mark.parametrize(
    ("placement", "ahead", "ranks"),
    [({}, "0", 2), ({"gpu_memory": "8KiB"}, "1", 4)],
    indirect=["placement", "ahead"],
)
def test_ranks_share_a_store(tmp_path, ranks):
    """With fewer GPUs several ranks share one."""
    (tmp_path / "y").write_bytes(bytes(4 * 300 * 5))
    launch(_trains, ranks, tmp_path)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    assert set().union(*seen) == set(range(203))
    g = node_graph("cpu")
    x = g.ndata["feat"]
    for _ in range(2):
        x = torch.zeros_like(x).index_add_(0, g.edges()[1], x[g.edges()[0]])
    found = torch.from_file(str(tmp_path / "y"), size=300 * 5).view(300, 5)
    assert torch.allclose(found, x, rtol=1e-4)
