"""How hot nodes are: by degree, by a pre-sampling pass, and by what a store counted."""

from __future__ import annotations

import logging

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.errors import ConfigError, IdOutOfRangeError, InvalidInputError
from dgl_mgpu.placement import load_accesses
from dgl_mgpu.store import hotness as hotness_module
from dgl_mgpu.store.content import read_graph
from dgl_mgpu.store.hotness import degree_hotness, presample_hotness
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.fake_gpu import FakeRuntime
from tests.store.test_graph import hetero_graph, power_law_graph


def graph_of(g):
    data = read_graph(g, None)
    return data.schema.num_nodes, data.schema.canonical_etypes, data.sources


def test_degree_hotness_counts_how_often_a_node_is_a_neighbour():
    g = power_law_graph()
    assert np.array_equal(degree_hotness(*graph_of(g))["_N"], g.out_degrees().numpy())
    h = hetero_graph()
    expected = h.out_degrees(etype="follows") + h.out_degrees(etype="buys")
    assert np.array_equal(degree_hotness(*graph_of(h))["user"], expected.numpy())


def test_presampling_counts_the_input_nodes_of_mini_batches():
    g = power_law_graph()
    seeds = torch.arange(0, 800, 4)
    counts = presample_hotness(*graph_of(g), seeds, [5, 5], 50, seed=0)["_N"]
    # What is not within two hops is never read.
    near = dgl.khop_in_subgraph(g, seeds, 2)[0].ndata[dgl.NID]
    assert counts[np.setdiff1d(np.arange(800), near)].sum() == 0
    # DGL's own sampler reads nodes as often.
    rng, theirs = np.random.default_rng(0), np.zeros(800)
    for _ in range(64):
        batch = seeds[torch.from_numpy(rng.choice(200, 50, False))]
        inputs, _, _ = NeighborSampler([5, 5]).sample_blocks(g, batch)
        theirs[inputs] += 1
    # Each is a sum of 64 zeros and ones; of 800 differences none is beyond 6 deviations.
    assert np.abs(counts - theirs).max() < 6 * (2 * 64 / 4) ** 0.5


def test_presampling_covers_every_node_type():
    counts = presample_hotness(
        *graph_of(hetero_graph()), {"user": torch.arange(10)}, [3, 3], 5, seed=0
    )
    assert counts["user"].sum() > 10
    assert counts["item"].sum() > 0


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (torch.arange(800) < 9, "of a mask, mask.nonzero"),
        ({"paper": torch.arange(9)}, "node type .paper.: .* none .* choose from _N"),
        (torch.tensor([800]), "no seed node 800, the graph has 800 nodes"),
    ],
)
def test_seeds_that_presampling_cannot_begin_from(seeds, message):
    with pytest.raises(InvalidInputError, match=message):
        dgl_mgpu.GlobalStore.from_dgl(power_law_graph(), seeds=seeds, hotness="presample")


def _with_a_type_apart(idtype: torch.dtype) -> dgl.DGLGraph:
    """Nodes of one type have no edges of any."""
    edges = {("a", "r", "a"): ([0, 2], [1, 1]), ("a", "s", "b"): ([0], [1])}
    return dgl.heterograph(edges, {"a": 3, "b": 2, "z": 4}, idtype=idtype)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_input_nodes_are_those_of_the_blocks(idtype):
    for g, seeds in (
        (power_law_graph(idtype=idtype), torch.arange(0, 800, 7)),
        (hetero_graph().astype(idtype), {"user": torch.arange(9), "item": torch.arange(5, 20)}),
        (_with_a_type_apart(idtype), {"a": torch.tensor([1]), "z": torch.tensor([3, 0])}),
    ):
        graph = dgl_mgpu.GlobalStore.from_dgl(g).graph
        found = graph.input_nodes(seeds, [3, 4])
        _, _, blocks = graph.sample_blocks(seeds, [3, 4])
        for ntype in g.ntypes:
            assert torch.equal(found[ntype], blocks[0].srcnodes[ntype].data[dgl.NID])


class _Gpu(FakeRuntime):
    """A GPU that says how often it was asked to give memory back."""

    def __init__(self, memory: int = 64 << 30) -> None:
        super().__init__(0, 1, memory=memory)
        self.trimmed = 0

    def trim(self) -> None:
        self.trimmed += 1


def _presampled(runtime=None):
    """Counts of a graph of each kind, with ids of each type."""
    g, h = power_law_graph(idtype=torch.int32), hetero_graph()
    seeds = torch.arange(0, 800, 4)
    return [
        presample_hotness(*graph_of(g), seeds, [5, -1], 50, 0, runtime),
        presample_hotness(*graph_of(h), {"item": torch.arange(10)}, [3, 3], 5, 7, runtime),
    ]


def _assert_equal_counts(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for ntype, counts in mine.items():
            assert counts.dtype == np.int64 and np.array_equal(counts, theirs[ntype])


def test_presampling_on_a_gpu_gives_the_same_counts(monkeypatch, caplog):
    expected, gpu = _presampled(), _Gpu()
    views = []
    copy = hotness_module._copy_of
    monkeypatch.setattr(hotness_module, "_CHUNK", 1000)  # copied in several stretches
    monkeypatch.setattr(
        hotness_module,
        "_copy_of",
        lambda *args, **options: views.append(copy(*args, **options)) or views[-1],
    )
    _assert_equal_counts(_presampled(gpu), expected)
    assert len(views) == 1 + 3 and all(view.tiers.device == gpu.device for view in views)
    assert gpu.trimmed == 2 * 2  # before and after each
    assert not caplog.records


def test_presampling_says_that_a_gpu_has_too_little_memory(monkeypatch, caplog):
    expected = _presampled()
    g = power_law_graph(idtype=torch.int32)
    # int64 offsets and counts of 800 nodes, and 8000 edges.
    needed = 8 * 801 + 4 * 8000 + 8 * 800
    monkeypatch.setattr(hotness_module, "_copy_of", None)
    with caplog.at_level(logging.WARNING):
        found = presample_hotness(
            *graph_of(g), torch.arange(0, 800, 4), [5, -1], 50, 0, _Gpu(needed * 4 // 3 - 1)
        )
    _assert_equal_counts([found], expected[:1])
    assert f"on the CPU: the topology takes {needed:,} bytes" in caplog.text


def test_presampling_goes_on_without_a_gpu_that_runs_out_of_memory(monkeypatch, caplog):
    expected, gpu = _presampled(), _Gpu()

    def too_much(*_args):
        raise torch.cuda.OutOfMemoryError("tried to allocate too much\nand more")

    monkeypatch.setattr(hotness_module, "_copy_in_chunks", too_much)
    _assert_equal_counts(_presampled(gpu), expected)
    assert "on the CPU: tried to allocate too much" in caplog.text
    assert gpu.trimmed == 2 * 2


def test_a_store_on_gpus_presamples_there_before_it_is_built(monkeypatch):
    gpu = _Gpu()
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: gpu)
    g = power_law_graph()
    options = {"feature_ratio": 0.3, "hotness": "presample", "fanouts": [3], "batch_size": 50}
    held = []
    copied = hotness_module._copy_in_chunks

    def copied_while(*args):
        held.append(gpu.used)
        return copied(*args)

    monkeypatch.setattr(hotness_module, "_copy_in_chunks", copied_while)
    store = dgl_mgpu.GlobalStore.from_dgl(g, **options)
    assert held == [0, 0]  # offsets and indices are copied, and nothing of the store is there yet
    on_cpu = dgl_mgpu.GlobalStore.from_dgl(g, **options, device="cpu")
    assert len(held) == 2
    assert torch.equal(position_of(store), position_of(on_cpu))
    store.close()


def position_of(store, key: str = "feat", ntype: str | None = None) -> torch.Tensor:
    """Row id → position, of a table that has several tiers."""
    position = store.graph.get_node_storage(key, ntype).view.position
    assert len(position)
    return position


def assert_by_reads(position: torch.Tensor, counts) -> None:
    """Rows go from the most to the least read, equal ones by id; then those that nobody read."""
    order = position.argsort().tolist()
    read = [row for row in range(len(counts)) if counts[row]]
    assert order[: len(read)] == sorted(read, key=lambda row: (-counts[row], row))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_accesses_are_counts_of_input_nodes(num_workers, tmp_path):
    g = power_law_graph()
    seeds = torch.arange(0, 800, 4)
    store = dgl_mgpu.GlobalStore.from_dgl(g)
    sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(store.graph, seeds, sampler, batch_size=30, num_workers=num_workers)
    expected = np.zeros(800, np.int64)
    for _ in loader:  # before, and does not count
        pass
    accesses = store.count_accesses()
    for _ in range(2):
        with accesses:
            for inputs, _, _ in loader:
                np.add.at(expected, inputs.numpy(), 1)
        store.gather("feat", torch.arange(800))  # between, and does not count
    assert np.array_equal(accesses.counts()["_N"], expected)
    accesses.save(tmp_path / "counts.npz")
    later = dgl_mgpu.GlobalStore.from_dgl(g, hotness=tmp_path / "counts.npz", feature_ratio=0.3)
    assert_by_reads(position_of(later), expected)


def test_a_node_counts_as_its_most_read_feature_and_edges_do_not(tmp_path):
    g = hetero_graph()
    g.nodes["user"].data["age"] = torch.arange(50)
    store = dgl_mgpu.GlobalStore.from_dgl(g)
    with store.count_accesses() as accesses, store.count_accesses() as same:
        store.gather("feat", torch.tensor([1, 2, 2], dtype=torch.int32), "user")
        store.gather("age", torch.tensor([2, 3]), "user")
        store.gather("feat", torch.tensor([29, 0]), "item")
        store.gather("feat", torch.tensor([], dtype=torch.int64), "item")
        store.graph.get_edge_storage("price", "buys")[torch.arange(200)]
        with pytest.raises(IdOutOfRangeError):
            store.gather("feat", torch.tensor([4, 50]), "user")
    counts = accesses.counts()
    assert counts["user"].nonzero()[0].tolist() == [1, 2, 3]
    assert counts["user"][1:4].tolist() == [1, 2, 1]
    assert counts["item"].nonzero()[0].tolist() == [0, 29]
    assert all(np.array_equal(counts[ntype], same.counts()[ntype]) for ntype in counts)
    accesses.save(tmp_path / "counts.npz")
    # A store of both types, ordered by them.
    later = dgl_mgpu.GlobalStore.from_dgl(
        g, hotness=str(tmp_path / "counts.npz"), feature_ratio=0.3
    )
    for ntype in g.ntypes:
        assert_by_reads(position_of(later, "feat", ntype), counts[ntype])


def _counts_on_ranks(path) -> None:
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g)
    rank = torch.distributed.get_rank()
    with store.count_accesses() as accesses:
        if rank:  # the first reads nothing
            store.gather("feat", torch.arange(rank, 800, 7))
    accesses.save(path)


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_save_the_sum_of_their_counts(tmp_path):
    launch(_counts_on_ranks, 3, tmp_path / "counts.npz")
    expected = np.zeros(800, np.int64)
    expected[1::7] += 1
    expected[2::7] += 1
    found = load_accesses(tmp_path / "counts.npz", {"_N": 800})["_N"]
    assert np.array_equal(found, expected)


def test_nothing_counted_is_not_saved(tmp_path):
    store = dgl_mgpu.GlobalStore.from_dgl(power_law_graph())
    with store.count_accesses() as accesses:
        store.graph.sample_blocks(torch.arange(5), [3])
    with pytest.raises(InvalidInputError, match="no node feature was read"):
        accesses.save(tmp_path / "counts.npz")
    assert not list(tmp_path.iterdir())


def test_hotness_that_is_none(tmp_path):
    g = power_law_graph()
    for wrong in ("degrees", tmp_path / "missing.npz", tmp_path, 5, np.ones(800)):
        with pytest.raises(ConfigError, match="degree, presample, and there is no such file"):
            dgl_mgpu.GlobalStore.from_dgl(g, hotness=wrong)
    store = dgl_mgpu.GlobalStore.from_dgl(g)
    with store.count_accesses() as accesses:
        store.gather("feat", torch.arange(8))
    accesses.save(tmp_path / "counts.npz")
    with pytest.raises(ConfigError, match="800 nodes of type '_N', but the graph has 30 nodes"):
        dgl_mgpu.GlobalStore.from_dgl(hetero_graph(), hotness=tmp_path / "counts.npz")


def test_a_store_keeps_what_mini_batches_read_where_it_is_near():
    g = power_law_graph()
    seeds = torch.arange(0, 800, 4)
    shares = {}
    for hotness in ("degree", "presample"):
        store = dgl_mgpu.GlobalStore.from_dgl(
            g, seeds=seeds, hotness=hotness, feature_ratio=0.3, batch_size=50, fanouts=[5, 5]
        )
        sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"])
        for _ in DataLoader(store.graph, seeds, sampler, batch_size=50):
            pass
        rows = store.graph.traffic.take().rows
        shares[hotness] = rows["feat", "device"] / sum(rows.values())
    assert shares["presample"] > shares["degree"] > 0.3


def test_counts_of_an_epoch_beat_degrees_where_seeds_are_of_one_community(tmp_path):
    # Two communities of equal degrees; mini-batches begin in the second.
    g = dgl.batch([power_law_graph(), power_law_graph()])
    g = dgl.graph(g.edges(), num_nodes=1600)
    g.ndata["feat"] = torch.arange(1600.0)
    seeds = torch.arange(800, 1600, 4)
    shares = {}
    for hotness in ("degree", tmp_path / "counts.npz"):
        store = dgl_mgpu.GlobalStore.from_dgl(g, hotness=hotness, feature_ratio=0.2)
        sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"])
        loader = DataLoader(store.graph, seeds, sampler, batch_size=10)
        if hotness == "degree":
            with store.count_accesses() as accesses:
                for _ in loader:
                    pass
            accesses.save(tmp_path / "counts.npz")
            assert accesses.counts()["_N"][:800].sum() == 0
        store.graph.traffic.take()
        store.graph.set_epoch(100)  # samples that were not counted
        for _ in loader:
            pass
        rows = store.graph.traffic.take().rows
        shares[hotness] = rows["feat", "device"] / sum(rows.values())
    assert shares[tmp_path / "counts.npz"] > 1.2 * shares["degree"]
