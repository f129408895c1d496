"""The store's accessors in Numba's CUDA kernels, and the examples of docs/howto/own-kernels.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError, UnavailableError
from tests.kernels.cuda_views import on_device
from tests.ops.views import LAYOUTS, Graph, power_law_graph, row_view

DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "own-kernels.md"
NODES = 211
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def example(language: str, number: int = 0) -> str:
    """A block of code of the document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)[number]


@pytest.fixture(scope="module")
def numba_cuda() -> ModuleType:
    try:
        from dgl_mgpu.ops import numba_cuda
    except UnavailableError as error:
        pytest.skip(str(error))
    return numba_cuda


@pytest.fixture
def numba_gpu(numba_cuda: ModuleType) -> ModuleType:
    if not torch.cuda.is_available() or not numba_cuda.cuda.is_available():
        pytest.skip("needs a GPU that Numba sees")
    return numba_cuda


def some_nodes(count: int = 500) -> torch.Tensor:
    return torch.randint(0, NODES, (count,), generator=torch.Generator().manual_seed(1))


def views(idtype: torch.dtype = torch.int32) -> tuple[Graph, torch.Tensor, Any, Any]:
    """A graph and features, and their views with an order each, in different tiers."""
    graph = power_law_graph(NODES, 3000, seed=3)
    features = torch.randn(NODES, 6)
    random = np.random.default_rng(4)
    return (
        graph,
        features,
        graph.view(LAYOUTS["three tiers"], idtype, random),
        row_view(features, LAYOUTS["empty parts"], random),
    )


def means(graph: Graph, features: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    rows = [features[torch.from_numpy(graph.neighbors(int(node)))] for node in nodes]
    return torch.stack([r.double().mean(0) if len(r) else torch.zeros(6) for r in rows]).float()


def test_example_in_cuda_on_the_cpu(emulated):
    graph, features, graph_view, table = views()
    nodes = some_nodes()
    out = torch.full((len(nodes), 6), torch.nan)
    emulated.run(
        example("cuda"), "mean_of_neighbors", 4, 128,
        graph_view.tiers, len(graph_view.tiers), graph_view.position, graph_view.pointers,
        table.tiers, len(table.tiers), table.position, table.pointers,
        6, nodes, len(nodes), out,
    )  # fmt: skip
    torch.testing.assert_close(out, means(graph, features, nodes))


@needs_gpu
def test_example_in_cuda():
    pytest.importorskip("cupy")
    graph, features, graph_view, table = views()
    names: dict[str, Any] = {}
    exec(example("python", 0), names)
    out = names["mean_of_neighbors"](
        names["compile_kernel"](example("cuda")),
        on_device(graph_view, "cuda"),
        on_device(table, "cuda"),
        some_nodes().cuda(),
    )
    torch.testing.assert_close(out.cpu(), means(graph, features, some_nodes()))


def numba_example() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(example("python", 1), names)
    return names


def test_example_in_numba(numba_gpu):
    graph, features, graph_view, table = views()
    out = numba_example()["mean_of_neighbors"](
        on_device(graph_view, "cuda"), on_device(table, "cuda"), some_nodes().cuda()
    )
    torch.testing.assert_close(out.cpu(), means(graph, features, some_nodes()))


@pytest.mark.parametrize("id_type", ["int32", "int64"])
def test_example_in_numba_compiles(numba_cuda, monkeypatch, id_type):
    cuda, types = numba_cuda.cuda, numba_cuda.cuda.types
    if not cuda.is_available():
        hopper = type("Device", (), {"compute_capability": (9, 0)})
        monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", hopper)

    def array(element: str, dimensions: int) -> Any:
        return types.Array(getattr(types, element), dimensions, "C")

    places = array("int64", 2), array("int64", 2), array("int32", 1)
    graph = types.NamedTuple((*places, array(id_type, 1)), numba_cuda.Graph)
    places = array("int64", 2), array("int64", 1), array("int32", 1)
    table = types.NamedTuple((*places, array("float32", 1), types.int64), numba_cuda.Table)
    arguments = graph, table, array("int64", 1), array("float32", 2)
    ptx, _ = cuda.compile_ptx(numba_example()["mean_kernel"].py_func, arguments, cc=(9, 0))
    assert "ld.global.f32" in ptx  # a feature, loaded where it lies
    assert "call" not in ptx  # accessors are inlined


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_edge_and_its_id(numba_gpu, layout, idtype, shuffled):
    cuda = numba_gpu.cuda
    num_neighbors, neighbor, edge_id = (
        getattr(numba_gpu, name) for name in ("num_neighbors", "neighbor", "edge_id")
    )

    @cuda.jit
    def read(graph, starts, degrees, sources, eids):
        node = cuda.grid(1)
        if node < degrees.size:
            degrees[node] = num_neighbors(graph, node)
            for i in range(degrees[node]):
                sources[starts[node] + i] = neighbor(graph, node, i)
                eids[starts[node] + i] = edge_id(graph, node, i)

    graph = power_law_graph(NODES, 3000, seed=3)
    random = np.random.default_rng(4) if shuffled else None
    view = on_device(graph.view(LAYOUTS[layout], idtype, random), "cuda", host_segments=True)
    starts = torch.from_numpy(graph.indptr[:-1]).cuda()
    degrees = torch.full((NODES,), -1, device="cuda")
    sources, eids = torch.full((2, 3000), -1, dtype=idtype, device="cuda")
    torch.cuda.synchronize()
    arrays = map(cuda.as_cuda_array, (starts, degrees, sources, eids))
    read[4, 64](numba_gpu.graph_of(view), *arrays)
    cuda.synchronize()
    assert np.array_equal(degrees.cpu(), np.diff(graph.indptr))
    assert np.array_equal(sources.cpu(), graph.indices)
    assert np.array_equal(eids.cpu(), np.arange(3000))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_feature(numba_gpu, dtype, shuffled):
    cuda, feature = numba_gpu.cuda, numba_gpu.feature

    @cuda.jit
    def read(table, out):
        node = cuda.grid(1)
        if node < out.shape[0]:
            for column in range(table.row_size):
                out[node, column] = feature(table, node, column)

    rows = torch.randint(0, 2, (NODES, 3, 2)).to(dtype)
    random = np.random.default_rng(4) if shuffled else None
    view = on_device(row_view(rows, LAYOUTS["three tiers"], random), "cuda", host_segments=True)
    out = torch.empty(NODES, 6, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    read[4, 64](numba_gpu.table_of(view), cuda.as_cuda_array(out))
    cuda.synchronize()
    assert torch.equal(out.cpu(), rows.reshape(NODES, 6))


def test_views_that_no_kernel_can_take(numba_cuda):
    with pytest.raises(InvalidInputError, match="on device 'cpu'"):
        numba_cuda.graph_of(views()[2])
    with pytest.raises(InvalidInputError, match="bfloat16, a type that NumPy lacks"):
        numba_cuda.table_of(row_view(torch.zeros(3, 2, dtype=torch.bfloat16)))
    with pytest.raises(InvalidInputError, match="some of its rows are on disk"):
        numba_cuda.table_of(replace(views()[3], disk=object()))


def test_numpy_is_left_as_it_was(numba_cuda):
    version = tuple(map(int, np.__version__.split(".")[:2]))
    assert hasattr(np, "row_stack") == (version < (2, 5))
