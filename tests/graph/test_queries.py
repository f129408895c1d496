"""What a graph is asked for, and how it is handed on: matrices, formats, files, processes."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path

import dgl_mgpu  # noqa: F401  # isort: skip  # a process that is spawned imports this module

import dgl
import pytest
import torch
from dgl.data.tensor_serialize import load_tensors, save_tensors

from dgl_mgpu.graph.index import TensorIndex
from tests.graph.scenarios import (
    GRAPHS,
    HOMOGENEOUS,
    WITH_EDGES,
    Scenarios,
    Where,
    assert_same,
    facts,
    graphs_at,
    run_on_kind,
)

scenarios = Scenarios()


@scenarios.on("homogeneous", "bipartite", "heterogeneous", "edgeless")
def edges(where, g):
    found = []
    for src, name, dst in g.canonical_etypes:
        etype = src, name, dst
        nodes = where.ids(*range(g.num_nodes(dst)))
        found += [
            g.edges(form, order, etype) for form in ("uv", "eid", "all") for order in ("eid", None)
        ]
        found += [
            g.edges("uv", "srcdst", etype),
            g.in_edges(nodes.flip(0), "all", etype),
            g.in_edges(0, "eid", etype),
            g.out_edges(where.ids(2, 0, 2), "uv", etype),
            g.out_edges([1], "all", etype),
            g.in_degrees(etype=etype),
            g.out_degrees([0, 2, 0], etype=etype),
            g.in_degrees(1, etype),
        ]
    return found


@scenarios.on("homogeneous", "simple", "bipartite")
def lookups(where, g):
    src, dst = g.edges()
    other = dst.flip(0) % g.num_nodes(g.srctypes[0])
    return [
        g.has_nodes(where.ids(0, 3, 99), g.ntypes[0]),
        g.has_edges_between(src, dst),
        g.has_edges_between(src[:6], dst[-6:]),
        g.has_edges_between(0, dst[:5]),
        g.edge_ids(src[:1], dst[:1], return_uv=True)[:2],
        [sorted(ids.tolist()) for ids in g.edge_ids(src[4:5], dst[4:5], return_uv=True)[2:]],
        g.find_edges(where.ids(5, 0, 5)),
        g.find_edges(3),
        [sorted(g.predecessors(int(v)).tolist()) for v in dst[:4]],
        [sorted(g.successors(int(u)).tolist()) for u in other[:4]],
    ]


@scenarios.on("homogeneous", "simple", "bipartite", "heterogeneous", "edgeless")
def kinds(where, g):
    return [g.is_multigraph, g.is_unibipartite, g.is_homogeneous, g.idtype, g.num_edges()]


@scenarios.on("homogeneous", "bipartite", "heterogeneous", "edgeless")
def matrices(where, g):
    return [
        g.adj_external(transpose, g.device, fmt, etype=etype)
        for etype in g.canonical_etypes
        for transpose in (False, True)
        for fmt in (None, "coo", "csr")
    ]


@scenarios.on("homogeneous", "bipartite", "heterogeneous")
def tensors_of_matrices(where, g):
    found = []
    for etype in g.canonical_etypes:
        found.append(g.adj_tensors("coo", etype=etype))
        for fmt in ("csr", "csc"):
            indptr, _, eids = g.adj_tensors(fmt, etype=etype)
            found += [indptr, eids.sort().values]
    return found


@scenarios.on(*WITH_EDGES)
def incidence(where, g):
    return [g.inc(kind, ctx=g.device).to_dense() for kind in ("in", "out", "both")]


@scenarios.on("bipartite")
def incidence_of_bipartite(where, g):
    return [g.inc(kind, ctx=g.device).to_dense() for kind in ("in", "out")]


@scenarios.on("homogeneous", "bipartite", "heterogeneous")
def formats(where, g):
    found = []
    for asked in ("coo", "csr", "csc", ["csr", "csc"]):
        kept = g.formats(asked)
        found += [kept.formats(), g.formats()]
        kept.create_formats_()
        found.append(kept.formats())
    return found


@scenarios.on(*HOMOGENEOUS)
def networkx(where, g):
    if g.num_nodes() == 0:
        return []
    there = dgl.to_networkx(g.cpu(), node_attrs=["n"], edge_attrs=["n"])
    back = (
        dgl.from_networkx(
            there,
            node_attrs=["n"],
            edge_attrs=["n"],
            edge_id_attr_name="id",
            idtype=where.idtype,
            device=where.device,
        )
        if g.num_edges()
        else dgl.from_networkx(there, idtype=where.idtype, device=where.device)
    )
    return [sorted(there.nodes(data="n")), sorted(there.edges(data="id")), back]


@scenarios.on(*WITH_EDGES)
def scipy(where, g):
    back = dgl.from_scipy(g.adj_external(scipy_fmt="coo"), idtype=where.idtype, device=where.device)
    return back


@scenarios.on("bipartite")
def bipartite_from_matrices(where, g):
    matrix = g.adj_external(scipy_fmt="csr")
    return dgl.bipartite_from_scipy(matrix, "a", "e", "b", idtype=where.idtype, device=where.device)


@scenarios.on(*GRAPHS)
def files(where, g):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "graphs.bin")
        dgl.save_graphs(path, [g, g], {"label": where.tensor([1, 2])})
        graphs, labels = dgl.load_graphs(path)
        return [graphs, labels]


@scenarios.on("homogeneous")
def files_of_tensors(where, g):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "tensors")
        save_tensors(path, dict(g.ndata))
        return load_tensors(path)


@scenarios.on("simple")
def reorder_nodes(where, g):
    if where.device != "cpu":
        pytest.skip("DGL gives a graph on a GPU features that are on the CPU, and refuses them")
    return dgl.partition.reorder_nodes(g.long(), torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))


@scenarios.on(*GRAPHS)
def pickled(where, g):
    g.create_formats_()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.pt"
        torch.save({"graph": g}, path)
        loaded = torch.load(path, weights_only=False)["graph"]
    return [pickle.loads(pickle.dumps(g)), copy.deepcopy(g), copy.copy(g), g.clone(), loaded]


@scenarios.on("homogeneous", "simple")
def traversals(where, g):
    return [
        list(dgl.bfs_nodes_generator(g, 0)),
        list(dgl.bfs_edges_generator(g, 0)),
        list(dgl.dfs_edges_generator(g, [0, 3])),
        list(dgl.dfs_labeled_edges_generator(g, 0, has_reverse_edge=True)),
    ]


@scenarios.on("simple")
def topological(where, g):
    g = dgl.graph((where.ids(0, 0, 1, 3), where.ids(1, 3, 2, 2)))
    return [
        list(dgl.topological_nodes_generator(g)),
        list(dgl.topological_nodes_generator(g, True)),
    ]


@scenarios.on("simple")
def propagation(where, g):
    import dgl.function as fn

    g.ndata["h"] = g.ndata["x"]
    dgl.prop_nodes_bfs(g, 0, fn.copy_u("h", "m"), fn.sum("m", "h"))
    return g.ndata["h"]


@scenarios.on("simple")
def metis_partition(where, g):
    assignment = dgl.metis_partition_assignment(g.long(), 2)
    return [assignment.device.type, len(assignment), sorted(set(assignment.tolist()))]


@scenarios.on(*GRAPHS)
def blocks_and_views(where, g):
    with g.local_scope():
        for ntype in g.ntypes:
            g.nodes[ntype].data["new"] = g.nodes[ntype].data["x"]
    return [g, str(g.metagraph().edges), g.is_multigraph, repr(g).replace(where.device, "")]


@scenarios.parametrize
def test_same_as_dgl(run, kind, place, idtype):
    run_on_kind(run, kind, place, idtype)


@pytest.mark.parametrize("kind", ["homogeneous", "heterogeneous"])
def test_a_pickle_keeps_formats_and_stays_made_of_tensors(kind):
    with graphs_at("tensors"):
        g = Where(torch.int64).graph(kind)
        g.create_formats_()
        back = pickle.loads(pickle.dumps(g))
        assert isinstance(back._graph, TensorIndex)
        assert back.formats() == g.formats()
        assert_same(facts(back), facts(g))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parts_of_a_graph_on_a_gpu_are_on_the_cpu():
    g = Where(torch.int64).graph("simple")
    assignment = g.ndata["n"] % 2
    expected = dgl.transforms.partition_graph_with_halo(g, assignment, 1)[0]
    found = dgl.transforms.partition_graph_with_halo(g.to("cuda"), assignment, 1)[0]
    assert_same(facts(found), facts(expected))


def _out_degrees(graphs, answers):
    with graphs_at("tensors"):
        g = graphs.get()
        answers.put((type(g._graph).__name__, g.out_degrees().tolist(), g.ndata["x"].tolist()))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_graphs_travel_to_other_processes(start):
    context = torch.multiprocessing.get_context(start)
    graphs, answers = context.Queue(), context.Queue()
    with graphs_at("tensors"):
        g = Where(torch.int64).graph("simple")
        other = context.Process(target=_out_degrees, args=(graphs, answers))
        other.start()
        graphs.put(g)
        found = answers.get()
        other.join()
        assert other.exitcode == 0
        assert found == ("TensorIndex", g.out_degrees().tolist(), g.ndata["x"].tolist())
