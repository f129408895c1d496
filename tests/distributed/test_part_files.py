"""Parts of graphs that ranks read from files, against the whole graph on one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.nn import GATConv, GraphConv, HeteroGraphConv, SAGEConv

import dgl_mgpu
from dgl_mgpu.comm import communicator
from dgl_mgpu.errors import InvalidInputError, RankFailedError
from dgl_mgpu.store.part_files import TypeIds
from tests.distributed.both import Both, same
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.span_graphs import of_two_types, power_law
from tests.store.test_part_writer import _of_types, _read_by_dgl
from tests.store.test_partitioned import _partition, with_weights


class _FromFiles(Both):
    """A whole graph with the ids of a partition, and this rank's part of it."""

    def __init__(self, g: dgl.DGLGraph, path: str, exchange: str = "halo") -> None:
        self.g = g
        self.pg = dgl_mgpu.load_partition(path, exchange=exchange)
        self.nodes = self.pg.ndata[dgl.NID].cpu()
        self.edges = self.pg.edata[dgl.EID].cpu()


def _trains(path: str, g: dgl.DGLGraph, exchange: str) -> None:
    both = _FromFiles(g, path, exchange)
    for name, rows in g.ndata.items():
        assert torch.equal(both.pg.ndata[name].cpu(), rows[both.nodes]), name
    for name, rows in g.edata.items():
        assert torch.equal(both.pg.edata[name].cpu(), rows[both.edges]), name
    assert torch.equal(both.pg.in_degrees().cpu(), g.in_degrees()[both.nodes])
    x = torch.rand(g.num_nodes(), 6, dtype=torch.float64)
    for layer in (
        SAGEConv(6, 3, "mean"),
        GraphConv(6, 3, allow_zero_in_degree=True),
        GATConv(6, 2, 2, allow_zero_in_degree=True),
    ):
        model = layer.double()
        both.compare(lambda g, nodes, of=model: of(g, nodes["x"]), {"x": x}, model=model)
    weights = torch.rand(g.num_edges(), dtype=torch.float64)
    both.compare(
        lambda g, given: dgl.ops.u_mul_e_sum(g, given["x"], given["w"]), {"x": x}, {"w": weights}
    )


@machines_on_gpus_too
@pytest.mark.parametrize("exchange", ["halo", "broadcast", "auto"])
def test_a_part_from_files_is_that_of_the_graph(
    ranks: RankProcesses, tmp_path: Path, exchange: str
) -> None:
    path, g = _partition(power_law(), tmp_path, ranks.size)
    ranks.run(on_machines, "abc", _trains, path, g, exchange)


def _trains_types(path: str, g: dgl.DGLGraph) -> None:
    pg = dgl_mgpu.load_partition(path)
    assert (pg.ntypes, pg.canonical_etypes) == (g.ntypes, g.canonical_etypes)
    torch.manual_seed(0)
    model = HeteroGraphConv(
        {etype: GraphConv(4, 3, allow_zero_in_degree=True) for etype in g.etypes}
    ).double()
    x = {
        ntype: torch.rand(g.num_nodes(ntype), 4, dtype=torch.float64).requires_grad_()
        for ntype in g.ntypes
    }
    nodes = {ntype: pg.nodes[ntype].data[dgl.NID].cpu() for ntype in g.ntypes}
    own = {
        ntype: rows.detach()[nodes[ntype]].to(pg.device).requires_grad_()
        for ntype, rows in x.items()
    }
    expected, found = model(g, x), copy.deepcopy(model).to(pg.device)(pg, own)
    assert expected.keys() == found.keys()
    for ntype, rows in expected.items():
        same(found[ntype], rows[nodes[ntype]])
    sum((rows**3).sum() for rows in expected.values()).backward()
    sum((rows**3).sum() for rows in found.values()).backward()
    for ntype, rows in x.items():
        if rows.grad is not None:
            same(own[ntype].grad, rows.grad[nodes[ntype]])
    for etype in g.canonical_etypes:
        eids = pg.edges[etype].data[dgl.EID].cpu()
        for name, rows in g.edges[etype].data.items():
            assert torch.equal(pg.edges[etype].data[name].cpu(), rows[eids]), name
        counts = torch.zeros(g.num_edges(etype), dtype=torch.int64)
        counts[eids] += 1
        dist.all_reduce(counts)
        assert (counts == 1).all()
        low = nodes[etype[2]]
        assert torch.isin(g.find_edges(eids, etype=etype)[1], low).all()


@machines_on_gpus_too
def test_parts_of_several_types_from_files(ranks: RankProcesses, tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"graph_formats": ["csr"]}]):
        of_types = with_weights(of_two_types())
        path, g = _partition(of_types, tmp_path / str(number), ranks.size, **options)
        ranks.run(on_machines, "abc", _trains_types, path, g)
    path = dgl_mgpu.write_partition(_of_types(), tmp_path / "written", ranks.size)
    g, _ = _read_by_dgl(path, ranks.size)
    ranks.run(on_machines, "abc", _trains_types, str(path), g)


def test_one_process_loads_a_graph_of_one_part(tmp_path: Path) -> None:
    path, g = _partition(power_law(), tmp_path, 1)
    pg = dgl_mgpu.load_partition(path)
    x = torch.rand(g.num_nodes(), 3, dtype=torch.float64)
    same(dgl.ops.copy_u_sum(pg, x), dgl.ops.copy_u_sum(g, x))


def _refused(path: str, other: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(InvalidInputError, match=f"parts is {size - 1}, and that of ranks {size}"):
        dgl_mgpu.load_partition(other)
    with pytest.raises((InvalidInputError, RankFailedError), match="cannot be read"):
        dgl_mgpu.load_partition(f"{path}.not" if rank else path)
    with pytest.raises(InvalidInputError, match="no exchange='fast'"):
        dgl_mgpu.load_partition(path, exchange="fast")
    with pytest.raises(InvalidInputError, match="exchange"):
        dgl_mgpu.load_partition(path, exchange="halo" if rank else "broadcast")
    with pytest.raises(InvalidInputError, match="no device"):
        dgl_mgpu.load_partition(path, device="cuda:99")


def test_files_that_do_not_fit_are_refused(ranks: RankProcesses, tmp_path: Path) -> None:
    path, _ = _partition(power_law(), tmp_path / "all", ranks.size)
    other, _ = _partition(power_law(), tmp_path / "fewer", ranks.size - 1)
    ranks.run(_refused, path, other)
    metadata = json.loads(Path(path).read_text())
    metadata["node_map"]["_N"][0][1] -= 1
    Path(path).write_text(json.dumps(metadata))
    ranks.run(_does_not_belong_together, path)


def _does_not_belong_together(path: str) -> None:
    with pytest.raises((InvalidInputError, RankFailedError)):
        dgl_mgpu.load_partition(path)


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("there is no room")


def _has_no_room(path: str, name: str) -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_groups", None)  # which ends
        if rank == 1:
            patch.setattr(f"dgl_mgpu.{name}", _no_room)
        with pytest.raises(MemoryError if rank == 1 else RankFailedError, match="there is no room"):
            dgl_mgpu.load_partition(path)


@pytest.mark.parametrize(
    "name",
    [
        "store.part_files.PartEdges.chunks",
        "distributed.part_files.Part",  # after others were told what is read here
        "distributed.part_files._copied",
    ],
)
def test_a_rank_without_room_ends_all(ranks: RankProcesses, tmp_path: Path, name: str) -> None:
    path, _ = _partition(power_law(), tmp_path, ranks.size)
    ranks.run(_has_no_room, path, name)


def _has_a_short_file(path: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(InvalidInputError if rank == 1 else RankFailedError, match=r"part1.graph"):
        dgl_mgpu.load_partition(path)


def test_a_short_file_is_told(ranks: RankProcesses, tmp_path: Path) -> None:
    path, _ = _partition(power_law(), tmp_path, ranks.size)
    file = tmp_path / "part1" / "graph.dgl"
    file.write_bytes(file.read_bytes()[: -file.stat().st_size // 3])
    ranks.run(_has_a_short_file, path)


def _has_a_bad_source(path: str) -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(TypeIds, "of_type", lambda self, ids: ids + int(self.bounds[-1]))
        with pytest.raises(
            InvalidInputError if rank == 1 else RankFailedError, match="there is an edge from node"
        ):
            dgl_mgpu.load_partition(path)


def test_a_bad_source_is_told(ranks: RankProcesses, tmp_path: Path) -> None:
    path, _ = _partition(power_law(), tmp_path, ranks.size)
    ranks.run(_has_a_bad_source, path)
