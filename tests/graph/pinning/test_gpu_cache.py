"""A GPU's cache of rows, on the CPU: the same torch operators."""

from __future__ import annotations

import copy

import dgl
import dgl.cuda
import pytest
import torch
from dgl.cuda import GPUCache

from dgl_mgpu.errors import InvalidInputError

WIDTH = 3


def rows_of(keys: torch.Tensor) -> torch.Tensor:
    return keys[:, None] + torch.arange(WIDTH) / 4


def fetch(cache: GPUCache, keys: torch.Tensor) -> torch.Tensor:
    """As DGL's dataloader does; returns the keys that were missing."""
    values, missing_index, missing_keys = cache.query(keys)
    assert values.shape == (len(keys), WIDTH) and values.dtype == torch.float32
    assert torch.equal(missing_keys, keys[missing_index].to(cache.idtype))
    cache.replace(missing_keys, rows_of(missing_keys))
    values[missing_index] = rows_of(missing_keys)
    assert torch.equal(values, rows_of(keys))
    return missing_keys


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_items", [1, 5, 16, 17, 100, 1000])
@pytest.mark.parametrize("given", [torch.int32, torch.int64])
def test_what_is_looked_up_is_right_whatever_is_cached(num_items, idtype, given):
    torch.manual_seed(0)
    cache = GPUCache(num_items, WIDTH, idtype)
    asked = missed = 0
    for _ in range(30):
        keys = torch.randint(0, 300, (torch.randint(0, 80, ()).item(),), dtype=given)
        missed += len(fetch(cache, keys))
        asked += len(keys)
    assert cache.total_queries == asked and cache.total_miss == missed
    assert cache.miss_rate == missed / asked
    if num_items == 1000:
        fetch(cache, torch.arange(300))
        assert len(fetch(cache, torch.arange(300))) == 0


def test_what_fits_stays():
    cache = GPUCache(10_000, WIDTH)
    keys = torch.randperm(1 << 20)[:1000] * 64  # all share their last bits
    assert len(fetch(cache, keys)) == 1000
    assert len(fetch(cache, keys.flip(0))) == 0


def test_a_full_set_gives_up_what_was_not_asked_for_longest():
    """A cache of one set, beside the times at which its keys were last used."""
    torch.manual_seed(0)
    cache, last_use = GPUCache(16, WIDTH), {}
    for step in range(300):
        keys = torch.randperm(40)[: torch.randint(1, 9, ()).item()]
        missing = set(fetch(cache, keys).tolist())
        assert missing == set(keys.tolist()) - set(last_use)
        added = dict.fromkeys(missing, 2 * step + 1)
        last_use |= dict.fromkeys(set(keys.tolist()) - missing, 2 * step)
        absent = copy.deepcopy(cache).query(torch.arange(40))[2].tolist()
        there = {key: last_use[key] for key in last_use if key not in absent}
        gone = [last_use[key] for key in last_use if key in absent]
        assert not set(added) & set(absent)
        assert len(there) + len(added) == min(16, len(last_use) + len(added))
        assert not gone or max(gone) <= min(there.values())
        last_use = there | added


def test_repeated_keys_take_one_place():
    cache = GPUCache(16, WIDTH)
    keys = torch.tensor([7] * 30 + [8, 9])
    cache.replace(keys, rows_of(keys))
    others = torch.arange(20, 33)
    cache.replace(others, rows_of(others))
    assert len(fetch(cache, torch.tensor([7, 8, 9, *others.tolist()]))) == 0


def test_more_rows_than_fit_are_left_out():
    cache = GPUCache(16, WIDTH)
    keys = torch.arange(100)
    cache.replace(keys, rows_of(keys))
    values, missing, _ = cache.query(keys)
    assert len(missing) == 84
    there = torch.ones(100, dtype=torch.bool)
    there[missing] = False
    assert torch.equal(values[there], rows_of(keys)[there])


def test_rows_that_are_there_are_written_anew():
    cache = GPUCache(8, WIDTH)
    keys = torch.arange(8)
    cache.replace(keys, rows_of(keys))
    cache.replace(torch.tensor([3, 50]), rows_of(torch.tensor([300, 50])))
    values, missing, _ = cache.query(torch.tensor([3, 50]))
    assert len(missing) == 0
    assert torch.equal(values, rows_of(torch.tensor([300, 50])))


def test_no_key_is_found_in_empty_places():
    cache = GPUCache(8, WIDTH)
    keys = torch.tensor([-1, 0, -5])
    assert len(cache.query(keys)[1]) == 3
    cache.replace(keys, rows_of(keys))
    assert cache.query(keys)[2].tolist() == [-1, -5]


def test_rows_may_have_any_shape_and_type():
    cache = GPUCache(8, 6)
    keys = torch.arange(4)
    rows = torch.randint(0, 99, (4, 2, 3))
    cache.replace(keys, rows)
    assert torch.equal(cache.query(keys)[0], rows.flatten(1).float())
    assert GPUCache(4, 0).query(keys)[0].shape == (4, 0)


@pytest.mark.parametrize(
    "arguments", [(0, 3), (-1, 3), (5, -1), (5, 3, torch.int16), (5, 3, torch.float32)], ids=str
)
def test_what_is_no_cache_is_refused(arguments):
    with pytest.raises(InvalidInputError, match="cache"):
        GPUCache(*arguments)


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInputError, match=r"\(2, 4\)"):
        GPUCache(8, WIDTH).replace(torch.arange(2), torch.ones(2, 4))


class Later:
    """What storages give that read in another thread."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        return self._rows


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("wrap", [lambda rows: rows, Later], ids=["now", "later"])
def test_what_is_fetched_has_the_shape_and_type_of_its_source(shape, dtype, wrap):
    torch.manual_seed(0)
    table = torch.randint(0, 1 << 40, (50, *shape)).to(dtype)
    cache = GPUCache(20, table[0].numel())
    for count in (0, 5, 30, 30):
        keys = torch.randint(0, 50, (count,))
        before = cache.total_miss
        found = cache.fetch(keys, lambda keys: wrap(table[keys]))
        assert found.dtype == dtype and torch.equal(found, table[keys])
        assert found.__cache_miss__ == (cache.total_miss - before) / max(1, count)


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.int64), ((WIDTH,), torch.float32), ((2, 3), torch.float16)],
    ids=str,
)
def test_a_dataloader_reads_through_it(shape, dtype):
    torch.manual_seed(0)
    graph = dgl.rand_graph(200, 2000)
    graph.ndata["feat"] = torch.randint(0, 1 << 40, (200, *shape)).to(dtype)
    graph.edata["weight"] = torch.randn(2000, 2)
    sampler = dgl.dataloading.NeighborSampler(
        [5, 5], prefetch_node_feats=["feat"], prefetch_edge_feats=["weight"]
    )
    loader = dgl.dataloading.DataLoader(
        graph,
        torch.arange(200),
        sampler,
        batch_size=50,
        gpu_cache={"node": {"feat": 100}, "edge": {"weight": 5000}},
    )
    for _ in range(2):
        for input_nodes, _, blocks in loader:
            assert torch.equal(blocks[0].srcdata["feat"], graph.ndata["feat"][input_nodes])
            for block in blocks:
                weight = graph.edata["weight"][block.edata[dgl.EID]]
                assert torch.equal(block.edata["weight"], weight)
    caches = graph._gpu_caches
    (nodes, _), (edges, _) = (next(iter(caches[end].values())) for end in ("node", "edge"))
    assert 0 < nodes.miss_rate < 1
    assert edges.total_miss <= 2000


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_features_may_be_fetched_for_other_ids_than_those_of_rows():
    """A sampler may name a column and ids of its own: more than one of them, too."""
    graph = dgl.rand_graph(20, 50)
    graph.ndata["feat"] = torch.arange(20.0)

    class Sampler(dgl.dataloading.Sampler):
        def sample(self, g, nodes):
            subgraph = g.subgraph(nodes)
            others = dgl.frame.LazyFeature("feat", 19 - nodes)
            subgraph.ndata["other"] = others
            return subgraph

    for cached in (None, {"node": {"feat": 5}}):
        loader = dgl.dataloading.DataLoader(
            graph, torch.arange(20), Sampler(), batch_size=5, gpu_cache=cached
        )
        for subgraph in loader:
            assert torch.equal(subgraph.ndata["other"], 19.0 - subgraph.ndata[dgl.NID])
