"""Mini-batches in place, and steps as they are captured; without a GPU, replayed by computing."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import dgl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import GATConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu.capture import cuda_graph as capture
from dgl_mgpu.capture.static_buffers import Sizes, StaticBuffers
from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.train.capture import policy as choice
from dgl_mgpu.train.capture import step
from dgl_mgpu.train.launch.launch import launch

CLASSES = 5


@pytest.fixture(autouse=True)
def on_tensors():
    with tensor_backed_graphs():
        yield


def graph(idtype=torch.int64):
    ends = torch.randint(0, 400, (2, 3000)) ** 2 // 400  # some nodes have many edges, some none
    g = dgl.graph(tuple(ends), num_nodes=400, idtype=idtype)
    g.ndata["feat"] = torch.randn(400, 6)
    g.ndata["label"] = torch.randint(0, CLASSES, (400,))
    g.ndata["unread"] = torch.randn(400, 2)
    g.edata["weight"] = torch.rand(3000)
    return g


class Model(nn.Module):
    def __init__(self, *layers, weighted=False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.weighted = weighted

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            options = {"edge_weight": block.edata["weight"]} if self.weighted else {}
            x = layer(block, x, **options)
            if layer is not self.layers[-1]:
                x = torch.relu(x.flatten(1))
        return x.mean(1) if x.dim() == 3 else x


MODELS = {
    "mean": lambda: Model(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean")),
    "pool": lambda: Model(SAGEConv(6, 8, "pool"), SAGEConv(8, CLASSES, "gcn")),
    # By the out-degrees of sources, too.
    "gcn": lambda: Model(
        GraphConv(6, 8, allow_zero_in_degree=True),
        GraphConv(8, CLASSES, allow_zero_in_degree=True),
    ),
    "gat": lambda: Model(
        GATConv(6, 4, 2, allow_zero_in_degree=True),
        GATConv(8, CLASSES, 3, allow_zero_in_degree=True),
    ),
    "weighted": lambda: Model(
        GraphConv(6, 8, norm="right", allow_zero_in_degree=True),
        GraphConv(8, CLASSES, norm="none", allow_zero_in_degree=True),
        weighted=True,
    ),
}


def batches_of(g, count=6, size=32, fanouts=(3, 4)):
    seeds = torch.randperm(g.num_nodes())[: count * size].to(g.idtype)
    return [
        blocks for *_, blocks in DataLoader(g, seeds, NeighborSampler([*fanouts]), batch_size=size)
    ]


def forward_of(model):
    return lambda blocks: model(blocks, blocks[0].srcdata["feat"])


def computed(model, blocks, seeds):
    """Loss, outputs and gradients."""
    model.zero_grad()
    outputs = forward_of(model)(blocks)[:seeds]
    loss = F.cross_entropy(outputs, blocks[-1].dstdata["label"][:seeds])
    loss.backward()
    return [loss.detach(), outputs.detach(), *(each.grad.clone() for each in model.parameters())]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", MODELS)
def test_in_place_a_batch_gives_what_it_gives_elsewhere(name, idtype):
    model = MODELS[name]()
    batches = batches_of(graph(idtype))
    sizes = Sizes.of(batches[0])
    for blocks in batches:
        sizes = sizes.joined(Sizes.of(blocks))
    buffers = StaticBuffers(batches[0], sizes.with_spare())
    for blocks in batches:
        expected = computed(model, blocks, 32)
        buffers.load(blocks)
        assert_close(computed(model, buffers.blocks(), 32), expected)


def test_what_is_beyond_a_batch_does_not_matter():
    model = MODELS["mean"]()
    small, large = batches_of(graph(), 2)
    buffers = StaticBuffers(small, Sizes.of(small).joined(Sizes.of(large)).with_spare())
    expected = computed(model, small, 32)
    results = []
    for before in (small, large):
        buffers.load(before)
        computed(model, buffers.blocks(), 32)
        buffers.load(small)
        results.append(computed(model, buffers.blocks(), 32))
    assert_close(results[0], expected)
    assert_close(results[1], expected)


def test_edges_left_over_are_spread_over_rows_left_over():
    for blocks in batches_of(graph(), 3, fanouts=(3, 4)):
        buffers = StaticBuffers(blocks, Sizes.of(blocks).with_spare())
        for own, block in zip(blocks, buffers.blocks(), strict=True):
            found, expected = block.in_degrees(), own.in_degrees()
            assert torch.equal(found[: len(expected)], expected)
            assert found.sum() == block.num_edges() > own.num_edges()
            spare = found[len(expected) :]
            mean = -(-block.num_edges() // block.num_dst_nodes())
            assert len(spare) == 1 or spare.max() <= mean
            out = block.out_degrees()[: own.num_src_nodes()]
            assert torch.equal(out, own.out_degrees())


def test_only_features_that_are_read_have_a_place():
    (blocks,) = batches_of(graph(), 1)
    buffers = StaticBuffers(blocks, Sizes.of(blocks).with_spare())
    buffers.load(blocks)
    computed(MODELS["mean"](), buffers.blocks(), 32)
    buffers.forget()
    with pytest.raises(InvalidInputError, match="feature 'unread'"):
        buffers.blocks()[0].srcdata["unread"]
    assert buffers.blocks()[0].srcdata["feat"].shape[0] == buffers.sizes.nodes[0][0]


def test_blocks_of_several_batches_are_refused():
    one, other = batches_of(graph(), 2)
    with pytest.raises(InvalidInputError, match=r"destinations, but the next has \d+ sources"):
        Sizes.of([one[0], other[1]])


def test_a_room_holds_what_is_not_larger_in_anything():
    batch = Sizes(nodes=((900,), (300,), (32,)), edges=((2000,), (400,)))
    buffers = batch.with_spare()
    assert buffers.hold(batch)
    for larger in (
        Sizes(buffers.nodes[:1] + batch.nodes[1:], batch.edges),  # no node is left for spare edges
        Sizes((*batch.nodes[:2], (33,)), batch.edges),
        Sizes((*batch.nodes[:2], (31,)), batch.edges),
        Sizes(batch.nodes, (batch.edges[0], (buffers.edges[1][0] + 1,))),
    ):
        assert not buffers.hold(larger)


def typed_graph_and_layers():
    """Two types of nodes and three of edges, and layers of a model for them."""
    g = dgl.heterograph(
        {
            ("a", "cites", "a"): tuple(torch.randint(0, 90, (2, 500))),
            ("b", "writes", "a"): (torch.randint(0, 40, (300,)), torch.randint(0, 90, (300,))),
            ("a", "written", "b"): (torch.randint(0, 90, (300,)), torch.randint(0, 40, (300,))),
        },
        num_nodes_dict={"a": 90, "b": 40},
    )
    for ntype in g.ntypes:
        g.nodes[ntype].data["feat"] = torch.randn(g.num_nodes(ntype), 6)
    g.nodes["a"].data["label"] = torch.randint(0, CLASSES, (90,))
    first = HeteroGraphConv({name: SAGEConv(6, 8, "mean") for name in g.etypes})
    last = HeteroGraphConv({name: SAGEConv(8, CLASSES, "mean") for name in g.etypes})
    return g, first, last


def test_several_types_of_nodes_and_edges():
    g, first, last = typed_graph_and_layers()

    def outcome(blocks):
        first.zero_grad(), last.zero_grad()
        hidden = first(blocks[0], blocks[0].srcdata["feat"])
        outputs = last(blocks[1], hidden)["a"][:20]
        labels = blocks[-1].dstnodes["a"].data["label"][:20]
        F.cross_entropy(outputs, labels).backward()
        there = [
            p.grad.clone() for p in (*first.parameters(), *last.parameters()) if p.grad is not None
        ]
        return [outputs.detach(), *there]

    loader = DataLoader(g, {"a": torch.arange(80)}, NeighborSampler([3, 3]), batch_size=20)
    batches = [blocks for *_, blocks in loader]
    sizes = Sizes.of(batches[0])
    for blocks in batches:
        sizes = sizes.joined(Sizes.of(blocks))
    buffers = StaticBuffers(batches[0], sizes.with_spare())
    for blocks in batches:
        buffers.load(blocks)
        assert_close(outcome(buffers.blocks()), outcome(blocks))


def step_of(model):
    return dgl_mgpu.CapturedStep(model, forward_of(model), F.cross_entropy)


def test_steps_learn_what_they_would_learn_uncaptured(capturing):
    model, twin = MODELS["mean"](), MODELS["mean"]()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, twin)]
    take = step_of(model)
    for blocks in batches_of(graph(), 10):
        loss = take(blocks)
        optimizers[0].step()
        expected = computed(twin, blocks, 32)
        optimizers[1].step()
        assert_close([loss, take.outputs], expected[:2])
        assert not loss.requires_grad and not take.outputs.requires_grad
    assert len(capturing) >= 1
    assert_close(list(model.parameters()), list(twin.parameters()))


def test_a_weight_is_that_of_the_gradients(capturing):
    model = MODELS["mean"]()
    take = step_of(model)
    for number, blocks in enumerate(batches_of(graph(), 9)):
        weight = (1.0, 0.5, 2.0)[number % 3]
        (
            loss,
            *_,
        ) = computed(model, blocks, 32)
        expected = [weight * each.grad for each in model.parameters()]
        assert_close([take(blocks, weight)], [loss])
        assert_close([each.grad for each in model.parameters()], expected)
    assert capturing


def test_the_size_of_most_batches_is_captured_and_others_are_not(capturing):
    g = graph()
    model = MODELS["mean"]()
    take = step_of(model)
    whole, part = batches_of(g, 1, size=32), batches_of(g, 1, size=7)
    for _ in range(choice.WARM_UP):
        take(whole[0])
    assert not capturing
    take(whole[0])
    assert len(capturing) == 1
    for _ in range(3):  # as often as epochs have a last batch
        for blocks in (whole[0], whole[0], part[0]):
            loss, *_ = computed(model, blocks, blocks[-1].num_dst_nodes())
            assert_close([take(blocks)], [loss])
    assert len(capturing) == 1


def test_a_batch_that_is_too_large_is_captured_anew_with_more_room(capturing):
    g = graph()
    model = MODELS["mean"]()
    take = step_of(model)
    small = batches_of(g, 1, fanouts=(1, 1))[0]
    large = batches_of(g, 1, fanouts=(8, 8))[0]
    for _ in range(choice.WARM_UP + 1):
        take(small)
    for blocks in (large, small, large):
        loss, *_ = computed(model, blocks, 32)
        assert_close([take(blocks)], [loss])
    assert len(capturing) == 2
    assert capturing[1].sizes.hold(Sizes.of(large)) and not capturing[0].sizes.hold(Sizes.of(large))


def test_on_a_cpu_nothing_is_captured():
    model = MODELS["mean"]()
    take = step_of(model)
    for blocks in batches_of(graph(), 6):
        expected = computed(model, blocks, 32)
        assert_close([take(blocks), take.outputs], expected[:2])
    assert not take._slots


def test_labels_that_were_not_fetched_are_missed():
    model = dgl.nn.SAGEConv(4, 3, "mean")
    step = dgl_mgpu.CapturedStep(
        model, lambda blocks: model(blocks[0], blocks[0].srcdata["x"]), F.cross_entropy
    )
    _, _, blocks = NeighborSampler([3]).sample(dgl.rand_graph(50, 200), torch.arange(5))
    blocks[0].srcdata["x"] = torch.randn(blocks[0].num_src_nodes(), 4)
    with pytest.raises(InvalidInputError, match="prefetch_labels"):
        step(blocks)


@pytest.mark.parametrize("required", [False, True])
def test_batch_normalisation_is_refused(required):
    """Its running statistics are DistributedDataParallel's to share."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(InvalidInputError, match="'1' is batch normalisation"):
        dgl_mgpu.CapturedStep(model, forward_of(model), F.cross_entropy, required=required)


def test_a_loss_may_depend_on_parameters_and_some_be_tied_or_frozen(capturing):
    class Tied(Model):
        def __init__(self):
            super().__init__(SAGEConv(6, 6, "mean"), SAGEConv(6, CLASSES, "mean"))
            self.layers[0].fc_neigh.weight = self.layers[0].fc_self.weight
            self.layers[1].fc_self.requires_grad_(False)

    model, twin = Tied(), Tied()
    twin.load_state_dict(model.state_dict())

    def loss_of(model):
        return lambda rows, labels: (
            F.cross_entropy(rows, labels) + sum(p.square().sum() for p in model.parameters())
        )

    take = dgl_mgpu.CapturedStep(model, forward_of(model), loss_of(model))
    for blocks in batches_of(graph(), 6):
        found = take(blocks)
        twin.zero_grad()
        expected = loss_of(twin)(forward_of(twin)(blocks), blocks[-1].dstdata["label"])
        expected.backward()
        assert_close([found], [expected.detach()])
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None) == (not one.requires_grad)
            if one.requires_grad:
                torch.testing.assert_close(one.grad, other.grad)
    assert capturing


def test_kinds_that_take_turns_are_not_captured_in_turns(capturing):
    g = graph()
    take = step_of(MODELS["mean"]())
    (whole,), (part,) = batches_of(g, 1, size=32), batches_of(g, 1, size=7)
    for _ in range(10):
        take(whole), take(part)
    assert len(capturing) == 1
    for _ in range(20):
        take(part)
    assert len(capturing) == 2


def test_batches_of_more_blocks_are_computed_as_always(capturing):
    g = graph()
    model = Model(*(SAGEConv(6, 6, "mean") for _ in range(3)))

    def forward(blocks):
        x = blocks[0].srcdata["feat"]
        for layer, block in zip(model.layers, blocks, strict=False):
            x = layer(block, x)
        return x

    take = dgl_mgpu.CapturedStep(model, forward, F.cross_entropy)
    two, three = batches_of(g, 6), batches_of(g, 1, fanouts=(3, 3, 3))
    for blocks in (*two, *three):
        loss = F.cross_entropy(forward(blocks), blocks[-1].dstdata["label"])
        assert_close([take(blocks)], [loss.detach()])
    assert len(capturing) == 1


def test_a_model_that_is_switched_to_evaluation_is(capturing, monkeypatch):
    def replayed(run, device, pool):
        """What depends on the mode does not change in a graph."""
        modes = [each.training for each in model.modules()]

        def replay():
            now = [each.training for each in model.modules()]
            for each, mode in zip(model.modules(), modes, strict=True):
                each.training = mode
            results = run()
            for each, mode in zip(model.modules(), now, strict=True):
                each.training = mode
            return results

        return replay

    monkeypatch.setattr(step, "captured", replayed)
    model = Model(*MODELS["mean"]().layers)
    model.drop = nn.Dropout(0.9)
    take = dgl_mgpu.CapturedStep(
        model, lambda b: model(b, model.drop(b[0].srcdata["feat"])), F.cross_entropy
    )
    (blocks,) = batches_of(graph(), 1)
    for _ in range(5):
        take(blocks)
    assert capturing
    expected, *_ = computed(model, blocks, 32)
    assert not torch.allclose(take(blocks), expected)
    model.eval()
    assert_close([take(blocks)], [expected])


def test_features_that_require_gradients_are_refused(capturing):
    rows = nn.Embedding(400, 6)
    take = step_of(MODELS["mean"]())
    with pytest.raises(InvalidInputError, match="feature 'feat' requires a gradient"):
        for blocks in batches_of(graph()):
            blocks[0].srcdata["feat"] = rows(blocks[0].srcdata[dgl.NID])
            take(blocks)


def test_a_batch_is_not_held_on_to(capturing):
    take = step_of(MODELS["mean"]())
    for blocks in batches_of(graph()):
        take(blocks)
        features = weakref.ref(blocks[0].srcdata["feat"])
    assert capturing
    del blocks
    assert features() is None


class Scaled(nn.Module):
    """A model with a parameter of another type that the first rank alone uses."""

    def __init__(self):
        super().__init__()
        self.model, self.scale = MODELS["mean"](), nn.Parameter(torch.rand((), dtype=torch.float64))

    def forward(self, blocks, x):
        found = self.model(blocks, x)
        return found if dist.get_rank() else found * self.scale


def average_on_rank(capture):
    """A step of each rank, one of which has no batch, against DDP's."""
    with tensor_backed_graphs():
        torch.manual_seed(dist.get_rank())
        if capture:
            step.captures = lambda device: True
            step.captured = lambda run, device, pool: run
        model, twin = Scaled(), Scaled()
        take = step_of(model)
        twin.load_state_dict(model.state_dict())
        parallel = DistributedDataParallel(twin, find_unused_parameters=True)
        for one, other in zip(model.parameters(), parallel.parameters(), strict=True):
            assert torch.equal(one, other)  # DDP's are the first rank's
        torch.manual_seed(0)
        batches = batches_of(graph(), 7)
        for number in range(6):
            blocks = batches[number + dist.get_rank()]
            computed(parallel, blocks, 32)
            take(blocks)
            assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        take.without_batch() if dist.get_rank() else take(batches[0])
        parallel.zero_grad()
        outputs = forward_of(parallel)(batches[0])
        (
            F.cross_entropy(outputs, batches[0][-1].dstdata["label"]) * (dist.get_rank() == 0)
        ).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("capture", [False, True])
def test_gradients_are_the_mean_over_ranks(capture):
    launch(average_on_rank, 2, capture)


class _BrokenCapture:
    """What stands for torch's CUDA here: its captures cannot be ended once something failed."""

    class Generator:
        state = "before"

        def get_state(self):
            return self.state

        def graphsafe_set_state(self, other):
            self.state = other

    def __init__(self):
        self.default_generators = [self.Generator()]

    def CUDAGraph(self):
        return None

    def device(self, device):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self, graph, **options):
        try:
            yield
        except Exception:
            raise RuntimeError("the capture was invalidated") from None


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_what_breaks_a_capture_is_told_and_not_how_it_ends(monkeypatch, error):
    cuda, fresh = _BrokenCapture(), []
    stand_in = SimpleNamespace(
        cuda=cuda,
        Generator=lambda device: _Restored(fresh),
        OutOfMemoryError=torch.OutOfMemoryError,
    )
    monkeypatch.setattr(capture, "torch", stand_in)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(capture, "_capturing_stream", lambda device: stream)
    monkeypatch.setattr(
        "dgl_mgpu.ops.workspace.captured_with", lambda *of: contextlib.nullcontext()
    )

    def run():
        raise error("the cause")

    told = torch.OutOfMemoryError if error is torch.OutOfMemoryError else UnavailableError
    try:
        raise ValueError("which has nothing to do with it")
    except ValueError:
        with pytest.raises(told, match="the cause"):
            capture.captured(run, torch.device("cuda", 0))
    # The generator waits no longer for the capture to go on.
    assert fresh == ["before"] and isinstance(cuda.default_generators[0].state, _Restored)


class _Restored:
    """A generator that notes the state that it is given."""

    def __init__(self, states):
        self.set_state = states.append
