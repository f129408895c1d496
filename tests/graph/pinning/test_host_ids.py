"""Pinned graphs of tensors that are asked with ids on a GPU; the GPU is a mark on tensors here."""

from __future__ import annotations

import dgl
import pytest
import torch

from dgl_mgpu.graph import host_ids
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and that no function takes before it is copied back."""

    is_cuda = True
    device = GPU

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        reads = {"__get__", "dim", "contiguous", "numel"}
        assert function.__name__ in reads, f"{function} with ids on a GPU"
        return super().__torch_function__(function, types, args, kwargs or {})


def on_gpu(ids):
    return torch.as_tensor(ids).as_subclass(OnGpu)


def moved(value, device):
    """As `host_ids.moved`, which would ask the driver."""
    if isinstance(value, TensorIndex):
        assert device.type == "cpu", "no graph is moved but the parts that were asked for"
        return value
    if isinstance(value, SubgraphIndex):
        return (value, device)
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return on_gpu(value) if device == GPU else value.as_subclass(torch.Tensor)
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    return value


@pytest.fixture
def index(monkeypatch):
    """A pinned graph's index."""
    monkeypatch.setattr(host_ids, "moved", moved)
    with tensor_backed_graphs():
        graph = dgl.graph(([0, 0, 1, 3], [1, 2, 2, 0]))
        monkeypatch.setattr(TensorIndex, "is_pinned", lambda index: True)
        yield graph._graph


QUERIES = {
    "in_degrees": lambda g, move: g.in_degrees(0, move([2, 0])),
    "out_degrees": lambda g, move: g.out_degrees(0, move([2, 0])),
    "in_edges": lambda g, move: g.in_edges(0, move([2])),
    "out_edges": lambda g, move: g.out_edges(0, move([0])),
    "find_edges": lambda g, move: g.find_edges(0, move([3, 1])),
    "has_edges_between": lambda g, move: g.has_edges_between(0, move([0, 1]), move([1, 1])),
    "edge_ids_one": lambda g, move: g.edge_ids_one(0, move([0, 3]), move([2, 0])),
    "edge_ids_all": lambda g, move: g.edge_ids_all(0, move([0]), move([2])),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_queries_answer_where_the_ids_are(index, query):
    wanted = query(index, torch.tensor)
    found = query(index, on_gpu)
    parts = found if isinstance(found, tuple) else (found,)
    assert all(isinstance(part, OnGpu) for part in parts)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert [moved(part, None).tolist() for part in parts] == [part.tolist() for part in wanted]


PARTS = {
    "node_subgraph": lambda g, move: g.node_subgraph([move([0, 2])]),
    "edge_subgraph": lambda g, move: g.edge_subgraph([move([1, 3])], True),
}


@pytest.mark.parametrize("take", PARTS.values(), ids=PARTS)
def test_subgraphs_are_made_where_the_ids_are(index, take):
    part, device = take(index, on_gpu)
    wanted = take(index, torch.tensor)
    assert device == GPU and part.graph.device.type == "cpu"  # it is not moved here
    for mine, other in zip(part.induced_edges, wanted.induced_edges, strict=True):
        assert mine.tolist() == other.tolist()
    assert part.graph.edges(0)[0].tolist() == wanted.graph.edges(0)[0].tolist()


def test_a_graph_that_is_not_pinned_takes_no_ids_of_a_gpu(index, monkeypatch):
    monkeypatch.setattr(TensorIndex, "is_pinned", lambda index: False)
    for ask in (*QUERIES.values(), *PARTS.values()):
        with pytest.raises(dgl.DGLError, match=r"not pinned.*pin_memory_"):
            ask(index, on_gpu)


def test_what_is_moved():
    ids, graph = torch.tensor([1]), dgl.graph(([0], [1]))
    with tensor_backed_graphs():
        index = dgl.graph(([0], [1]))._graph
    cpu = torch.device("cpu")
    there = host_ids.moved([ids, (ids, 3), index, SubgraphIndex(index, [ids], [])], cpu)
    assert there[0] is ids and there[1] == (ids, 3) and there[2] is index
    assert isinstance(there[3], SubgraphIndex) and there[3].graph is index
    assert host_ids.moved(graph, cpu) is graph
    assert host_ids.gpu_of([ids, [3, (on_gpu([1]),)]]) == GPU
    assert host_ids.gpu_of([ids, index, None]) is None
