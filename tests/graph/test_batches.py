"""What the DataLoader does with the parts of mini-batches, against DGL's own functions."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque, namedtuple
from types import SimpleNamespace

import dgl
import pytest
import torch
from dgl.base import DGLError
from dgl.dataloading import DataLoader, NeighborSampler, dataloader
from dgl.frame import LazyFeature
from dgl.utils import recursive_apply, recursive_apply_pair

from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.originals import originals

Pair = namedtuple("Pair", ["left", "right"])
#: Containers of every kind that differs for DGL, and what is none.
PARTS = [
    1,
    None,
    "text",
    b"ab",
    torch.arange(3),
    [],
    (),
    {},
    [1, "text", (2, [3, {"a": 4, "b": (5,)}])],
    (None, torch.arange(2), [torch.ones(1)]),
    {"x": 1, "y": {"z": [2]}},
    OrderedDict(a=(1, 2)),
    UserDict(a=[1, (2,)]),
    Pair(1, [2, 3]),
    deque([1, (2, 3)]),
    range(3),
    {1, 2},
    LazyFeature("x"),
]


def described(result: object) -> str:
    """Types and values, which `==` would mix up."""
    return repr(result)


@pytest.mark.parametrize("data", PARTS, ids=lambda data: type(data).__name__)
def test_a_function_of_every_part(data):
    assert dataloader.recursive_apply is not recursive_apply

    def function(part, add, times=1):
        return (type(part).__name__, id(part), add, times)

    expected = recursive_apply(data, function, 3, times=2)
    assert described(dataloader.recursive_apply(data, function, 3, times=2)) == described(expected)


@pytest.mark.parametrize("data", PARTS, ids=lambda data: type(data).__name__)
def test_a_function_of_every_pair_of_parts(data):
    assert dataloader.recursive_apply_pair is not recursive_apply_pair

    def function(one, other, add, times=1):
        return (type(one).__name__, id(other), add, times)

    others = [data, [1, [2], (3,)], (4, 5), 6, recursive_apply(data, lambda part: [part])]
    if isinstance(data, dict | UserDict):
        others = [{**data, "more": 1}]
    for one, other in [(data, other) for other in others] + [(other, data) for other in others[1:]]:
        expected = recursive_apply_pair(one, other, function, 3, times=2)
        found = dataloader.recursive_apply_pair(one, other, function, 3, times=2)
        assert described(found) == described(expected)


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
@pytest.mark.parametrize("workers", [0, 2])
def test_features_that_nobody_fetched_are_there(workers):
    """They are taken out of what a worker sends, and put back."""
    with tensor_backed_graphs():
        g = dgl.rand_graph(60, 400)
        g.ndata["feat"] = torch.rand(60, 3)
        g.edata["weight"] = torch.rand(400)
        sampler = NeighborSampler([3, 3], prefetch_labels=["feat"])
        loader = DataLoader(g, torch.arange(60), sampler, batch_size=20, num_workers=workers)
        for inputs, outputs, blocks in loader:
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
            assert torch.equal(blocks[-1].dstdata["feat"], g.ndata["feat"][outputs])
            for block in blocks:
                assert torch.equal(block.edata["weight"], g.edata["weight"][block.edata[dgl.EID]])


class Storage:
    """Rows that are there at once, or when they are waited for; notes what it is asked."""

    def __init__(self, name, rows, log, is_late):
        self.name, self.rows, self.log, self.is_late = name, rows, log, is_late

    def fetch(self, ids, device, pin_memory=False):
        self.log.append(("fetches", self.name, pin_memory))
        found = self.rows[ids.long()].to(device)
        return Future(self.name, found, self.log) if self.is_late else found


class Future:
    def __init__(self, name, rows, log):
        self.name, self.rows, self.log = name, rows, log

    def wait(self):
        self.log.append(("waits for", self.name))
        return self.rows


def loader_of(log, is_late):
    """What an iterator asks of its loader, over storages of any name and type."""
    rows = torch.arange(200.0).view(100, 2)

    def storage(name, type_):
        return Storage((name, type_), rows + len(name) + len(str(type_)), log, is_late)

    return SimpleNamespace(
        device=torch.device("cpu"),
        graph=SimpleNamespace(
            get_node_storage=storage,
            get_edge_storage=storage,
            _gpu_caches={"node": {}, "edge": {}},
        ),
        other_storages={"more": storage("more", None)},
        pin_prefetcher=True,
        num_workers=0,
        use_prefetch_thread=False,
        use_alternate_streams=False,
    )


def lazy_batch():
    """Parts of every kind, with features to be fetched by their own ids and by the rows'."""
    pair_graph = dgl.heterograph(
        {("a", "to", "b"): ([0, 1], [2, 0]), ("b", "back", "a"): ([2], [1])}, {"a": 3, "b": 3}
    )
    pair_graph.nodes["b"].data[dgl.NID] = torch.tensor([7, 8, 9])
    pair_graph.nodes["b"].data["x"] = LazyFeature()
    pair_graph.nodes["b"].data["here"] = torch.ones(3)
    pair_graph.edges["back"].data["w"] = LazyFeature("weight", torch.tensor([40]))
    block = dgl.create_block(([0, 1, 2], [0, 0, 1]), 3, 2)
    block.srcdata[dgl.NID] = torch.tensor([5, 3, 1], dtype=torch.int32)
    block.srcdata["x"] = LazyFeature("other name")
    block.dstdata["y"] = LazyFeature("y", torch.tensor([3, 4]))
    block.edata[dgl.EID] = torch.tensor([20, 21, 22])
    block.edata["w"] = LazyFeature()
    plain = dgl.graph(([0], [1]))
    nodes = {"a": torch.arange(3), "b": (torch.arange(2), LazyFeature("more", torch.arange(4)))}
    return (
        torch.arange(4),
        nodes,
        pair_graph,
        [block, plain],
        LazyFeature("more", torch.tensor([1])),
    )


def contents(part):
    if isinstance(part, dgl.DGLGraph):
        frames = [*part._node_frames, *part._edge_frames]
        return [{name: frame[name].tolist() for name in frame} for frame in frames]
    return part.tolist()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_batch_is_what_dgl_makes_of_it(is_late):
    log, expected_log = [], []
    iterator = dataloader._PrefetchingIter(loader_of(log, is_late), iter([lazy_batch()]))
    theirs = dataloader._PrefetchingIter(loader_of(expected_log, is_late), iter([lazy_batch()]))
    found = next(iterator)
    expected = originals["dgl.dataloading.dataloader:_PrefetchingIter.__next__"](theirs)
    assert recursive_apply(found, contents) == recursive_apply(expected, contents)
    begins = [each for each in expected_log if each[0] == "fetches"]
    assert log[: len(begins)] == begins  # before anything is waited for
    assert sorted(log[len(begins) :], key=str) == sorted(expected_log[len(begins) :], key=str)
    assert len(begins) == 7 and bool(log[7:]) == is_late
    with pytest.raises(StopIteration):
        next(iterator)


def test_parts_of_what_a_storage_gives_are_waited_for():
    class Several(Storage):
        def fetch(self, ids, device, pin_memory=False):
            later = super().fetch(ids, device, pin_memory)
            return [later, {"there": ids}]

    def batches(advance):
        loader = loader_of([], True)
        rows = torch.arange(8.0)
        loader.other_storages["more"] = Several("more", rows, [], True)
        batch = (LazyFeature("more", torch.tensor([3, 1])), torch.ones(1))
        return advance(dataloader._PrefetchingIter(loader, iter([batch])))

    found = batches(next)
    expected = batches(originals["dgl.dataloading.dataloader:_PrefetchingIter.__next__"])
    assert repr(found) == repr(expected)
    assert found[0][0].tolist() == [3.0, 1.0]


def test_parts_that_are_there_are_not_copied():
    batch = lazy_batch()
    found = next(dataloader._PrefetchingIter(loader_of([], False), iter([batch])))
    assert found[0] is batch[0] and found[2] is batch[2] and found[3][0] is batch[3][0]


@pytest.mark.parametrize("change", ["no ids", "too few rows", "no tensor"])
def test_what_dgl_refuses_is_refused(change):
    block = dgl.create_block(([0, 1, 2], [0, 0, 1]), 3, 2)
    if change == "no ids":
        block.srcdata["x"] = LazyFeature("x")
    elif change == "too few rows":
        block.srcdata["x"] = LazyFeature("x", torch.arange(2))
    batch = ("text",) if change == "no tensor" else (block,)
    iterator = dataloader._PrefetchingIter(loader_of([], False), iter([batch]))
    expected = {"no ids": "of which rows", "too few rows": "3 rows, got 2", "no tensor": "'to'"}
    with pytest.raises((DGLError, AttributeError), match=expected[change]):
        next(iterator)
