"""Stores of graphs that DGL has partitioned, of which each machine reads its part."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from dgl_mgpu import GlobalStore, write_partition
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError, RankFailedError, UnsupportedByStoreError
from dgl_mgpu.graph.host.files import map_tensors
from dgl_mgpu.store.part_exchange import PartRows
from dgl_mgpu.store.part_files import read_part
from dgl_mgpu.store.partitioned import content_of
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.span_graphs import (
    NODES,
    assert_same_batches,
    equal,
    of_two_types,
    power_law,
)
from tests.store.test_part_writer import _homogeneous, _of_types, _read_by_dgl

FANOUTS = [4, 3]


def _partition(
    g: dgl.DGLGraph, folder: Path, num_parts: int, **options: Any
) -> tuple[str, dgl.DGLGraph]:
    """Where DGL's partition is, and the graph with its ids."""
    torch.manual_seed(0)
    g = g.long()
    for frame in g._node_frames:
        frame.pop("number", None)  # DGL's partition has no types like uint16
    nodes, edges = dgl.distributed.partition_graph(
        g, "g", num_parts, str(folder), part_method="random", return_mapping=True, **options
    )
    if g.is_homogeneous:
        nodes, edges = {g.ntypes[0]: nodes}, {g.canonical_etypes[0]: edges}
    new_ids = {ntype: before.argsort() for ntype, before in nodes.items()}
    ends = {
        etype: tuple(
            new_ids[ntype][end]
            for ntype, end in zip(etype[::2], g.find_edges(before, etype=etype), strict=True)
        )
        for etype, before in edges.items()
    }
    renumbered = dgl.heterograph(ends, {ntype: g.num_nodes(ntype) for ntype in g.ntypes})
    for ntype, before in nodes.items():
        for name, rows in g.nodes[ntype].data.items():
            renumbered.nodes[ntype].data[name] = rows[before]
    for etype, before in edges.items():
        for name, rows in g.edges[etype].data.items():
            renumbered.edges[etype].data[name] = rows[before]
    return str(folder / "g.json"), renumbered


def with_weights(g: dgl.DGLGraph) -> dgl.DGLGraph:
    """With a weight of each edge, among their features."""
    draw = torch.Generator().manual_seed(3)
    for etype in g.canonical_etypes:
        g.edges[etype].data["weight"] = torch.rand(g.num_edges(etype), generator=draw)
    return g


@pytest.fixture(scope="module")
def _parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, dgl.DGLGraph]]:
    g = with_weights(power_law())
    return functools.cache(lambda count: _partition(g, tmp_path_factory.mktemp("parts"), count))


@pytest.fixture
def parts(
    _parts: Callable[[int], tuple[str, dgl.DGLGraph]], ranks: RankProcesses
) -> tuple[str, dgl.DGLGraph]:
    """Of a graph, one for each rank."""
    return _parts(ranks.size)


def _as_one_machine(path: str, g: dgl.DGLGraph, ratio: float | str) -> None:
    rank = dist.get_rank()
    with GlobalStore.from_partition(path, seed=5, replica_ratio=ratio) as store:
        assert store.graph.canonical_etypes == g.canonical_etypes
        for etype in g.canonical_etypes:
            assert store.graph.num_edges(etype) == g.num_edges(etype)
            eids = torch.arange(rank, g.num_edges(etype), 2)
            of_edges = store.graph.edges[etype].data
            for name, rows in g.edges[etype].data.items():
                assert equal(of_edges[name][eids.to(store.device)], rows[eids])
        for ntype in g.ntypes:
            assert store.graph.num_nodes(ntype) == g.num_nodes(ntype)
            ids = torch.arange(rank, g.num_nodes(ntype), 2)
            for name, rows in g.nodes[ntype].data.items():
                assert equal(store.gather(name, ids.to(store.device), ntype), rows[ids])
        draw = torch.Generator().manual_seed(rank)
        seeds: Any = {
            ntype: torch.randperm(g.num_nodes(ntype), generator=draw)[:25] for ntype in g.ntypes
        }
        if len(g.ntypes) == 1:
            (seeds,) = seeds.values()
        for fanouts in FANOUTS, [-1]:
            assert_same_batches(g, store, NeighborSampler(fanouts), seeds)
        if all("weight" in g.edges[etype].data for etype in g.canonical_etypes):
            assert_same_batches(g, store, NeighborSampler(FANOUTS, prob="weight"), seeds)


@machines_on_gpus_too
@pytest.mark.parametrize("ratio", [0.0, 0.2, "auto"])
def test_parts_are_the_graph(
    ranks: RankProcesses, parts: tuple[str, dgl.DGLGraph], ratio: float | str
) -> None:
    ranks.run(on_machines, "abc", _as_one_machine, *parts, ratio)


@machines_on_gpus_too
def test_parts_of_several_types_are_the_graph(ranks: RankProcesses, tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"graph_formats": ["csc"]}, {"graph_formats": ["csr"]}]):
        of_types = with_weights(of_two_types())
        path, g = _partition(of_types, tmp_path / str(number), ranks.size, **options)
        ranks.run(on_machines, "abc", _as_one_machine, path, g, 0.3)


@machines_on_gpus_too
def test_machines_share_what_was_written(ranks: RankProcesses, tmp_path: Path) -> None:
    for make in _homogeneous, _of_types:
        path = write_partition(make(), tmp_path / make.__name__, ranks.size)
        g, _ = _read_by_dgl(path, ranks.size)
        ranks.run(on_machines, "abc", _as_one_machine, str(path), g, 0.2)


def _counts_reads(path: str, g: dgl.DGLGraph) -> None:
    machines = Communicator.across_machines()
    content = content_of(read_part(Path(path), machines.rank, machines.size), machines)
    assert content.degrees is not None
    for ntype in g.ntypes:
        etypes = [etype for etype in g.canonical_etypes if etype[0] == ntype]
        expected = sum(g.out_degrees(etype=etype) for etype in etypes)
        assert torch.equal(torch.from_numpy(content.degrees[ntype]), expected)


def test_nodes_are_as_hot_as_in_the_whole_graph(ranks: RankProcesses, tmp_path: Path) -> None:
    for name, g in {"one": power_law(), "several": of_two_types()}.items():
        path, renumbered = _partition(g, tmp_path / name, ranks.size)
        ranks.run(on_machines, "abc", _counts_reads, path, renumbered)


def _reads_its_own_part(path: str, folder: str) -> None:
    # A machine finds its own part alone.
    rank = dist.get_rank()
    metadata = json.loads(Path(path).read_text())
    for number in range(dist.get_world_size()):
        if number != rank:
            metadata[f"part-{number}"] = dict.fromkeys(metadata[f"part-{number}"], "nowhere")
    own = Path(path).with_name(f"own-{rank}.json")
    own.write_text(json.dumps(metadata))
    with GlobalStore.from_partition(own, replica_ratio=0.1) as store:
        every = torch.arange(NODES, device=store.device)
        assert store.gather("feat", every).shape[0] == NODES


@machines_on_gpus_too
def test_a_machine_needs_its_own_part_alone(
    ranks: RankProcesses, parts: tuple[str, dgl.DGLGraph], tmp_path: Path
) -> None:
    ranks.run(on_machines, "abc", _reads_its_own_part, parts[0], str(tmp_path))


def _stops_within(path: str) -> None:
    rank = dist.get_rank()

    def stop(*_: Any) -> None:
        raise OSError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(PartRows, "__getitem__", stop)
        with pytest.raises(OSError if rank == 1 else RankFailedError, match="the disk is gone"):
            GlobalStore.from_partition(path, replica_ratio=0.2)


@machines_on_gpus_too
def test_a_machine_that_cannot_go_on_ends_all(
    ranks: RankProcesses, parts: tuple[str, dgl.DGLGraph]
) -> None:
    ranks.run(on_machines, "abc", _stops_within, parts[0])


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("there is no room")


def _has_no_room(path: str, name: str) -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(f"dgl_mgpu.{name}", _no_room)
        with pytest.raises(MemoryError if rank == 1 else RankFailedError, match="there is no room"):
            GlobalStore.from_partition(path, replica_ratio=0.2)


@machines_on_gpus_too
@pytest.mark.parametrize(
    "name",
    [
        "store.partitioned._topology",  # between what machines tell each other
        "store.part_exchange.PartExchange._own_rows",  # within a round
        "store.memory.tables._filler",  # before the first one
        "store.memory.tables._map_tables",  # when all have what they asked for
    ],
)
def test_a_machine_without_room_ends_all(
    ranks: RankProcesses, parts: tuple[str, dgl.DGLGraph], name: str
) -> None:
    ranks.run(on_machines, "abc", _has_no_room, parts[0], name)


def _of_other_partitions(path: str, other: str) -> None:
    with pytest.raises(InvalidInputError, match=r"the parts' nodes .* on machine 1"):
        GlobalStore.from_partition(other if dist.get_rank() == 1 else path)


def test_parts_are_of_one_partition(
    ranks: RankProcesses, parts: tuple[str, dgl.DGLGraph], tmp_path: Path
) -> None:
    others = {"types": of_two_types(), "size": dgl.rand_graph(NODES + 1, 5_000)}
    for name, g in others.items():
        other, _ = _partition(g, tmp_path / name, 3)
        ranks.run(on_machines, "abc", _of_other_partitions, parts[0], other)


def _refused(path: str, other: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(InvalidInputError, match="parts is 2, and that of machines 3"):
        GlobalStore.from_partition(other)
    with pytest.raises(InvalidInputError if rank == 1 else RankFailedError, match="cannot be read"):
        GlobalStore.from_partition("/nowhere.json" if rank == 1 else path)
    with pytest.raises(InvalidInputError, match="span='machine' has a copy"):
        GlobalStore.from_partition(path, span="machine")
    with pytest.raises(UnsupportedByStoreError, match="hotness=presample"):
        GlobalStore.from_partition(path, hotness="presample")


def test_what_cannot_be_read_is_told(
    ranks: RankProcesses, parts: tuple[str, dgl.DGLGraph], tmp_path: Path
) -> None:
    other, _ = _partition(power_law(), tmp_path / "other", 2)
    ranks.run(on_machines, "abc", _refused, parts[0], other)


def test_mapped_tensors_are_those_of_dgl(tmp_path: Path) -> None:
    path = str(tmp_path / "t.dgl")
    tensors = {
        "_N/feat": torch.randn(7, 3),
        "_N/is": torch.rand(5) < 0.5,
        "n": torch.arange(4),
        "none": torch.empty(0, 3),
    }
    dgl.data.save_tensors(path, tensors)
    found, expected = map_tensors(path), dgl.data.load_tensors(path)
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        assert torch.equal(torch.tensor(rows), expected[name])
    Path(path).write_bytes(Path(path).read_bytes()[:-2])
    with pytest.raises(dgl.DGLError, match="ends too early"):
        map_tensors(path)
