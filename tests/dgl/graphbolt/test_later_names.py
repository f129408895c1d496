"""Names and keywords of GraphBolt's later versions."""

from __future__ import annotations

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.dgl.graphbolt import later_names, loading
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.stored_tensors import is_stored
from tests.dgl.graphbolt.graphs import NODES, random_graph

SEEDS = torch.arange(NODES)


def test_names_are_there_before_graphbolt_is_executed():
    assert set(later_names.LATER_NAMES) == set(loading._LATER)
    for name, value in later_names.LATER_NAMES.items():
        assert getattr(gb, name) is value


@pytest.mark.parametrize("method", ["sample_neighbor", "sample_layer_neighbor"])
def test_keywords_of_later_versions_change_nothing(method):
    def batches(**options):
        gb.seed(2)
        pipe = gb.ItemSampler(gb.ItemSet(SEEDS, names="seed_nodes"), batch_size=7)
        pipe = getattr(pipe, method)(random_graph(), [2, 2], **options)
        features = gb.BasicFeatureStore({("node", None, "x"): gb.TorchBasedFeature(SEEDS[:, None])})
        overlap = {"overlap_fetch": True} if options else {}
        pipe = pipe.fetch_feature(features, node_feature_keys=["x"], **overlap)
        return [str(batch) for batch in gb.DataLoader(pipe)]

    assert batches(overlap_fetch=True, asynchronous=True) == batches()
    with pytest.raises(TypeError, match="cooperatiwe"):
        batches(cooperatiwe=True)


def test_a_feature_on_disk_is_read_from_its_file(tmp_path):
    rows = torch.arange(NODES * 4.0).view(NODES, 4)
    np.save(tmp_path / "x.npy", rows.numpy())
    feature = gb.DiskBasedFeature(tmp_path / "x.npy", {"about": 1})
    ids = torch.tensor([3, 59, 3])
    assert feature.read(ids).equal(rows[ids])
    assert feature.read().equal(rows)
    assert feature.size() == (4,)
    assert feature.metadata() == {"about": 1}
    assert feature.pin_memory_() is feature
    feature.update(torch.full((1, 4), -1.0), torch.tensor([3]))
    assert feature.read(ids)[0].tolist() == [-1] * 4
    assert np.load(tmp_path / "x.npy")[3].tolist() == rows[3].tolist()
    features = gb.BasicFeatureStore({("node", None, "x"): feature})
    store = dgl_mgpu.GlobalStore.from_graphbolt(random_graph(), features, device="cpu")
    assert is_stored(feature._tensor)
    assert store.gather("x", torch.tensor([7])).equal(rows[[7]])
    with pytest.raises(FileNotFoundError):
        gb.DiskBasedFeature(tmp_path / "y.npy")


def test_caches_are_made_of_bytes(monkeypatch):
    made = []

    class Cache:
        def __init__(self, shape, dtype):
            made.append((tuple(shape), dtype))

    monkeypatch.setattr(gb.impl.gpu_cached_feature, "GPUCache", Cache)
    narrow = gb.TorchBasedFeature(torch.zeros(9, 2, dtype=torch.float16))
    wide = gb.TorchBasedFeature(torch.zeros(9, 3))
    assert gb.gpu_cached_feature(wide, 25).cache_size == 2
    both = gb.gpu_cached_feature({"a": narrow, "b": wide}, 100)
    assert {key: it.cache_size for key, it in both.items()} == {"a": 6, "b": 6}
    assert made == [((2, 3), torch.float32), ((6, 2), torch.float16), ((6, 3), torch.float32)]
    with pytest.raises(InvalidInputError, match="takes 12 bytes, and the cache 11"):
        gb.gpu_cached_feature(wide, 11)
    assert gb.cpu_cached_feature(wide, 100, pin_memory=True) is wide


def test_seed_edges_are_excluded_by_a_stage():
    links = torch.stack([SEEDS, SEEDS.flip(0)], 1)

    def batches(exclude):
        pipe = gb.ItemSampler(gb.ItemSet(links, names="node_pairs"), batch_size=9)
        pipe = exclude(pipe.sample_neighbor(random_graph(), [-1]))
        return [str(batch.sampled_subgraphs) for batch in gb.DataLoader(pipe)]

    by_stage = batches(lambda pipe: pipe.exclude_seed_edges(include_reverse_edges=True))
    expected = batches(lambda pipe: pipe.transform(excluded))
    assert by_stage == expected
    assert by_stage != batches(lambda pipe: pipe)


def excluded(minibatch):
    return gb.exclude_seed_edges(minibatch, include_reverse_edges=True)


def test_items_by_type_have_their_later_name():
    items = gb.HeteroItemSet({"a": gb.ItemSet(torch.arange(3), names="seed_nodes")})
    (batch,) = gb.ItemSampler(items, batch_size=3)
    assert batch.seed_nodes["a"].tolist() == [0, 1, 2]
