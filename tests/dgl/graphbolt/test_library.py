"""GraphBolt without its C++ library: import, operators, datapipes, shared memory and files."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import dgl
import dgl.graphbolt as gb
import pytest
import torch
from dgl.graphbolt import ItemSet
from torchdata.dataloader2 import graph as pipe_graphs
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe, Mapper, Prefetcher

from dgl_mgpu.dgl.graphbolt import graph as graph_module
from dgl_mgpu.dgl.graphbolt import shared_memory
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, SharedMemoryError
from dgl_mgpu.machine.shared_memory import SHARED_MEMORY, SharedMemory
from tests.dgl.graphbolt.test_sampling import random_graph

IMPORTS = """
import sys
import dgl_mgpu, dgl
import inspect
inspect.getmodule(inspect.currentframe(), "nowhere.py")  # goes over all modules
[getattr(module, "no_such_name", 0) for module in [*sys.modules.values()]]
assert "pydantic" not in sys.modules, "it takes as long to import as half of DGL"
from dgl.graphbolt import ItemSet, FusedCSCSamplingGraph
import dgl.graphbolt.impl, dgl.graphbolt.internal
from dgl.graphbolt import *
assert not hasattr(dgl.graphbolt, "no_such_name")
"""


USED_BY_THREADS = """
import threading
import dgl_mgpu, dgl
import time
found = []
threads = [threading.Thread(target=lambda: found.append(dgl.graphbolt.ItemSet)) for _ in range(8)]
for thread in threads:
    thread.start()
    time.sleep(0.03)
[thread.join() for thread in threads]
assert len(found) == 8 and len({*found}) == 1, found
"""


@pytest.mark.parametrize("name", ["impl", "internal.utils", "item_sampler"])
def test_a_module_of_it_may_be_the_first_that_is_imported(name):
    code = (
        f"import dgl_mgpu, dgl, sys, dgl.graphbolt.{name} as part; "
        f"assert part is dgl.graphbolt.{name}; "
        "assert part.__spec__.loader is part.__loader__; from dgl.graphbolt import ItemSet; "
        "assert ItemSet is sys.modules['dgl.graphbolt.itemset'].ItemSet"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_threads_may_use_it_first_together():
    done = subprocess.run([sys.executable, "-c", USED_BY_THREADS], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_it_is_imported_when_it_is_used():
    assert len(ItemSet(torch.arange(3))) == 3  # which brought torchdata's names above
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# -- operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indptr_is_expanded(dtype):
    indptr, ids = torch.tensor([0, 2, 2, 5], dtype=dtype), torch.tensor([7, 8, 9])
    expand = torch.ops.graphbolt.expand_indptr
    assert expand(indptr, torch.int32, None, None).tolist() == [0, 0, 2, 2, 2]
    found = expand(indptr, torch.int64, ids, 5)
    assert found.tolist() == [7, 7, 9, 9, 9] and found.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [None, 4])
def test_rows_of_a_matrix_are_selected(dtype, size):
    indptr = torch.tensor([0, 2, 2, 5, 6], dtype=dtype)
    rows = torch.tensor([2, 1, 3], dtype=dtype)
    for values in (torch.rand(6), torch.arange(12).view(6, 2)):
        begin, found = torch.ops.graphbolt.index_select_csc(indptr, values, rows, size)
        assert begin.tolist() == [0, 3, 3, 4] and begin.dtype == dtype
        assert torch.equal(found, values[[2, 3, 4, 5]])


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_is_not_there_is_an_error(row):
    indptr, rows = torch.tensor([0, 2, 2, 5, 6]), torch.tensor([2, row])
    with pytest.raises(IdOutOfRangeError, match=f"no node {row}"):
        torch.ops.graphbolt.index_select_csc(indptr, torch.rand(6), rows, None)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_nodes_are_numbered_destinations_first(dtype):
    src, dst = (torch.tensor(ids, dtype=dtype) for ids in ([5, 9, 5, 3, 7], [3, 2, 3]))
    first = torch.tensor([2, 3], dtype=dtype)
    unique, of_src, of_dst = torch.ops.graphbolt.unique_and_compact(src, dst, first)
    assert unique.tolist() == [2, 3, 5, 9, 7]
    assert of_src.tolist() == [2, 3, 2, 1, 4] and of_dst.tolist() == [1, 0, 1]
    assert {unique.dtype, of_src.dtype, of_dst.dtype} == {dtype}


def test_a_destination_that_is_not_among_them_is_an_error():
    with pytest.raises(InvalidInputError, match="destination 4 is not in unique_dst_ids"):
        torch.ops.graphbolt.unique_and_compact(*map(torch.tensor, ([1], [2, 4], [2, 3])))


# -- shared memory and files -----------------------------------------------------------------------

PARTS = (
    *("csc_indptr", "indices", "node_type_offset", "type_per_edge"),
    *("node_type_to_id", "edge_type_to_id", "node_attributes", "edge_attributes"),
)


def assert_same(one, other):
    for name in PARTS:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, dict):
            assert mine.keys() == theirs.keys()
            assert all(
                torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine
            )
        else:
            assert mine is theirs is None or torch.equal(mine, theirs)


#: How the C++ library calls itself and its tensors in files.
CPP_CLASS = "__torch__.torch.classes.graphbolt.FusedCSCSamplingGraph"
CPP_TENSORS = {
    "csc_indptr": "indptr",
    "indices": "indices",
    "node_type_offset": "node_type_offset",
    "type_per_edge": "type_per_edge",
}

LOADS = """
import sys
import dgl_mgpu, dgl.graphbolt as gb
graph = gb.load_from_shared_memory(sys.argv[1])
graph.edge_attributes["weight"][:] = 3
"""


@pytest.mark.parametrize("with_types", [False, True])
def test_a_graph_in_shared_memory_is_there_as_long_as_its_maker(with_types, monkeypatch):
    name = f"test_{os.getpid()}_{uuid.uuid4().hex}"
    graph = random_graph(with_types=with_types, weight=torch.rand(600).to(torch.bfloat16))
    shared = graph.copy_to_shared_memory(name)
    assert_same(shared, graph)
    done = subprocess.run([sys.executable, "-c", LOADS, name], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert (shared.edge_attributes["weight"] == 3).all()
    apart = pickle.loads(pickle.dumps(shared))
    with monkeypatch.context() as patched:
        patched.setattr(graph_module, "get_spawning_popen", lambda: "a process")
        copy = pickle.loads(pickle.dumps(shared))
    copy.edge_attributes["weight"][:] = 4
    assert (shared.edge_attributes["weight"] == 4).all()
    assert (apart.edge_attributes["weight"] == 3).all()
    with pytest.raises(InvalidInputError, match="is there already"):
        graph.copy_to_shared_memory(name)
    del copy
    assert (SHARED_MEMORY / f"{name}.graphbolt").exists()
    del shared
    gc.collect()
    assert not (SHARED_MEMORY / f"{name}.graphbolt").exists()
    with pytest.raises(InvalidInputError, match="there is no"):
        gb.load_from_shared_memory(name)


@pytest.mark.parametrize("name", ["", "../out", "a/b"])
def test_a_name_that_is_none_is_an_error(name):
    with pytest.raises(InvalidInputError, match="no file name"):
        random_graph().copy_to_shared_memory(name)


def test_too_little_shared_memory_is_told(monkeypatch):
    small = SimpleNamespace(of_this_machine=lambda: SharedMemory(room=100, ram=1 << 40))
    monkeypatch.setattr(shared_memory, "SharedMemory", small)
    with pytest.raises(SharedMemoryError, match="room for 100 B; enlarge"):
        random_graph().copy_to_shared_memory("never")
    assert not (SHARED_MEMORY / "never.graphbolt").exists()


@pytest.mark.parametrize("with_types", [False, True])
def test_a_file_is_read_without_running_what_is_in_it(tmp_path, with_types):
    graph = random_graph(with_types=with_types)
    torch.save(graph, tmp_path / "graph.pt")
    assert_same(torch.load(tmp_path / "graph.pt", weights_only=True), graph)


def written_by_cpp(graph, monkeypatch, class_name=CPP_CLASS, version=6199):
    """The graph, which pickles as one of GraphBolt's C++ library."""
    tensors = {"version_number": torch.tensor([version])}
    for part, name in CPP_TENSORS.items():
        if getattr(graph, part) is not None:
            tensors[name] = getattr(graph, part)
    state = {"independent_tensors": tensors}
    for name in ("node_type_to_id", "edge_type_to_id", "node_attributes", "edge_attributes"):
        values = getattr(graph, name)
        if values is not None:
            state[name] = {key: torch.as_tensor(value) for key, value in values.items()}
    kind = type("ScriptObject", (), {"__getstate__": lambda self: (state, class_name)})
    kind.__module__ = "torch"
    monkeypatch.setattr(torch, "ScriptObject", kind)
    written = copy.copy(graph)
    written._c_csc_graph = kind()
    return written


@pytest.mark.parametrize("with_types", [False, True])
@pytest.mark.parametrize("by_default", [True, False])
def test_a_data_set_of_dgls_is_read(tmp_path, monkeypatch, with_types, by_default):
    graph = random_graph(with_types=with_types)
    (tmp_path / "preprocessed").mkdir()
    with monkeypatch.context() as patched:
        torch.save(written_by_cpp(graph, patched), tmp_path / "preprocessed" / "graph.pt")
    topology = "{type: FusedCSCSamplingGraph, path: preprocessed/graph.pt}"
    (tmp_path / "preprocessed" / "metadata.yaml").write_text(f"graph_topology: {topology}\n")
    if not by_default:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    found = gb.OnDiskDataset(str(tmp_path), force_preprocess=False).load().graph
    assert_same(found, graph)
    assert type(found._c_csc_graph) is graph_module.FusedCSCSamplingGraph
    torch.save(found, tmp_path / "again.pt")
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True), graph)


@pytest.mark.parametrize(
    "wrong, message",
    [({"class_name": "some.Other"}, "its class is some.Other"), ({"version": 1}, "version is .1.")],
)
def test_another_object_of_cpp_is_an_error(tmp_path, monkeypatch, wrong, message):
    with monkeypatch.context() as patched:
        torch.save(written_by_cpp(random_graph(), patched, **wrong), tmp_path / "graph.pt")
    with pytest.raises(InvalidInputError, match=message):
        torch.load(tmp_path / "graph.pt", weights_only=True)


def test_what_was_made_of_a_part_is_forgotten_with_it():
    graph, nodes = random_graph(), torch.arange(60)
    graph.sample_neighbors(nodes, torch.tensor([2]))
    graph.indices = graph.indices.flip(0)
    found = graph.in_subgraph(nodes).sampled_csc
    assert torch.equal(found.indices, graph.indices)


def test_partitions_are_graphbolts_if_they_are_asked_to_be(tmp_path):
    g = dgl.rand_graph(20, 60)
    for use_graphbolt in (False, True):
        folder = tmp_path / str(use_graphbolt)
        dgl.distributed.partition_graph(
            g, "small", 1, str(folder), part_method="random", use_graphbolt=use_graphbolt
        )
        partition = dgl.distributed.load_partition(
            str(folder / "small.json"), 0, use_graphbolt=use_graphbolt
        )[0]
        assert isinstance(partition, gb.FusedCSCSamplingGraph) == use_graphbolt
        assert (partition.total_num_edges if use_graphbolt else partition.num_edges()) == 60


# -- datapipes -------------------------------------------------------------------------------------


def test_a_prefetcher_hands_out_what_it_is_given_in_order():
    pipe = IterableWrapper(range(50)).prefetch(3)
    assert type(pipe) is Prefetcher
    assert [*pipe] == [*pipe] == [*range(50)]
    assert [*IterableWrapper("abc").enumerate(2)] == [(2, "a"), (3, "b"), (4, "c")]


def test_a_prefetcher_makes_no_more_than_its_buffer_holds():
    made = []
    elements = iter(IterableWrapper(range(50)).map(lambda it: made.append(it) or it).prefetch(3))
    assert next(elements) == 0
    deadline = time.monotonic() + 20
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(made) == 4
    del elements
    gc.collect()
    assert not [it for it in threading.enumerate() if "make" in it.name]


def test_an_error_is_raised_where_the_element_is_due():
    def failing(number):
        if number == 3:
            raise KeyError("mine")
        return number

    elements = iter(IterableWrapper(range(9)).map(failing).prefetch(2))
    assert [next(elements) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="mine"):
        next(elements)


@pytest.mark.parametrize("size", [0, -1])
def test_a_prefetcher_without_a_buffer_is_an_error(size):
    with pytest.raises(ValueError, match="positive integer"):
        IterableWrapper([1]).prefetch(size)


class Pair(IterDataPipe):
    def __init__(self, *sources):
        self.sources = sources

    def __iter__(self):
        yield from zip(*self.sources, strict=True)


def test_datapipes_are_found_and_replaced():
    sources = IterableWrapper([1, 2, 3]), IterableWrapper([1, 2, 3])
    once, twice = sources[0].map(lambda it: it + 1), sources[1].map(lambda it: it * 2)
    pair = Pair(once, twice)
    graph = pipe_graphs.traverse_dps(pair)
    assert pipe_graphs.find_dps(graph, Mapper) == [once, twice]
    assert pipe_graphs.find_dps(graph, IterableWrapper) == [*sources]
    same = pipe_graphs.traverse_dps(Pair(once, once))
    assert pipe_graphs.find_dps(same, Mapper) == [once]
    graph = pipe_graphs.replace_dp(graph, twice, twice.map(str))
    assert [*pair] == [(2, "2"), (3, "4"), (4, "6")]
    assert len(pipe_graphs.find_dps(graph, Mapper)) == 3
    ((_, (last, _)),) = pipe_graphs.replace_dp(graph, pair, pair.map(len)).items()
    assert [*last] == [2, 2, 2]
