"""What a partitioned graph is, how it comes about, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.distributed.exchange.strategies import ExchangeStrategy
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.errors import (
    DGLMGPUError,
    InvalidInputError,
    RankFailedError,
    UnsupportedByPartitionError,
)
from dgl_mgpu.ops.spmm_remote import Pipeline
from tests.distributed.both import Both, random_rows, same
from tests.distributed.graphs import KINDS, heterogeneous, homogeneous
from tests.ranks import on_gpus_too

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def _equal(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Compare values, wherever they are."""
    assert torch.equal(found.cpu(), expected.cpu()), what


def _same_as_whole(pg: PartitionedGraph, g: dgl.DGLGraph) -> None:
    assert isinstance(pg, PartitionedGraph)
    assert pg.ntypes == g.ntypes and pg.canonical_etypes == g.canonical_etypes
    assert pg.idtype == g.idtype
    for ntype in g.ntypes:
        data = pg.nodes[ntype].data
        ids = data[dgl.NID].cpu()
        assert ids.dtype == g.idtype and len(ids) == pg.num_nodes(ntype)
        assert set(data) == {*g.nodes[ntype].data, dgl.NID}
        # All ranks' nodes together are all nodes, each once.
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, ids.tolist())
        assert sorted(itertools.chain(*everyone)) == list(range(g.num_nodes(ntype)))
        for key, rows in g.nodes[ntype].data.items():
            _equal(data[key], rows[ids.long()], (ntype, key))
            _equal(pg.gather(data[key], ntype), rows, (ntype, key))
    for etype in g.canonical_etypes:
        data = pg.edges[etype].data
        eids = data[dgl.EID].cpu()
        assert eids.dtype == g.idtype and len(eids) == pg.num_edges(etype)
        own = pg.nodes[etype[2]].data[dgl.NID].cpu()
        # Its edges are the in-edges of its nodes.
        assert sorted(eids.tolist()) == sorted(g.in_edges(own, form="eid", etype=etype).tolist())
        for key, rows in g.edges[etype].data.items():
            _equal(data[key], rows[eids.long()], (etype, key))
        sources = pg.nodes[etype[0]].data[dgl.NID].cpu()
        _equal(pg.in_degrees(etype=etype), g.in_degrees(own, etype=etype))
        _equal(pg.out_degrees(etype=etype), g.out_degrees(sources, etype=etype))


def _partitioned(kind: str, by: str, first_alone: bool, idtype: torch.dtype) -> None:
    g = homogeneous(kind)
    draw = torch.Generator().manual_seed(1)
    for dtype in _DTYPES:
        for shape in ((), (3,), (2, 0)):
            key = f"{dtype} {shape}"
            rows = torch.randint(0, 2, (g.num_nodes(), *shape), generator=draw)
            g.ndata[key] = rows.to(dtype)
            g.edata[key] = torch.randint(0, 2, (g.num_edges(), *shape), generator=draw).to(dtype)
    g = g.int() if idtype == torch.int32 else g
    given = g if not first_alone or dist.get_rank() == 0 else None
    strategy = torch.arange(g.num_nodes()) % dist.get_world_size() if by == "dealt" else by
    _same_as_whole(dgl_mgpu.partition_graph(given, by=strategy, seed=7), g)


@on_gpus_too
@pytest.mark.parametrize("first_alone", [False, True], ids=["all have it", "the first has it"])
@pytest.mark.parametrize(
    ("kind", "by"),
    [(kind, "random") for kind in KINDS if kind not in ("bipartite", "no sources")]
    + [("random", "order"), ("random", "metis"), ("random", "dealt")],
)
def test_parts_have_all_of_the_graph(ranks, kind, by, first_alone):
    idtype = torch.int32 if by == "order" else torch.int64
    ranks.run(_partitioned, kind, by, first_alone, idtype)


def _heterograph(by: str, first_alone: bool) -> None:
    g = heterogeneous()
    given = g if not first_alone or dist.get_rank() == 0 else None
    strategy = (
        {ntype: torch.arange(g.num_nodes(ntype)) % 2 for ntype in g.ntypes} if by == "dealt" else by
    )
    _same_as_whole(dgl_mgpu.partition_graph(given, by=strategy), g)


@on_gpus_too
@pytest.mark.parametrize("first_alone", [False, True], ids=["all have it", "the first has it"])
@pytest.mark.parametrize("by", ["random", "order", "metis", "dealt"])
def test_parts_of_a_heterograph(ranks, by, first_alone):
    ranks.run(_heterograph, by, first_alone)


def test_one_rank_has_all():
    g = dgl.add_self_loop(homogeneous())
    for exchange in ("halo", "broadcast"):
        both = Both(g, exchange=exchange)
        pg = both.pg
        _equal(pg.gather(pg.ndata["x"]), g.ndata["x"])
        model = dgl.nn.GATConv(5, 4, 2).double().eval()
        expected = both.own_nodes(model(g, g.ndata["x"]))
        same(model.to(pg.device)(pg, pg.ndata["x"]), expected)
        found = dgl.ops.u_mul_e_sum(pg, pg.ndata["x"], pg.edata["w"])
        same(found, both.own_nodes(dgl.ops.u_mul_e_sum(g, g.ndata["x"], g.edata["w"])))


def _the_same_again() -> None:
    g = homogeneous()
    first, again = (dgl_mgpu.partition_graph(g, seed=5) for _ in range(2))
    assert torch.equal(first.ndata[dgl.NID], again.ndata[dgl.NID])
    assert torch.equal(first.edata[dgl.EID], again.edata[dgl.EID])
    other = dgl_mgpu.partition_graph(g, seed=6)
    differ = [None] * dist.get_world_size()
    dist.all_gather_object(differ, first.ndata[dgl.NID].tolist() != other.ndata[dgl.NID].tolist())
    assert any(differ)


@on_gpus_too
def test_a_seed_says_which_node_goes_where(ranks):
    ranks.run(_the_same_again)


def _scopes() -> None:
    both = Both(homogeneous())
    g, pg = both.g, both.pg
    with pg.local_scope():
        pg.ndata["x"] = pg.ndata["x"] * 2
        pg.edata["new"] = pg.edata["w"]
        pg.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    _equal(pg.ndata["x"], both.own_nodes(g.ndata["x"]))
    assert "y" not in pg.ndata and "new" not in pg.edata
    local = pg.local_var()
    local.ndata["z"] = local.ndata["x"]
    assert "z" not in pg.ndata
    _equal(local.gather(local.ndata["z"]), g.ndata["x"])
    with pytest.raises(dgl.DGLError, match="number of nodes"):
        pg.ndata["bad"] = torch.ones(pg.num_nodes() + 1, device=pg.device)
    with pytest.raises(InvalidInputError, match="a row for each"):
        pg.gather(torch.ones(pg.num_nodes() + 1, device=pg.device))
    for derived in (dgl.reverse(pg), dgl.reverse(dgl.reverse(pg)), pg["_E"]):
        assert isinstance(derived, PartitionedGraph)
        assert derived.ownership.keys() == pg.ownership.keys()
        _equal(derived.gather(pg.ndata["x"]), g.ndata["x"])
        _equal(derived.scatter(g.ndata["x"]), pg.ndata["x"])
    moved = pg.to(pg.device)
    assert isinstance(moved, PartitionedGraph)
    _equal(moved.gather(moved.ndata["x"]), g.ndata["x"])
    assert pg.batch_size == 1
    for owned in pg.ownership.values():
        assert owned.order is None or owned.order.device.type == "cpu"
    assert pg.in_degrees(0) == pg.in_degrees()[0]
    assert pg.out_degrees([1, 0]).tolist() == pg.out_degrees()[[1, 0]].tolist()


@on_gpus_too
def test_scopes_and_queries(ranks):
    ranks.run(_scopes)


# -- what is refused ---------------------------------------------------------------------------


def _ids(pg: PartitionedGraph) -> torch.Tensor:
    return torch.tensor([0, 1], device=pg.device)


_REFUSED: dict[str, Callable[[PartitionedGraph], Any]] = {
    "other ids": lambda pg: pg.int(),
    "pickle": pickle.dumps,
    "deep copy": copy.deepcopy,
    "clone": lambda pg: pg.clone(),
    "save_graphs": lambda pg: dgl.save_graphs("graphs.bin", pg),
    "save_graphs of several": lambda pg: dgl.save_graphs("graphs.bin", [pg, pg]),
    "save_graphs of the reversed": lambda pg: dgl.save_graphs("graphs.bin", [dgl.reverse(pg)]),
    "pin_memory_": lambda pg: pg.pin_memory_(),
    "node_subgraph": lambda pg: pg.subgraph(_ids(pg)),
    "edge_subgraph": lambda pg: dgl.edge_subgraph(pg, _ids(pg)),
    "edges alone": lambda pg: dgl.edge_subgraph(pg, _ids(pg), relabel_nodes=False),
    "in_subgraph": lambda pg: dgl.in_subgraph(pg, _ids(pg)),
    "khop_graph": lambda pg: dgl.khop_graph(pg, 2),
    "khop_adj": lambda pg: dgl.khop_adj(pg, 2),
    "khop_in_subgraph of all nodes": lambda pg: dgl.khop_in_subgraph(pg, 0, 1, relabel_nodes=False),
    "khop_out_subgraph": lambda pg: dgl.khop_out_subgraph(pg, 0, 1),
    "add_edges": lambda pg: dgl.add_edges(pg, _ids(pg), _ids(pg)),
    "add_nodes": lambda pg: dgl.add_nodes(pg, 2),
    "remove_edges": lambda pg: dgl.remove_edges(pg, _ids(pg)),
    "add_edges in place": lambda pg: pg.add_edges(_ids(pg), _ids(pg)),
    "add_nodes in place": lambda pg: pg.add_nodes(2),
    "remove_nodes in place": lambda pg: pg.remove_nodes(_ids(pg)),
    "add_edges to the reversed graph": lambda pg: dgl.reverse(pg).add_edges(_ids(pg), _ids(pg)),
    "to_simple": dgl.to_simple,
    "to_bidirected": dgl.to_bidirected,
    "add_reverse_edges": dgl.add_reverse_edges,
    "line_graph": dgl.line_graph,
    "to_block": dgl.to_block,
    "compact_graphs": dgl.compact_graphs,
    "to_networkx": dgl.to_networkx,
    "merge": lambda pg: dgl.merge([pg, pg]),
    "batch": lambda pg: dgl.batch([pg, pg]),
    "formats": lambda pg: pg.formats("csc"),
    "edges": lambda pg: pg.edges(),
    "sorted edges": lambda pg: pg.edges(order="srcdst"),
    "find_edges": lambda pg: pg.find_edges(_ids(pg)),
    "has_edges_between": lambda pg: pg.has_edges_between(_ids(pg), _ids(pg)),
    "edge_ids": lambda pg: pg.edge_ids(0, 1),
    "successors": lambda pg: pg.successors(0),
    "out_edges": lambda pg: pg.out_edges(_ids(pg)),
    "multigraph": lambda pg: pg.is_multigraph,
    "adj": lambda pg: pg.adj(),
    "adj_external": lambda pg: pg.adj_external(scipy_fmt="csr"),
    "push": lambda pg: pg.push(_ids(pg), fn.copy_u("x", "m"), fn.sum("m", "y")),
    "send_and_recv": lambda pg: pg.send_and_recv(_ids(pg), fn.copy_u("x", "m"), fn.sum("m", "y")),
    "pull": lambda pg: pg.pull(_ids(pg), fn.copy_u("x", "m"), fn.sum("m", "x")),
    "in_edges": lambda pg: pg.in_edges(_ids(pg)),
    "predecessors": lambda pg: pg.predecessors(0),
    "another device": lambda pg: pg.to("meta"),
    "another device of the reversed": lambda pg: dgl.reverse(pg).to("meta"),
    "softmax over some edges": lambda pg: dgl.ops.edge_softmax(pg, pg.edata["w"][:2], _ids(pg)),
    "the ends of edges": lambda pg: pg.apply_edges(lambda edges: {"y": edges.edges()[0]}),
    "numbers of nodes in a batch": lambda pg: pg.batch_num_nodes(),
    "numbers of edges in a batch": lambda pg: pg.batch_num_edges(),
    "another readout": lambda pg: dgl.readout_nodes(pg, "x", op="median"),
    "a readout of ids": lambda pg: dgl.max_nodes(pg, dgl.NID),
    "DropNode": lambda pg: dgl.transforms.DropNode()(pg),
    "a built-in function of some edges": lambda pg: pg.apply_edges(
        fn.u_add_v("x", "x", "y"), _ids(pg)
    ),
    "sample_neighbors": lambda pg: dgl.sampling.sample_neighbors(pg, _ids(pg), 2),
    "random_walk": lambda pg: dgl.sampling.random_walk(pg, _ids(pg), length=2),
    "NeighborSampler": lambda pg: dgl.dataloading.NeighborSampler([2]).sample(pg, _ids(pg)),
    "DataLoader": lambda pg: next(
        iter(dgl.dataloading.DataLoader(pg, _ids(pg), dgl.dataloading.NeighborSampler([2])))
    ),
    "the largest eigenvalue": dgl.laplacian_lambda_max,
}


def _refusals() -> list[str]:
    missed = []
    g = homogeneous()
    for name, call in _REFUSED.items():
        pg = dgl_mgpu.partition_graph(g)
        if name in ("to_networkx", "pin_memory_") and pg.device.type == "cuda":
            continue  # what DGL itself refuses of any graph on a GPU
        try:
            call(pg)
        except UnsupportedByPartitionError as error:
            assert error.found and error.fix
        except Exception as error:
            missed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            missed.append(f"{name}: nothing raised")
    return missed


@on_gpus_too
def test_what_a_part_cannot_do_has_a_typed_error(ranks):
    assert ranks.run(_refusals) == [[]] * ranks.size


def _features_that_require_gradients(first_alone: bool) -> None:
    g = homogeneous()
    g.ndata["x"].requires_grad_()
    g.edata["w"].requires_grad_()
    pg = dgl_mgpu.partition_graph(g if dist.get_rank() == 0 or not first_alone else None)
    layer = torch.nn.Linear(5, 4).double().to(pg.device)
    for _ in range(2):  # nothing of the first step is kept
        sums = dgl.ops.u_mul_e_sum(pg, pg.ndata["x"], pg.edata["w"])
        layer(sums).sum().backward()
    for rows in (pg.ndata["x"], pg.edata["w"]):
        assert rows.is_leaf and rows.requires_grad and rows.grad is not None
    assert g.ndata["x"].grad is None and not pg.scatter(g.ndata["x"]).requires_grad


@on_gpus_too
@pytest.mark.parametrize("first_alone", [False, True])
def test_features_that_require_gradients_are_leaves_on_every_rank(ranks, first_alone):
    ranks.run(_features_that_require_gradients, first_alone)


def _weights_changed_in_place() -> None:
    g = homogeneous()
    pg = dgl_mgpu.partition_graph(g)
    x, w = pg.ndata["x"].requires_grad_(), pg.edata["w"]
    total = dgl.ops.u_mul_e_sum(pg, x, w).sum()
    w.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@on_gpus_too
def test_weights_that_change_before_the_backward_pass_are_noticed(ranks):
    ranks.run(_weights_changed_in_place)


def _small_graphs_by_metis() -> None:
    for make in (
        lambda: dgl.graph((torch.zeros(4, dtype=torch.int64),) * 2, num_nodes=1),
        lambda: dgl.graph(([], []), num_nodes=0),
        lambda: dgl.graph(([], []), num_nodes=7),
        lambda: dgl.graph(([0, 1], [1, 0])),
        lambda: homogeneous().int(),
        lambda: heterogeneous().int(),
    ):
        for _ in range(2):
            g = make()
            _same_as_whole(dgl_mgpu.partition_graph(g, by="metis"), g)


@on_gpus_too
def test_metis_on_hardly_any_nodes_and_on_short_ids(ranks):
    ranks.run(_small_graphs_by_metis)


def _many_parallel_edges_by_metis() -> None:
    ends = torch.randint(300, (2, 200_000), generator=torch.Generator().manual_seed(0))
    g = dgl.graph(tuple(ends), num_nodes=300)
    part = dgl_mgpu.partition_graph(g, by="metis")
    assert part.num_nodes() < 200  # of two ranks or more
    _same_as_whole(part, g)


def test_metis_on_parallel_edges(ranks):
    ranks.run(_many_parallel_edges_by_metis)


def _by_array() -> None:
    g = homogeneous()
    ranks = np.arange(g.num_nodes()) % dist.get_world_size()
    pg = dgl_mgpu.partition_graph(g, by=ranks, seed=np.int64(3))
    _same_as_whole(pg, g)
    assert (ranks[pg.ndata[dgl.NID].cpu()] == dist.get_rank()).all()


@on_gpus_too
def test_an_array_gives_the_rank_of_every_node(ranks):
    ranks.run(_by_array)


def _bad_arguments() -> list[str]:
    g, rank, size = homogeneous(), dist.get_rank(), dist.get_world_size()
    count = g.num_nodes()
    other = homogeneous("skewed")
    fewer = homogeneous()
    del fewer.ndata["x"]
    turned = dgl.reverse(g, copy_ndata=True, copy_edata=True)
    reordered = dgl.graph(tuple(end.flip(0) for end in g.edges()), num_nodes=count)
    reordered.ndata.update(g.ndata)
    reordered.edata.update(g.edata)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "by": (g, {"by": "chance"}),
        "exchange": (g, {"exchange": "post"}),
        "rank too high": (g, {"by": torch.full((count,), size)}),
        "negative rank": (g, {"by": torch.full((count,), -1)}),
        "too few": (g, {"by": torch.zeros(count - 1, dtype=torch.int64)}),
        "no integers": (g, {"by": torch.zeros(count)}),
        "missing type": (g, {"by": {"user": torch.zeros(count, dtype=torch.int64)}}),
        "no graph": (None, {}),
        "no graph on the first": (None if rank == 0 else g, {}),
        "another graph": (g if rank else other, {}),
        "other features": (g if rank else fewer, {}),
        "other ids": (g if rank else g.int(), {}),
        "other edges": (g if rank else turned, {}),
        "edges in another order": (g if rank != 1 else reordered, {}),
        "no graph at all": ("graph", {}),
        "a part": (dgl_mgpu.partition_graph(g), {}),
        "no tensor": (g, {"by": [0] * count}),
        "a file's name on one rank": ("graph" if rank == 1 else g, {}),
        "by on one rank": (g, {"by": "chance" if rank == 1 else "random"}),
        "exchange on one rank": (g, {"exchange": "post" if rank == 1 else "halo"}),
        "different by": (g, {"by": "order" if rank == 1 else "random"}),
        "different exchange": (g, {"exchange": "broadcast" if rank == 1 else "halo"}),
        "different seeds": (g, {"seed": rank}),
        "different assignments": (g, {"by": (torch.arange(count) + rank) % size}),
        "assignments with the same sum": (
            dgl.graph(([0, 1], [1, 2])),
            {"by": torch.tensor([1, 1, 0] if rank == 0 else [0, 0, 1])},
        ),
        "seed": (g, {"seed": None}),
        "a seed that is no integer": (g, {"seed": 1.5}),
        "a seed by name": (g, {"seed": "a"}),
        "a device by another name": (g, {"device": "foo"}),
        "a device that holds nothing": (g, {"device": "meta"}),
        "a device that is not there": (g, {"device": "cuda:99" if rank == 1 else "cpu"}),
        "an array of words": (g, {"by": np.array(["a"] * count)}),
        "an array of words on one rank": (
            g,
            {"by": np.array(["a"] * count) if rank == 1 else np.zeros(count, np.int64)},
        ),
        "a name by type": (g, {"by": {"_N": "random"}}),
        "another type, too": (
            g,
            {"by": dict.fromkeys(("_N", "user"), torch.zeros(count, dtype=torch.int64))},
        ),
        "nothing": (g, {"by": None}),
        "no chunks": (g, {"exchange": "halo in 0"}),
        "partitions that are too large": (g, {"exchange": "remote reads, ps=64 dist=1 wpb=1"}),
        "an exchange that is no name": (g, {"exchange": 3}),
        "an array of other ranks": (g, {"by": np.full(count, size)}),
        "bad assignment on one rank": (g, {"by": torch.full((count,), size * (rank == 1))}),
    }
    missed = []
    for name, (graph, options) in cases.items():
        try:
            dgl_mgpu.partition_graph(graph, **options)
        except DGLMGPUError as error:
            assert str(error)
        except Exception as error:
            missed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            missed.append(f"{name}: nothing raised")
    # And ranks still talk to each other.
    _same_as_whole(dgl_mgpu.partition_graph(g), g)
    return missed


@on_gpus_too
def test_bad_arguments_have_typed_errors_on_all_ranks(ranks):
    assert ranks.run(_bad_arguments) == [[]] * ranks.size


def _bad_rows_to_gather() -> None:
    pg, rank = dgl_mgpu.partition_graph(homogeneous()), dist.get_rank()
    rows = pg.ndata["x"]
    error: type[DGLMGPUError]
    for bad in (rows[1:], rows[0, 0], [1], None):  # on one rank alone
        error = InvalidInputError if rank == 1 else RankFailedError
        with pytest.raises(error, match="gather rows"):
            pg.gather(bad if rank == 1 else rows)
    for bad in (rows[:, 1:], rows.float()):
        with pytest.raises(InvalidInputError, match="rank 1 passed rows of shape"):
            pg.gather(bad if rank == 1 else rows)
    assert torch.equal(pg.gather(rows).cpu(), homogeneous().ndata["x"])


@on_gpus_too
def test_rows_that_do_not_fit_are_gathered_on_no_rank(ranks):
    ranks.run(_bad_rows_to_gather)


def _ways_by_name() -> None:
    g = homogeneous("skewed")
    names = ["halo in 1", "halo in 3", "halo in 40", "halo at first", "broadcast"]
    size = dist.get_world_size()
    if torch.cuda.device_count() >= size:
        names.append("remote reads, ps=4 dist=2 wpb=1")
    for name in names:
        both = Both(g, exchange=name)
        both.compare(
            lambda graph, rows: dgl.ops.copy_u_sum(graph, rows["x"]),
            {"x": random_rows(g.num_nodes(), 5)},
            what=name,
        )
        (spread,) = both.pg._graph.parts
        assert len(spread.rounds.tiles) == {
            "halo in 1": 2, "halo in 3": {2: 4, 3: 3}[size], "halo in 40": 41, "broadcast": size,
        }.get(name, len(spread.rounds.tiles)), name  # fmt: skip


@on_gpus_too
def test_ways_have_names_in_full(ranks):
    ranks.run(_ways_by_name)


@pytest.mark.parametrize(
    "name", ["halo in 2", "halo at first", "broadcast", "remote reads, ps=4 dist=2 wpb=1"]
)
def test_names_of_ways_are_read_as_they_are_written(name):
    assert str(ExchangeStrategy.named(name)) == name


def test_short_names_of_ways():
    assert ExchangeStrategy.named("halo") == ExchangeStrategy(chunks=2)
    assert ExchangeStrategy.named("remote") == ExchangeStrategy(pipeline=Pipeline())
    for name in ("halo in two", "halo in 0", "remote reads, ps=4", "post", 3):
        with pytest.raises(InvalidInputError, match="in full"):
            ExchangeStrategy.named(name)
