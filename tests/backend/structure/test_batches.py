"""What the DataLoader does with the parts of mini-batches, against DGL's own functions."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque, namedtuple

import dgl
import pytest
import torch
from dgl.dataloading import DataLoader, NeighborSampler, dataloader
from dgl.frame import LazyFeature
from dgl.utils import recursive_apply, recursive_apply_pair

from dgl_mgpu.backend.ours import graphs_on_tensors

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
    with graphs_on_tensors():
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
