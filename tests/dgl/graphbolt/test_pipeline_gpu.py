"""GraphBolt's loader on a GPU: mini-batches made ahead are those made when they are asked for."""

from __future__ import annotations

import dgl.graphbolt as gb
import pytest
import torch
from dgl.nn import SAGEConv
from torch import nn

import dgl_mgpu
from dgl_mgpu.capture import calls as captured_calls
from dgl_mgpu.dgl.graphbolt import mini_batches
from dgl_mgpu.sampling.prefetcher import Prefetcher
from dgl_mgpu.sampling.side_stream import side_stream_of
from tests.sampling.side_streams import poison

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NODES, EDGES, WIDTH = 20_000, 400_000, 32


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def poisoned(device):
    poison(device)
    yield
    assert not side_stream_of(device).is_full


def random_graph(dtype=torch.int64):
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(NODES, (EDGES,), generator=draw).sort().values
    indptr = torch.searchsorted(targets, torch.arange(NODES + 1))
    indices = torch.randint(NODES, (EDGES,), generator=draw)
    return gb.fused_csc_sampling_graph(
        indptr.to(dtype),
        indices.to(dtype),
        edge_attributes={
            gb.ORIGINAL_EDGE_ID: torch.arange(EDGES) * 2,
            "w": torch.rand(EDGES, generator=draw) + 0.1,
        },
    )


def random_rows():
    return torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))


def stored(rows):
    return gb.BasicFeatureStore({("node", None, "x"): gb.TorchBasedFeature(rows)})


def placed(graph, rows, memory, device):
    """The graph and a store of features in memory of the GPU, or pinned in the host's."""
    store = stored(rows.clone())
    if memory == "gpu":
        graph = graph.to(device)
        store._features["node", None, "x"] = store._features["node", None, "x"].to(device)
    else:
        graph.pin_memory_()
        store._features["node", None, "x"].pin_memory_()
    return graph, store


def pipe_of(graph, store, device, fanouts=(4, 3), seeds=None, **options):
    seeds = torch.arange(6000, dtype=graph.indices.dtype) if seeds is None else seeds
    items = gb.ItemSet((seeds, seeds.long() % 7), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(items, batch_size=500).copy_to(device, extra_attrs=["seed_nodes"])
    pipe = pipe.sample_neighbor(graph, [*fanouts], **options)
    return pipe.fetch_feature(store, node_feature_keys=["x"])


def contents(batch):
    """What a batch has, on the CPU."""
    parts = [batch.seed_nodes, batch.labels, batch.input_nodes, batch.node_features["x"]]
    for subgraph in batch.sampled_subgraphs:
        csc = subgraph.sampled_csc
        parts += [csc.indptr, csc.indices, subgraph.original_row_node_ids]
        parts += [subgraph.original_column_node_ids, subgraph.original_edge_ids]
    return [part.cpu() for part in parts]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(left, right)
        for ones, others in zip(one, other, strict=True)
        for left, right in zip(ones, others, strict=True)
    )


@pytest.fixture
def ahead(monkeypatch):
    """How many batches the side stream made."""
    made = []
    make = Prefetcher._make_next

    def noted(self, side_stream):
        made.append(side_stream)
        return make(self, side_stream)

    monkeypatch.setattr(Prefetcher, "_make_next", noted)
    monkeypatch.setattr(mini_batches, "DEPTH", 1)
    return made


def busy(device):
    """Keep the GPU busy for some milliseconds, as a model does."""
    torch.cuda._sleep(10_000_000)


@pytest.mark.parametrize("memory", ["gpu", "pinned"])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"prob_name": "w"}])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batches_made_ahead_are_the_same_and_right(
    memory, options, dtype, device, ahead, monkeypatch
):
    rows = random_rows()
    whole = random_graph(dtype)
    graph, store = placed(random_graph(dtype), rows, memory, device)

    def run():
        gb.seed(3)
        made = []
        for batch in gb.DataLoader(pipe_of(graph, store, device, **options)):
            busy(device)
            made.append(batch)
        return [contents(batch) for batch in made]

    prefetched = run()
    assert len(ahead) > 5
    monkeypatch.setenv("DGL_MGPU_PREFETCH", "0")
    assert same(prefetched, run())
    for _, _, inputs, x, *layers in prefetched:
        assert torch.equal(x, rows[inputs.long()])
        for number in range(0, len(layers), 5):
            indptr, indices, rows_, columns, eids = layers[number : number + 5]
            eids = eids // 2
            assert torch.equal(rows_[indices.long()], whole.indices[eids])
            owner = columns.long().repeat_interleave(indptr.diff().long())
            assert (whole.csc_indptr[owner] <= eids).all()
            assert (eids < whole.csc_indptr[owner + 1]).all()
            assert torch.equal(rows_[: len(columns)], columns)
            assert len(rows_.unique()) == len(rows_)


NTYPES = {"a": 12_000, "b": 8_000}
ETYPES = {"a:to:b": 0, "b:to:a": 1, "a:likes:a": 2}


def typed_graph():
    """Nodes 0 to 11,999 are of type a; edges of the graph above, of types that go together."""
    plain = random_graph()
    ends = torch.arange(NODES).repeat_interleave(plain.csc_indptr.diff())
    is_b, to_b = plain.indices >= NTYPES["a"], ends >= NTYPES["a"]
    # There is no type from b to b.
    indices = torch.where(is_b & to_b, plain.indices - NTYPES["b"], plain.indices)
    types = torch.where(to_b, 0, torch.where(is_b, 1, 2))
    order = torch.argsort(ends * 3 + types, stable=True)
    return gb.fused_csc_sampling_graph(
        plain.csc_indptr,
        indices[order],
        node_type_offset=torch.tensor([0, NTYPES["a"], NODES]),
        type_per_edge=types[order].to(torch.uint8),
        node_type_to_id={"a": 0, "b": 1},
        edge_type_to_id=ETYPES,
        edge_attributes={
            gb.ORIGINAL_EDGE_ID: torch.arange(EDGES) * 2,
            "w": torch.rand(EDGES, generator=torch.Generator().manual_seed(2)) + 0.1,
        },
    )


def typed_contents(graph, device, fanouts, **options):
    seeds = {"a": torch.arange(3000), "b": torch.arange(1000) * 3}
    items = gb.ItemSetDict({of: gb.ItemSet(ids, names="seed_nodes") for of, ids in seeds.items()})
    pipe = gb.ItemSampler(items, batch_size=500).copy_to(device, extra_attrs=["seed_nodes"])
    gb.seed(3)
    batches = []
    for batch in gb.DataLoader(pipe.sample_neighbor(graph, [*fanouts], **options)):
        parts = [ids.cpu() for _, ids in sorted(batch.input_nodes.items())]
        for subgraph in batch.sampled_subgraphs:
            rows, columns = subgraph.original_row_node_ids, subgraph.original_column_node_ids
            for etype, csc in subgraph.sampled_csc.items():
                source, _, target = etype.split(":")
                eids = subgraph.original_edge_ids[etype]
                parts += [csc.indptr, csc.indices, eids, rows[source], columns[target]]
        batches.append([part.cpu() for part in parts])
    return batches


@pytest.mark.parametrize("memory", ["gpu", "pinned"])
@pytest.mark.parametrize("options", [{}, {"prob_name": "w"}])
def test_several_types_are_sampled_as_on_the_cpu(memory, options, device, ahead):
    fanouts = [torch.tensor([4]), torch.tensor([3])]
    expected = typed_contents(typed_graph(), torch.device("cpu"), fanouts, **options)
    assert not ahead
    graph = typed_graph()
    if memory == "gpu":
        graph = graph.to(device)
    else:
        graph.pin_memory_()
    assert same(typed_contents(graph, device, fanouts, **options), expected)
    assert len(ahead) > 5


@pytest.mark.parametrize("seeds", ["distinct", "repeated"])
def test_all_neighbors_are_those_on_the_cpu(seeds, device):
    ids = torch.arange(900) if seeds == "distinct" else torch.arange(900) % 100
    rows = random_rows()
    graph, store = placed(random_graph(), rows, "gpu", device)
    found = gb.DataLoader(pipe_of(graph, store, device, (-1, -1), ids))
    graph, store = (
        random_graph(),
        stored(rows),
    )
    expected = gb.DataLoader(pipe_of(graph, store, "cpu", (-1, -1), ids))
    assert same([contents(batch) for batch in found], [contents(batch) for batch in expected])


@pytest.mark.parametrize("seeds", ["distinct", "repeated"])
def test_samples_are_those_on_the_cpu(seeds, device):
    ids = torch.arange(900) if seeds == "distinct" else torch.arange(900) % 100
    rows = random_rows()

    def run(where):
        gb.seed(11)
        graph, store = (
            random_graph(),
            stored(rows),
        )
        if where != "cpu":
            graph, store = placed(graph, rows, "gpu", device)
        return [
            contents(batch) for batch in gb.DataLoader(pipe_of(graph, store, where, (4, 5), ids))
        ]

    assert same(run(device), run("cpu"))


def test_negatives_depend_on_their_batch_alone(device, ahead, monkeypatch):
    graph = random_graph().to(device)
    links = torch.randint(NODES, (3000, 2), generator=torch.Generator().manual_seed(2))

    def run(between):
        torch.manual_seed(4)
        gb.seed(4)
        pipe = gb.ItemSampler(gb.ItemSet(links, names="node_pairs"), batch_size=300)
        pipe = pipe.copy_to(device, extra_attrs=["node_pairs"]).sample_uniform_negative(graph, 2)
        made = []
        for batch in gb.DataLoader(pipe.sample_neighbor(graph, [3])):
            busy(device)
            if between:
                torch.rand(5, device=device)
            made.append([batch.negative_dsts.cpu(), batch.input_nodes.cpu()])
        return made

    expected = run(False)
    assert ahead
    assert same(expected, run(True))
    assert len({tuple(dsts[:, 0].tolist()) for dsts, _ in expected}) == len(expected)


def test_what_is_written_meanwhile_is_in_the_next_batch(device, ahead):
    rows = random_rows()
    graph, store = placed(random_graph(), rows, "gpu", device)
    batches = iter(gb.DataLoader(pipe_of(graph, store, device)))
    for _ in range(4):
        next(batches)
        busy(device)
    assert ahead
    store.update("node", None, "x", torch.full((NODES, WIDTH), -3.0, device=device))
    assert next(batches).node_features["x"].unique().tolist() == [-3]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(WIDTH, 16, "mean"), SAGEConv(16, 7, "mean")])

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x)
        return x


def test_a_model_is_captured_and_learns_the_same(device):
    rows = random_rows()
    graph, store = placed(random_graph(), rows, "gpu", device)

    def run(captured):
        torch.manual_seed(0)
        gb.seed(0)
        dgl_mgpu.capture_models(captured)
        try:
            model = Model().to(device)
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            losses = []
            for _ in range(3):
                for batch in gb.DataLoader(pipe_of(graph, store, device)):
                    scores = model(batch.blocks, batch.node_features["x"])
                    loss = nn.functional.cross_entropy(scores, batch.labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
            kinds = [k for it in captured_calls._models.values() for k in it._kinds.values()]
            was_captured = any(kind.graphs is not None for kind in kinds)
            return torch.stack(losses).cpu(), was_captured
        finally:
            dgl_mgpu.capture_models(False)

    eager, was_captured = run(False)
    assert not was_captured
    losses, was_captured = run(True)
    assert was_captured
    torch.testing.assert_close(losses, eager, rtol=1e-3, atol=1e-3)
