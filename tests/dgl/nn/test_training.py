"""Whole models on graphs made of tensors: autocast, compilers, copies, CUDA graphs, DDP."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # a process that is spawned imports this module

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from tests.dgl.nn.cases import IN, OUT, hetero, ring, seed
from tests.dgl.nn.devices import DEVICES, NO_GPU, close, floats, on_tensors
from tests.environment import needs_torch
from tests.forkserver import forkserver

HIDDEN, HEADS = 6, 2


class Model(nn.Module):
    """Two layers of one kind on a graph of its own."""

    def __init__(self, kind: str, graph: dgl.DGLGraph) -> None:
        super().__init__()
        self.graph = graph
        if kind == "GAT":
            first = dglnn.GATConv(IN, HIDDEN // HEADS, HEADS, allow_zero_in_degree=True)
            second = dglnn.GATConv(HIDDEN, OUT, 1, allow_zero_in_degree=True)
        elif kind == "SAGE":
            first = dglnn.SAGEConv(IN, HIDDEN, "mean")
            second = dglnn.SAGEConv(HIDDEN, OUT, "pool")
        else:
            first = dglnn.GraphConv(IN, HIDDEN, allow_zero_in_degree=True)
            second = dglnn.GraphConv(HIDDEN, OUT, allow_zero_in_degree=True)
        self.layers = nn.ModuleList([first, second])
        self.run: Callable[..., torch.Tensor] = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        hidden = self.run(first, self.graph, x).flatten(1).relu()
        return self.run(second, self.graph, hidden).flatten(1)


def plain(layer: nn.Module, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
    return layer(graph, x)


def checkpointed(layer: nn.Module, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, graph, x, use_reentrant=False)


KINDS = ["GCN", "GAT", "SAGE"]


def make(kind: str, device: str) -> tuple[Model, torch.Tensor]:
    """A model and its features, of the same numbers on every device."""
    seed()
    model = Model(kind, ring().to(torch.device(device))).to(device)
    return model, torch.randn(model.graph.num_nodes(), IN).to(device)


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The model's output and the gradients of its parameters."""
    model.zero_grad()
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def all_close(found: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    assert len(found) == len(expected)
    for i, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        close(result.float(), wanted, f"result {i}", dtype)


@pytest.fixture(autouse=True)
def all_bits():
    with floats(torch.float32):
        yield


@NO_GPU  # DGL's operators follow autocast on GPUs alone
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_on_a_gpu(kind):
    expected = results(*make(kind, "cpu"))
    model, x = make(kind, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = results(model, x)
    assert not torch.allclose(found[0].cpu().float(), expected[0])  # it did round
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    all_close(found, expected, torch.bfloat16)


@pytest.mark.parametrize("kind", [dglnn.GATConv, dglnn.GATv2Conv, dglnn.GraphConv])
@pytest.mark.parametrize("tensors", [False, True])
def test_operands_of_several_types_under_autocast_on_a_cpu(kind, tensors):
    with tensor_backed_graphs(tensors):
        g = dgl.add_self_loop(dgl.rand_graph(100, 600))
        x, weights = torch.randn(100, 16), torch.rand(g.num_edges())
        is_weighted = kind is dglnn.GraphConv
        layer = kind(16, 8) if is_weighted else kind(16, 8, 2)
        options = {"edge_weight": weights} if is_weighted else {}
        expected = layer(g, x, **options)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(g, x, **options)
            with torch.no_grad():
                assert torch.equal(layer(g, x, **options), found)
    found.sum().backward()
    assert all(each.grad.dtype == torch.float32 for each in layer.parameters())
    assert not torch.equal(found.float(), expected)  # it did round
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.1)


@needs_torch("2.5", "2.4 does not compile it")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_compiled(kind, device):
    expected = results(*make(kind, "cpu"))
    with on_tensors(device):
        model, x = make(kind, device)
        compiled = torch.compile(model, backend="aot_eager" if device == "cpu" else "inductor")
        try:
            found = results(compiled, x), results(compiled, x)
        finally:
            torch._dynamo.reset()
    for each in found:
        all_close(each, expected, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed(kind, device):
    expected = results(*make(kind, "cpu"))
    with on_tensors(device):
        model, x = make(kind, device)
        model.run = checkpointed
        found = results(model, x)
    all_close(found, expected, torch.float32)


def pickled(model: Model) -> Model:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", KINDS)
def test_copied_with_its_graph(kind, copied, device):
    with on_tensors(device):
        model, x = make(kind, device)
        expected = results(model, x)
        again = copied(model)
        assert isinstance(again.graph._graph, TensorIndex)
        assert again.graph.device == model.graph.device
        found = results(again, x)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@NO_GPU
def test_moved_to_the_gpu_and_back(idtype):
    g = hetero().astype(idtype)
    g.nodes["user"].data["x"] = torch.rand(3, 2)
    g.edges["plays"].data["w"] = torch.rand(4)
    there = g.to("cuda")
    assert isinstance(there._graph, TensorIndex)
    assert there.nodes["user"].data["x"].is_cuda and there.edges["plays"].data["w"].is_cuda
    back = there.cpu()
    assert not isinstance(back._graph, TensorIndex)
    for etype in g.canonical_etypes:
        for end, wanted in zip(back.edges(etype=etype), g.edges(etype=etype), strict=True):
            assert end.dtype == idtype and torch.equal(end, wanted)
    assert torch.equal(back.nodes["user"].data["x"], g.nodes["user"].data["x"])
    assert torch.equal(back.edges["plays"].data["w"], g.edges["plays"].data["w"])


class Asked(TorchDispatchMode):
    """Collects operators whose result the host waits for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith(self.WAITING):
            self.seen.append(name)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("kind", ["GCN", "GAT"])
def test_a_step_does_not_wait_for_the_gpu(kind):
    with on_tensors("cpu"):
        model, x = make(kind, "cpu")
        model.graph.create_formats_()
        results(model, x)
        with Asked() as asked:
            results(model, x)
    assert not asked.seen


@NO_GPU
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_step_is_captured_in_a_cuda_graph(kind):
    model, x = make(kind, "cuda")
    model.graph.create_formats_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = copy.deepcopy(model.state_dict())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        out.square().sum().backward()
        optimizer.step()
        return out.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    other = torch.randn_like(x)
    for features in (x.clone(), other):
        model.load_state_dict(state)
        expected = step(), *(p.detach().clone() for p in model.parameters())
        model.load_state_dict(state)
        x.copy_(features)
        graph.replay()
        found = captured.clone(), *(p.detach().clone() for p in model.parameters())
        x.copy_(other)
        all_close(list(found), [t.cpu() for t in expected], torch.float32)


def train_on_rank(rank: int, ranks: int, meeting_point: str, path: str) -> None:
    """A rank of a data-parallel run: its own half of the nodes have a loss."""
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks)
    try:
        parameters = learned_on(rank, ranks)
    finally:
        # What used the group is gone by now: freed after it, DDP has been seen to wait for ever.
        dist.destroy_process_group()
    if rank == 0:
        torch.save(parameters, path)


def learned_on(rank: int, ranks: int) -> list[torch.Tensor]:
    with on_tensors("cpu"):
        model, x = make("GAT", "cpu")
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            parallel(x)[rank::ranks].square().sum().mul(ranks).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_data_parallel(tmp_path: Path):
    model, x = make("GAT", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    arguments = (2, f"file://{tmp_path}/meeting", str(tmp_path / "parameters"))
    forkserver()
    torch.multiprocessing.start_processes(train_on_rank, arguments, 2, start_method="forkserver")
    found = torch.load(tmp_path / "parameters")
    all_close(found, [p.detach() for p in model.parameters()], torch.float32)
