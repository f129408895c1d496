"""GraphBolt's graphs and features in a store, whose samples and rows are those without one."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import dgl.graphbolt as gb
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.runner_options import RunnerOptions
from dgl_mgpu.errors import ConfigError, InvalidInputError, StoreClosedError
from dgl_mgpu.graph.stored_tensors import is_stored, stored_on
from tests.dgl.graphbolt.graphs import ETYPES, NODES, random_graph

CPU = torch.device("cpu")
SEEDS = torch.arange(NODES)


@pytest.fixture
def told(monkeypatch):
    """The runner, given options of a store in shared memory."""

    def tell(uses_store=True, **store):
        monkeypatch.delenv(runner_options.VARIABLE, raising=False)
        options = {"device": "cpu", **store}
        runner_options.hand_on(RunnerOptions(options, uses_store=uses_store, captures=False))

    monkeypatch.setenv(runner_options.VARIABLE, "")  # so that it is taken back
    tell()
    return tell


def in_store(graph):
    return is_stored(graph.indices, graph.csc_indptr)


def rows_of(dtype=torch.float32):
    return (torch.arange(NODES * 3) % 50).view(NODES, 3).to(dtype)


def store_of(rows, **others):
    features = {("node", None, "x"): gb.TorchBasedFeature(rows)}
    features |= {("node", None, name): feature for name, feature in others.items()}
    return gb.BasicFeatureStore(features)


def loader_of(graph, features, names=("x",), *, pipe=gb.ItemSampler, **options):
    items = gb.ItemSet(SEEDS.to(graph.indices.dtype), names="seed_nodes")
    datapipe = pipe(items, batch_size=7).copy_to("cpu", extra_attrs=["seed_nodes"])
    datapipe = datapipe.sample_neighbor(graph, [2, 3], **options)
    return gb.DataLoader(datapipe.fetch_feature(features, node_feature_keys=[*names]))


def batches(loader):
    gb.seed(1)
    return [str(batch) for batch in loader]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"prob_name": "w"}, {"replace": True, "prob_name": "w"}])
def test_batches_are_those_without_a_store(dtype, options):
    graph = random_graph(dtype, w=torch.rand(600) + 0.1)
    features = store_of(rows_of(), y=gb.TorchBasedFeature(rows_of(torch.float16)))
    loader = loader_of(graph, features, ("x", "y"), **options)
    expected = batches(loader)
    with dgl_mgpu.GlobalStore.from_graphbolt(graph, features, device="cpu") as store:
        assert batches(loader) == expected
        assert store.graph.traffic.take()
        assert store.gather("x", torch.tensor([5, 3])).equal(rows_of()[[5, 3]])
    assert batches(loader) == expected  # from the tensors themselves
    with pytest.raises(StoreClosedError):
        store.gather("x", torch.tensor([5]))


def test_what_is_written_to_is_read_where_it_is():
    graph, rows = random_graph(), rows_of()
    features = store_of(rows, y=gb.TorchBasedFeature(rows_of()))
    store = dgl_mgpu.GlobalStore.from_graphbolt(graph, features, device="cpu")
    assert stored_on(CPU, rows) is not None
    assert stored_on(torch.device("cuda", 0), rows) is None
    features.update("node", None, "x", torch.full((2, 3), -7.0), torch.tensor([3, 4]))
    assert not is_stored(rows)
    ids = torch.tensor([2, 3, 4, 2])
    assert features.read("node", None, "x", ids)[1:3].unique().tolist() == [-7]
    assert features.read("node", None, "y", ids).equal(rows_of()[ids])
    features.update("node", None, "y", torch.zeros(NODES, 3))
    assert not features.read("node", None, "y", ids).any()
    assert in_store(graph)
    graph.indices[0] = 9
    assert not in_store(graph)
    assert graph.in_subgraph(torch.tensor([1])).sampled_csc.indices[0] == 9
    assert store.gather("x", ids).equal(rows_of()[ids])


def test_graphs_of_several_types_have_their_features_in_a_store():
    graph = random_graph(with_types=True)
    a, b = torch.rand(40, 3), torch.rand(20, 2)
    features = gb.BasicFeatureStore(
        {("node", "a", "x"): gb.TorchBasedFeature(a), ("node", "b", "x"): gb.TorchBasedFeature(b)}
    )
    store = dgl_mgpu.GlobalStore.from_graphbolt(graph, features, device="cpu")
    assert is_stored(a) and is_stored(b) and not in_store(graph)
    assert features.read("node", "b", "x", torch.tensor([19, 0])).equal(b[[19, 0]])
    assert store.gather("x", torch.tensor([39, 2]), "a").equal(a[[39, 2]])
    node = graph.csc_indptr[41].item()
    for name, number in ETYPES.items():
        etype = tuple(name.split(":"))
        assert store.graph.num_edges(etype) == (graph.type_per_edge == number).sum()
    sampled = store.graph.sample_neighbors({"b": torch.tensor([1])}, -1)
    sources, _ = sampled.edges(etype=("a", "to", "b"))
    expected = graph.indices[node : graph.csc_indptr[42]]
    assert sorted(sources.tolist()) == sorted(expected.tolist())


def test_an_on_disk_data_set_is_stored(tmp_path):
    import numpy as np
    import yaml

    rows = rows_of().numpy()
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", 2 * rows)
    np.save(tmp_path / "seeds.npy", SEEDS.numpy())
    edges = torch.stack([torch.randint(NODES, (300,)), torch.randint(NODES, (300,))])
    np.save(tmp_path / "edges.npy", edges.numpy())
    feature = {"domain": "node", "format": "numpy"}
    task_data = {"name": "seed_nodes", "format": "numpy", "path": "seeds.npy"}
    metadata = {
        "dataset_name": "some",
        "graph": {
            "nodes": [{"num": NODES}],
            "edges": [{"format": "numpy", "path": "edges.npy"}],
        },
        "feature_data": [
            {**feature, "name": "x", "path": "x.npy", "in_memory": False},
            {**feature, "name": "y", "path": "y.npy"},
        ],
        "tasks": [{"name": "some", "train_set": [{"data": [task_data]}]}],
    }
    (tmp_path / "metadata.yaml").write_text(yaml.dump(metadata))
    dataset = gb.OnDiskDataset(str(tmp_path)).load()
    loader = loader_of(dataset.graph, dataset.feature, ("x", "y"))
    expected = batches(loader)
    store = dgl_mgpu.GlobalStore.from_graphbolt(dataset, device="cpu")
    assert batches(loader) == expected
    assert store.gather("x", SEEDS).equal(rows_of())
    assert store.gather("y", SEEDS).equal(2 * rows_of())


def test_what_cannot_be_stored_is_an_error():
    graph = random_graph()
    with pytest.raises(InvalidInputError, match="60 of such nodes"):
        dgl_mgpu.GlobalStore.from_graphbolt(graph, store_of(torch.rand(59, 2)), device="cpu")
    with pytest.raises(InvalidInputError, match="of type StoreGraph"):
        store = dgl_mgpu.GlobalStore.from_graphbolt(graph, device="cpu")
        dgl_mgpu.GlobalStore.from_graphbolt(store.graph, device="cpu")
    with pytest.raises(ConfigError, match="devise"):
        dgl_mgpu.GlobalStore.from_graphbolt(graph, devise="cpu")


def test_features_of_other_kinds_are_read_where_they_are():
    class Doubled(gb.Feature):
        def read(self, ids=None):
            return 2 * (rows_of() if ids is None else rows_of()[ids])

    learned = rows_of().requires_grad_()
    features = store_of(rows_of(), y=Doubled(), z=gb.TorchBasedFeature(learned))
    store = dgl_mgpu.GlobalStore.from_graphbolt(random_graph(), features, device="cpu")
    assert "z" not in repr(store) and not is_stored(learned)
    loader = loader_of(random_graph(), features, ("x", "y", "z"))
    for batch in loader:
        x, y, z = (batch.node_features[name] for name in "xyz")
        assert y.equal(2 * x) and z.equal(x)


def test_a_loader_builds_a_store_if_the_runner_was_given_options(told):
    graph, features = random_graph(), store_of(rows_of(), y=gb.TorchBasedFeature(rows_of()))
    expected = batches(loader_of(random_graph(), store_of(rows_of())))
    loader = loader_of(graph, features)
    assert in_store(graph)
    assert is_stored(features._features["node", None, "x"]._tensor)
    assert not is_stored(features._features["node", None, "y"]._tensor)  # which nobody reads
    assert batches(loader) == expected
    view = graph._c_csc_graph._view(CPU)
    loader_of(graph, features)
    assert graph._c_csc_graph._view(CPU) is view  # the same store


def test_what_has_no_store_is_told_of(told):
    def found(make):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            make()
        return [str(each.message) for each in seen if "is not in a store" in str(each.message)]

    features = store_of(rows_of())
    typed = random_graph(with_types=True)
    (message,) = found(lambda: loader_of(typed, features))
    assert "several types of edges" in message
    assert not found(lambda: loader_of(random_graph(), features))
    told(uses_store=False)
    graph = random_graph()
    assert not found(lambda: loader_of(graph, store_of(rows_of())))
    assert not in_store(graph)
    told(polisy="auto")
    with pytest.raises(ConfigError, match="polisy"):
        loader_of(graph, store_of(rows_of()))


def test_a_cache_says_how_much_of_a_gpu_the_store_gets(told, monkeypatch):
    made = []
    build = dgl_mgpu.GlobalStore.from_graphbolt.__func__

    def noted(cls, graph, features=None, **options):
        made.append(options)
        return build(cls, graph, features, **options)

    monkeypatch.setattr(dgl_mgpu.GlobalStore, "from_graphbolt", classmethod(noted))
    monkeypatch.setattr(gb.impl.gpu_cached_feature, "GPUCache", lambda shape, dtype: None)
    cached = gb.GPUCachedFeature(gb.TorchBasedFeature(rows_of()), 10)
    features = gb.BasicFeatureStore({("node", None, "x"): cached})
    expected = batches(loader_of(random_graph(), store_of(rows_of())))
    made.clear()
    loader = loader_of(random_graph(), features)
    assert batches(loader) == expected  # past the cache, which is none here
    (options,) = made
    assert options["gpu_memory"] == f"{10 * 3 * 4}B"
    assert options["batch_size"] == 7
    assert options["fanouts"] == [2, 3]
    told(gpu_memory="1MiB")
    loader_of(random_graph(), gb.BasicFeatureStore({("node", None, "x"): cached}))
    loader_of(random_graph(), store_of(rows_of()))
    assert made[-1]["gpu_memory"] == "1MiB"


def test_other_graphs_of_the_same_sources_are_their_own():
    graph = random_graph()
    store = dgl_mgpu.GlobalStore.from_graphbolt(graph, device="cpu")
    indptr = torch.zeros(NODES + 1, dtype=torch.int64)
    indptr[1:] = 600
    other = gb.fused_csc_sampling_graph(indptr, graph.indices)

    def degrees(graph):
        sampled = graph.sample_neighbors(torch.tensor([0, 5]), torch.tensor([-1]))
        return sampled.sampled_csc.indptr.diff().tolist()

    assert degrees(graph) == graph.csc_indptr.diff()[[0, 5]].tolist()
    assert degrees(other) == [600, 0]
    graph.csc_indptr = indptr
    assert degrees(graph) == [600, 0]
    assert store.graph.num_edges() == 600


def test_graphs_and_features_are_pickled_without_their_store(tmp_path):
    graph, rows = random_graph(), rows_of()
    store = dgl_mgpu.GlobalStore.from_graphbolt(graph, store_of(rows), device="cpu")
    torch.save(graph, tmp_path / "graph.pt")
    torch.save(rows, tmp_path / "rows.pt")
    assert torch.load(tmp_path / "rows.pt", weights_only=True).equal(rows)
    read = torch.load(tmp_path / "graph.pt", weights_only=True)
    assert read.indices.equal(graph.indices)
    assert not in_store(read)
    copied = copy.deepcopy(rows)
    assert is_stored(rows) and not is_stored(copied)
    del store


def test_a_store_lives_as_long_as_what_it_has():
    graph, rows = random_graph(), rows_of()
    features = store_of(rows)
    store = dgl_mgpu.GlobalStore.from_graphbolt(graph, features, device="cpu")
    seen = weakref.ref(store.graph)
    del store
    gc.collect()
    assert in_store(graph) and seen() is not None
    assert features.read("node", None, "x", torch.tensor([3])).equal(rows[[3]])
    del graph, features, rows
    gc.collect()
    assert seen() is None


def test_what_a_store_cannot_keep_is_left_out_where_nobody_asked_for_it(told):
    long = torch.rand(NODES + 5, 2)
    graph, features = random_graph(), store_of(rows_of(), y=gb.TorchBasedFeature(long))
    for batch in loader_of(graph, features, ("x", "y")):
        assert batch.node_features["y"].equal(long[batch.input_nodes])
    assert in_store(graph) and not is_stored(long)
    with torch.inference_mode():
        unwatched = random_graph()
    with pytest.warns(UserWarning, match="in inference mode"):
        loader = loader_of(unwatched, store_of(rows_of()))
    assert len([*loader]) == 9


def _have_their_own(offset):
    """Ranks whose features differ read their own, as do later those that have written."""
    runner_options.hand_on(RunnerOptions({"device": "cpu"}, captures=False))
    try:
        rows = rows_of() + offset * dist.get_rank()
        graph, features = random_graph(), store_of(rows)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            loader = loader_of(graph, features, pipe=gb.DistributedItemSampler)
        told = [str(it.message) for it in seen if "reads its own" in str(it.message)]
        for batch in loader:
            assert batch.node_features["x"].equal(rows[batch.input_nodes])
        shared = in_store(graph)
        if dist.get_rank() == 0:
            graph.indices[0] = graph.indices[0]
        again = loader_of(graph, features, pipe=gb.DistributedItemSampler)
        assert len([*again]) == len([*loader])
        dist.barrier()
        return len(told), shared
    finally:
        runner_options.hand_on(RunnerOptions(captures=False))


def test_ranks_with_other_data_have_their_own(ranks):
    assert ranks.run(_have_their_own, 1000) == [(1, False)] * 3
    assert ranks.run(_have_their_own, 0) == [(0, True)] * 3


def _share():
    runner_options.hand_on(RunnerOptions({"device": "cpu"}, captures=False))
    graph, features = random_graph(), store_of(rows_of())
    expected = batches(loader_of(random_graph(), store_of(rows_of())))  # of this rank alone
    loader = loader_of(graph, features, pipe=gb.DistributedItemSampler)
    assert in_store(graph)
    seen = torch.cat([batch.seed_nodes for batch in loader])
    for batch in loader:
        assert batch.node_features["x"].equal(rows_of()[batch.input_nodes])
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, seen.tolist())
    found = batches(loader_of(graph, features))
    dist.barrier()
    runner_options.hand_on(RunnerOptions(captures=False))
    return expected, found, sorted(seed for seeds in everyones for seed in seeds)


def test_ranks_share_a_store(ranks):
    results = ranks.run(_share)
    for expected, found, seen in results:
        assert expected == found
        assert seen == SEEDS.tolist()
