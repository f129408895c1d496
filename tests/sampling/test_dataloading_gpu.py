"""DGL's DataLoader with graphs on a GPU, on the CPU for a GPU, and pinned."""

from __future__ import annotations

import importlib.util
import threading

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform
from dgl.utils import recursive_apply

import dgl_mgpu
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.ops import gather
from dgl_mgpu.sampling import loader_batches
from tests.sampling.loaders import (
    assert_blocks_are_right,
    assert_epoch_is_right,
    assert_pairs_are_right,
    link_graph,
    node_graph,
    typed_graph,
)
from tests.store.test_graph import hetero_graph, power_law_graph

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
        reason="no GPU, or no CuPy",
    ),
    pytest.mark.filterwarnings("ignore:Dataloader CPU affinity"),
]

IDTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"prob": "weight"}, {"replace": True}]
)
def test_nodes_of_a_graph_on_the_gpu(idtype, options):
    ids = torch.arange(0, 300, 2, dtype=idtype, device="cuda")
    assert_epoch_is_right(node_graph("cuda", idtype), ids, device="cuda", on=TensorIndex, **options)


def test_nodes_of_several_types_on_the_gpu():
    ids = {
        "user": torch.arange(40, device="cuda"),
        "item": torch.arange(10, 30, device="cuda"),
    }
    assert_epoch_is_right(typed_graph("cuda"), ids, device="cuda", on=TensorIndex)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("alternate", [None, True, False])
@pytest.mark.parametrize("thread", [None, False])
def test_nodes_of_a_graph_on_the_cpu_for_the_gpu(workers, alternate, thread):
    assert_epoch_is_right(
        node_graph("cpu"),
        torch.arange(0, 300, 2),
        device="cuda",
        on=TensorIndex,
        num_workers=workers,
        use_alternate_streams=alternate,
        use_prefetch_thread=thread,
    )


def test_several_types_of_a_graph_on_the_cpu_for_the_gpu():
    ids = {"user": torch.arange(40), "item": torch.arange(10, 30)}
    assert_epoch_is_right(typed_graph("cpu"), ids, device="cuda", on=TensorIndex)


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("prob", [None, "weight"])
def test_nodes_of_a_pinned_graph(idtype, ids_on, prob):
    g = node_graph("cpu", idtype)
    ids = torch.arange(0, 300, 2, dtype=idtype, device=ids_on)
    assert_epoch_is_right(g, ids, device="cuda", use_uva=True, on=TensorIndex, prob=prob)
    assert g.is_pinned()
    # Once more: pinning what is pinned already is no error.
    assert_epoch_is_right(g, ids, device="cuda", use_uva=True, on=TensorIndex, prob=prob)
    g.unpin_memory_()


def test_several_types_of_a_pinned_graph():
    ids = {"user": torch.arange(40), "item": torch.arange(10, 30)}
    assert_epoch_is_right(typed_graph("cpu"), ids, device="cuda", use_uva=True, on=TensorIndex)


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("negative", [None, PerSourceUniform(3), GlobalUniform(2)])
def test_edges_of_a_graph_on_the_gpu(exclude, negative):
    g, reverse = link_graph("cuda")
    options = {"reverse_eids": reverse} if exclude == "reverse_id" else {}
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4]), exclude=exclude, negative_sampler=negative, **options
    )
    assert_pairs_are_right(g, reverse, sampler, exclude, negative is not None)


@pytest.mark.parametrize("use_uva", [False, True])
def test_edges_of_a_graph_on_the_cpu_for_the_gpu(use_uva):
    g, reverse = link_graph("cpu")
    sampler = as_edge_prediction_sampler(
        NeighborSampler([4, 4]),
        exclude="reverse_id",
        reverse_eids=reverse.cuda() if use_uva else reverse,
        negative_sampler=PerSourceUniform(2),
    )
    assert_pairs_are_right(g, reverse, sampler, "reverse_id", True, device="cuda", use_uva=use_uva)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("idtype", IDTYPES)
def test_samples_are_those_of_the_cpu_bit_for_bit(idtype, pinned):
    seeds = torch.arange(0, 300, 5, dtype=idtype)
    for make, nodes, options in (
        (lambda device: node_graph(device, idtype), seeds, {}),
        (lambda device: node_graph(device, idtype), seeds, {"prob": "weight"}),
        (lambda device: node_graph(device, idtype), seeds, {"replace": True}),
        (lambda device: typed_graph(device).astype(idtype), {"user": seeds[:10]}, {}),
    ):
        sampler = NeighborSampler([3, -1, 4] if not options.get("replace") else [3, 2], **options)
        with tensor_backed_graphs():
            dgl.seed(5)
            inputs, _, expected = sampler.sample(make("cpu"), nodes)
        g = make("cpu").pin_memory_() if pinned else make("cuda")
        on_gpu = recursive_apply(nodes, torch.Tensor.cuda)
        dgl.seed(5)
        found_inputs, outputs, blocks = sampler.sample(g, on_gpu)
        assert outputs is on_gpu
        for block, reference in zip(blocks, expected, strict=True):
            assert isinstance(block._graph, TensorIndex) and block.device.type == "cuda"
            for etype in g.canonical_etypes:
                eids = block.edges[etype].data[dgl.EID]
                assert torch.equal(eids.cpu(), reference.edges[etype].data[dgl.EID])
            for ntype in g.ntypes:
                nodes_found = block.srcnodes[ntype].data[dgl.NID]
                assert torch.equal(nodes_found.cpu(), reference.srcnodes[ntype].data[dgl.NID])
        assert_blocks_are_right(g, blocks)
        if isinstance(inputs, torch.Tensor):
            assert torch.equal(found_inputs.cpu(), inputs)


def test_all_neighbours_are_those_of_dgl():
    g = node_graph("cpu")
    seeds = torch.arange(0, 300, 7)
    sampler = MultiLayerFullNeighborSampler(2, fused=False)
    _, _, expected = sampler.sample(g, seeds)
    _, _, blocks = sampler.sample(g.to("cuda"), seeds.cuda())
    for block, reference in zip(blocks, expected, strict=True):
        eids = block.edata[dgl.EID].cpu()
        assert torch.equal(eids.sort()[0], reference.edata[dgl.EID].sort()[0])


def test_a_block_on_the_gpu_goes_to_the_cpu_and_back():
    g = node_graph("cuda")
    _, _, (block,) = NeighborSampler([4]).sample(g, torch.arange(9, device="cuda"))
    copy = block.to("cpu")
    assert not isinstance(copy._graph, TensorIndex) and copy.is_block
    again = copy.to("cuda")
    for other in (copy, again):
        for end, expected in zip(other.edges(order="eid"), block.edges(order="eid"), strict=True):
            assert torch.equal(end.cpu(), expected.cpu())
        assert torch.equal(other.srcdata["feat"].cpu(), block.srcdata["feat"].cpu())
        assert torch.equal(other.edata[dgl.EID].cpu(), block.edata[dgl.EID].cpu())


def test_a_block_that_another_stream_uses_is_not_given_away():
    g = node_graph("cuda")
    _, _, (block,) = NeighborSampler([4]).sample(g, torch.arange(9, device="cuda"))
    stream = torch.cuda.Stream()
    assert block.record_stream(stream) is block
    expected = block.srcdata["feat"].sum()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        found = block.srcdata["feat"].sum()
    stream.synchronize()
    assert found == expected


@pytest.mark.parametrize("make", [power_law_graph, hetero_graph])
def test_a_store_on_the_gpu_gives_blocks_there(make):
    g = make()
    store = dgl_mgpu.GlobalStore.from_dgl(g, device="cuda")
    graph = store.graph
    assert graph.device == store.device and graph.device.type == "cuda"
    with_types = len(g.ntypes) > 1
    seeds = {"user": torch.arange(20), "item": torch.arange(10)} if with_types else torch.arange(99)
    features = {"user": ["feat"], "item": ["feat"]} if with_types else ["feat"]
    sampler = NeighborSampler([3, 4], prefetch_node_feats=features)
    for inputs, _, blocks in DataLoader(graph, seeds, sampler, batch_size=16):
        for block in blocks:
            assert isinstance(block._graph, TensorIndex) and block.device == store.device
        assert_blocks_are_right(g.to("cuda"), blocks)
        by_type = inputs if with_types else {g.ntypes[0]: inputs}
        for ntype, nodes in by_type.items():
            rows = blocks[0].srcnodes[ntype].data["feat"]
            assert rows.device == store.device
            assert torch.equal(rows.cpu(), g.nodes[ntype].data["feat"][nodes.cpu()])
    frontier = graph.sample_neighbors(seeds, 3)
    assert frontier.device == store.device
    store.close()


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/join", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp(one_rank):
    ids = torch.arange(0, 300, 2, device="cuda")
    assert_epoch_is_right(node_graph("cuda"), ids, device="cuda", on=TensorIndex, use_ddp=True)
    assert_epoch_is_right(node_graph("cpu"), ids.cpu(), device="cuda", use_uva=True, use_ddp=True)


@pytest.mark.parametrize("pinned", [False, True])
def test_seeds_are_copied_a_part_at_a_time(monkeypatch, pinned):
    monkeypatch.setattr(loader_batches._SeedRows, "_PART", 100)
    g = node_graph("cpu" if pinned else "cuda", torch.int64)
    ids = torch.randperm(g.num_nodes())
    loader = DataLoader(
        g,
        ids if pinned else ids.cuda(),
        NeighborSampler([3, 3]),
        device="cuda",
        use_uva=pinned,
        batch_size=30,
    )
    for _ in range(2):
        found = [seeds for _, seeds, _ in loader]
        # Batches that are there at the same time, and those of an earlier part, keep their seeds.
        assert torch.cat(found).tolist() == ids.tolist()


def test_a_scripts_thread_runs_its_backward_passes():
    threads = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            threads.append(threading.get_ident())
            return gradient

    def train(is_told):
        g = node_graph("cuda", torch.int64)
        loader = DataLoader(g, torch.arange(60, device="cuda"), NeighborSampler([3]), device="cuda")
        next(iter(loader))
        if is_told:
            torch.autograd.set_multithreading_enabled(True)
        next(iter(loader))
        Noted.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()

    ran = []
    for is_told in (False, True):
        thread = threading.Thread(target=train, args=(is_told,))
        thread.start()
        thread.join()
        ran.append((thread.ident == threads[-1], len(threads)))
    assert ran == [(True, 1), (False, 2)]


@pytest.mark.parametrize("kept", ["on the GPU", "pinned", "in a store"])
def test_a_batchs_features_and_labels_are_copied_by_one_launch(kept, monkeypatch):
    g = node_graph("cuda" if kept == "on the GPU" else "cpu")
    feat, label = g.ndata["feat"].cuda(), g.ndata["label"].cuda()
    store = dgl_mgpu.GlobalStore.from_dgl(g, device="cuda") if kept == "in a store" else None
    picks, pick = [], gather._pick
    monkeypatch.setattr(gather, "_pick", lambda some, on: (picks.append(some), pick(some, on)))
    sampler = NeighborSampler([3, 4], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(
        g if store is None else store.graph, torch.arange(300, device="cuda"), sampler,
        device="cuda", batch_size=50, use_uva=kept == "pinned",
    )  # fmt: skip
    for inputs, seeds, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], feat[inputs])
        assert torch.equal(blocks[-1].dstdata["label"], label[seeds])
    assert [len(some) for some in picks] == [2] * 6
    if store is not None:
        assert store.graph.traffic.take().rows["label", "device"] == 300
