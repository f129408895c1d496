"""`dgl.graphbolt` imports, and says at use why it does not work."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import sys

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import pytest
import torch

from dgl_mgpu.dgl.registry import UNAVAILABLE
from dgl_mgpu.errors import UnavailableError

NAMES = {"dgl.graphbolt": "ItemSet"}


@pytest.fixture(params=[part.module for part in UNAVAILABLE])
def part(request: pytest.FixtureRequest) -> str:
    return request.param


def test_importing_works_and_using_raises(part):
    module = importlib.import_module(part)
    with pytest.raises(UnavailableError) as error:
        getattr(module, NAMES[part])
    assert isinstance(error.value, ImportError)
    assert f"{part}.{NAMES[part]}" in error.value.asked
    assert torch.__version__.partition("+")[0] in error.value.found
    assert "2.2.1" in error.value.found  # the versions there are libraries for
    assert error.value.fix.startswith("Use ")


@pytest.mark.parametrize(
    "statement",
    [
        "from dgl.graphbolt import ItemSet",
        "from dgl.graphbolt import *",
        "import dgl.graphbolt.impl",
        "from dgl.graphbolt.sampling_graph import CSCSamplingGraph",
        "import dgl; dgl.graphbolt.load_from_shared_memory",
    ],
)
def test_every_way_to_use_it_raises(statement):
    with pytest.raises(UnavailableError):
        exec(statement, {})


def test_names_it_never_had_are_missing_in_the_ordinary_way(part):
    module = importlib.import_module(part)
    assert not hasattr(module, "no_such_name")
    assert not hasattr(module, "__wrapped__")


def test_tools_that_look_through_all_modules_still_work(part):
    module = importlib.import_module(part)
    assert list(pkgutil.iter_modules(module.__path__)) == []

    def anonymous() -> None: ...

    anonymous.__module__ = None  # pickle now asks every module for the name
    anonymous.__qualname__ = anonymous.__name__ = "no_such_function"
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(anonymous)


def test_the_adjacency_matrix_is_there_as_other_libraries_have_it():
    g = dgl.graph(([0, 1, 2], [1, 2, 0]))
    expected = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0.0]])
    assert torch.equal(g.adj_external().to_dense(), expected)
    assert (g.adj_external(scipy_fmt="csr").toarray() == expected.numpy()).all()


def test_cpu_graphs_work_without_the_tensoradapter():
    # It lends torch's allocator to DGL's C++ library; without it, DGL allocates by itself, and
    # its DataLoader does not use alternate CUDA streams.
    assert not sys.modules["dgl._ffi.base"].is_tensor_adaptor_enabled()
    g = dgl.graph(([0, 1, 2], [1, 2, 0]))
    x = torch.arange(3.0)[:, None]
    assert dgl.ops.copy_u_sum(g, x).flatten().tolist() == [2, 0, 1]


def test_a_partition_without_graphbolt_can_be_used_and_with_it_cannot_be_made(tmp_path):
    g = dgl.rand_graph(20, 60)
    arguments = (g, "small", 1, str(tmp_path))
    dgl.distributed.partition_graph(*arguments, part_method="random")
    partition = dgl.distributed.load_partition(str(tmp_path / "small.json"), 0)[0]
    assert partition.num_edges() == 60
    from dgl.distributed import dist_graph

    assert dist_graph._format_partition(partition, ("csc",)).formats()["created"] == ["csc"]
    with pytest.raises(UnavailableError, match="graphbolt"):
        dgl.distributed.partition_graph(*arguments, part_method="random", use_graphbolt=True)
