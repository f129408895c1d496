"""DGL without its binary: what it computes beside DGL's C++, and where it is chosen."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

from dgl_mgpu.dgl.capi.table import ENTRIES, WITHOUT_LIBRARY
from tests.environment import search_path

#: What both sides compute, on graphs that both make; no result depends on random numbers.
COMPUTED = """
import sys
import dgl_mgpu, dgl, torch
import dgl.function as fn

def computed():
    random = torch.Generator().manual_seed(1)
    draw = lambda high, size: torch.randint(high, (size,), generator=random)
    g = dgl.graph((draw(50, 300), draw(50, 300)))
    h = dgl.heterograph({
        ("a", "r", "b"): (draw(20, 60), draw(30, 60)),
        ("b", "s", "a"): (draw(30, 40), draw(20, 40)),
        ("a", "t", "a"): (draw(20, 50), draw(20, 50)),
    }, {"a": 20, "b": 30})
    g.ndata["x"] = torch.rand(50, 6, generator=random, dtype=torch.float64)
    g.edata["w"] = torch.rand(300, 1, generator=random, dtype=torch.float64)
    found = {"metagraph": sorted(h.metagraph().edges(keys=True)), "multigraph": g.is_multigraph}
    for reduce in (fn.sum, fn.mean, fn.max, fn.min):
        for name, message in {"copy": fn.copy_u("x", "m"), "mul": fn.u_mul_e("x", "w", "m"),
                              "sub": fn.u_sub_e("x", "w", "m")}.items():
            g.update_all(message, reduce("m", "y"))
            found[f"{name} {reduce.__name__}"] = g.ndata.pop("y")
    for name, op in {"dot": fn.u_dot_v("x", "x", "y"), "add": fn.u_add_v("x", "x", "y")}.items():
        g.apply_edges(op)
        found[name] = g.edata.pop("y")
    found["softmax"] = dgl.ops.edge_softmax(g, g.edata["w"])
    x = g.ndata["x"].clone().requires_grad_()
    (dgl.ops.u_mul_e_max(g, x, g.edata["w"]) ** 2).sum().backward()
    found["gradient"] = x.grad
    found["batch"] = dgl.unbatch(dgl.batch([h, h, h]))[1].edges(etype="r")
    found["slice"] = dgl.slice_batch(dgl.batch([h, h]), 1).edges(etype="s")
    found["flat"] = h["a", :, "a"].edges(form="all", order="eid")
    block = dgl.to_block(dgl.in_subgraph(g, [3, 4]), [3, 4])
    found["block"] = [block.dstdata[dgl.NID], block.srcdata[dgl.NID].sort().values]
    simple = dgl.to_simple(dgl.add_self_loop(dgl.remove_self_loop(dgl.graph(g.edges()))))
    found["simple"] = simple.edges(order="srcdst")
    found["bfs"] = [len(nodes) for nodes in dgl.bfs_nodes_generator(g, [0, 7])]
    # Edges of a node are visited in the order of its CSR, which for both is that of their ids.
    found["bfs edges"] = dgl.bfs_edges_generator(g, 0)
    found["dfs"] = dgl.dfs_edges_generator(g, [0, 9])
    found["dfs labels"] = dgl.dfs_labeled_edges_generator(
        g, 3, has_reverse_edge=True, has_nontree_edge=True)
    tree = dgl.graph(([0, 0, 1, 3], [1, 2, 3, 4]))
    found["topological"] = [sorted(n.tolist()) for n in dgl.topological_nodes_generator(tree)]
    found["reordered"] = dgl.reorder_graph(
        simple, "custom", permute_config={"nodes_perm": list(range(49, -1, -1))}).edges()
    parts, nids, eids = dgl.partition_graph_with_halo(g, torch.arange(50) % 3, 1, reshuffle=True)
    found["partition"] = [
        (sorted(p.ndata["orig_id"].tolist()), sorted(p.edata["orig_id"].tolist()),
         int(p.ndata["inner_node"].sum()), int(p.edata["inner_edge"].sum()))
        for p in parts.values()]
    found["knn"] = [end.sort().values for end in dgl.knn_graph(g.ndata["x"], 3).edges()]
    found["degrees"] = [h.in_degrees(etype="r"), h.out_degrees(etype="s")]
    found["between"] = [g.has_edges_between([0, 1], [1, 2]), g.edge_ids(*g.find_edges([5])) >= 0]
    return g, h, found

g, h, found = computed()
"""
WRITES = (
    COMPUTED
    + """
import pickle
dgl.save_graphs("graphs.bin", [g, h], {"labels": torch.arange(2)})
dgl.save_graphs("formats.bin", [h], formats=["csr", "csc"])
dgl.data.save_tensors("tensors.bin", {"x": g.ndata["x"]})
pickle.dump(h, open("graph.pickle", "wb"))
torch.save(found, "found.pt")
"""
)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.allclose(found, expected, equal_nan=True)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def same_graphs(found: dgl.DGLGraph, expected: dgl.DGLGraph) -> bool:
    return found.canonical_etypes == expected.canonical_etypes and all(
        same(found.edges(etype=etype, order="eid"), expected.edges(etype=etype, order="eid"))
        for etype in expected.canonical_etypes
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter in the test's folder, by default without the binary."""

    def run_code(code: str, choice: str = "off") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"DGL_MGPU_LIBDGL": choice, "PYTHONPATH": search_path()}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    return run_code


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What DGL's C++ computes of the same."""
    names: dict[str, Any] = {}
    exec(COMPUTED, names)
    return names


def test_results_are_those_of_dgls_binary(run, expected, tmp_path):
    done = run(WRITES)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    wrong = [name for name, value in expected["found"].items() if not same(found[name], value)]
    assert not wrong, [(found[name], expected["found"][name]) for name in wrong]


def test_files_are_those_of_dgls_binary(run, expected, tmp_path):
    assert run(WRITES).returncode == 0
    graphs, labels = dgl.load_graphs(str(tmp_path / "graphs.bin"))
    assert all(map(same_graphs, graphs, (expected["g"], expected["h"])))
    assert torch.equal(graphs[0].ndata["x"], expected["g"].ndata["x"])
    assert labels["labels"].tolist() == [0, 1]
    (formats,), _ = dgl.load_graphs(str(tmp_path / "formats.bin"))
    assert same_graphs(formats, expected["h"])
    tensors = dgl.data.load_tensors(str(tmp_path / "tensors.bin"))
    assert torch.equal(tensors["x"], expected["g"].ndata["x"])


READS = """
import pickle
import dgl_mgpu, dgl, torch
(g, h), labels = dgl.load_graphs("graphs.bin")
(again,), _ = dgl.load_graphs("graphs.bin", [1])
(formats,), _ = dgl.load_graphs("formats.bin")
pickled = pickle.load(open("graph.pickle", "rb"))
for other in (again, formats, pickled):
    for etype in h.canonical_etypes:
        assert all(map(torch.equal, other.edges(etype=etype, order="eid"),
                       h.edges(etype=etype, order="eid")))
print(g.edges(order="eid")[0].tolist(), g.ndata["x"].sum().item(), labels["labels"].tolist(),
      dgl.data.load_tensors("tensors.bin")["x"].dtype)
for bad in ("tensors.bin", "cut.bin"):
    try:
        dgl.load_graphs(bad)
    except dgl.DGLError as error:
        print("refused", "cannot read" in str(error))
"""


def test_files_and_pickles_of_dgls_binary_are_read(run, expected, tmp_path):
    g, h = expected["g"], expected["h"]
    dgl.save_graphs(str(tmp_path / "graphs.bin"), [g, h], {"labels": torch.arange(2)})
    dgl.save_graphs(str(tmp_path / "formats.bin"), [h], formats=["csr", "csc"])
    dgl.data.save_tensors(str(tmp_path / "tensors.bin"), {"x": g.ndata["x"]})
    (tmp_path / "graph.pickle").write_bytes(pickle.dumps(h))
    whole = (tmp_path / "graphs.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:5000])
    done = run(READS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        f"{g.edges(order='eid')[0].tolist()} {g.ndata['x'].sum().item()} [0, 1] torch.float64"
    )
    assert lines[1:] == ["refused True", "refused True"]


WHAT_IS_NOT_THERE = """
import dgl_mgpu, dgl
from dgl_mgpu.errors import UnavailableError
from dgl.distributed import rpc
try:
    rpc.create_sender(1)
except UnavailableError as error:
    print(error)
g = dgl.graph(([0], [1]))
for call in (lambda: g.in_edges([5]), lambda: dgl.graph(([0], [-1]))):
    try:
        call()
    except dgl.DGLError as error:
        print("refused")
"""


def test_what_only_the_binary_has_raises_when_it_is_called(run):
    done = run(WHAT_IS_NOT_THERE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "_CAPI_DGLRPCCreateSender: it is a function of DGL's" in lines[0]
    assert lines[-2:] == ["refused", "refused"]


STANDALONE = """
import dgl_mgpu, dgl, torch
from dgl.distributed import DistGraph, DistTensor, node_split, rpc
dgl.distributed.initialize("")
g = DistGraph("g", part_config="parts/g.json")
book = g.get_partition_book()
print(g.ntypes, g.rank(), rpc.get_num_client(), rpc.incr_msg_seq(), rpc.get_msg_seq())
print([ids.tolist() for ids in book.map_to_per_ntype(torch.arange(0, 35, 4))])
print(g.nodes["b"].data["x"][torch.tensor([3, 1])].flatten().tolist())
print(node_split(torch.arange(15) < 9, book, ntype="b").tolist())
kept = DistTensor((15, 1), torch.float32, "kept", init_func=lambda shape, dtype: torch.zeros(shape))
kept[torch.tensor([2])] = torch.ones(1, 1)
print(kept[torch.arange(4)].flatten().tolist())
sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
for inputs, outputs, blocks in dgl.dataloading.DistNodeDataLoader(
    g, {"b": torch.arange(15)}, sampler, batch_size=6
):
    print(outputs["b"].tolist(), sorted(inputs["a"].tolist()), blocks[-1].num_edges("to"))
try:
    book.map_to_per_ntype(torch.tensor([35]))
except dgl.DGLError:
    print("refused")
dgl.distributed.exit_client()
"""


def test_distributed_graphs_in_one_process(run, tmp_path):
    """The standalone mode of `dgl.distributed`, which has no servers."""
    generator = torch.Generator().manual_seed(0)
    ends = {
        (u, etype, v): (
            torch.randint(counts[0], (60,), generator=generator),
            torch.randint(counts[1], (60,), generator=generator),
        )
        for u, etype, v, counts in (("a", "to", "b", (20, 15)), ("b", "back", "a", (15, 20)))
    }
    g = dgl.heterograph(ends, {"a": 20, "b": 15})
    g.nodes["b"].data["x"] = torch.arange(15.0)
    dgl.distributed.partition_graph(g, "g", 1, str(tmp_path / "parts"))
    with_binary, without = run(STANDALONE, "auto"), run(STANDALONE)
    assert without.returncode == 0, without.stderr
    lines = without.stdout.splitlines()
    assert lines[1] == "['a', 'b'] 0 1 0 1" and "refused" in lines
    assert lines == with_binary.stdout.splitlines()


SHARED = """
import dgl_mgpu, dgl, os, multiprocessing as mp

def child(name):
    g = dgl.hetero_from_shared_memory(name)
    print(g.edges()[1].tolist(), flush=True)

if __name__ == "__main__":
    name = f"dgl_mgpu_test_{os.getpid()}"
    kept = dgl.graph(([0, 1], [1, 2])).shared_memory(name)
    process = mp.get_context("fork").Process(target=child, args=(name,))
    process.start()
    process.join()
    again = dgl.hetero_from_shared_memory(name)
    print(again.edges()[0].tolist())
    del kept, again
    print([file for file in os.listdir("/dev/shm") if name in file])
    try:
        dgl.hetero_from_shared_memory(name)
    except dgl.DGLError:
        print("gone")
"""


def test_graphs_in_shared_memory_go_with_those_who_made_them(run):
    done = run(SHARED)
    assert done.stdout.splitlines() == ["[1, 2]", "[0, 1]", "[]", "gone"], done.stderr


def test_a_folder_of_dgls_python_files_alone_is_enough(tmp_path, monkeypatch):
    """As on a system for which there is no binary; one line says so."""
    folder = Path(dgl.__file__).parent
    shutil.copytree(
        folder, tmp_path / "dgl", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.pyd")
    )
    for metadata in folder.parent.glob("dgl-*.dist-info"):
        shutil.copytree(metadata, tmp_path / metadata.name)
    program = (
        "import dgl_mgpu, dgl; print(dgl.__file__); g = dgl.rand_graph(10, 20);"
        " print(g.num_edges(), dgl.sampling.sample_neighbors(g, [1], 0).num_edges())"
    )
    monkeypatch.setenv("PYTHONPATH", search_path(tmp_path))
    monkeypatch.delenv("DGL_MGPU_LIBDGL", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == [str(tmp_path / "dgl" / "__init__.py"), "20 0"]
    warnings = [line for line in done.stderr.splitlines() if "operators alone" in line]
    assert len(warnings) == 1 and "no libdgl" in warnings[0]


def test_the_variable_has_two_values(run):
    done = run("import dgl_mgpu, dgl", "of")
    assert "cannot use DGL_MGPU_LIBDGL=of: it is 'auto' or 'off'" in done.stderr


def test_functions_without_the_binary_are_in_the_table():
    from importlib import import_module
    from operator import attrgetter

    named = {name for name in WITHOUT_LIBRARY if "._CAPI_" in name}
    assert named <= ENTRIES.keys()
    for name in named:
        module, _, function = WITHOUT_LIBRARY[name].partition(":")
        assert callable(attrgetter(function)(import_module(f"dgl_mgpu.{module}"))), name
