"""Stores of graphs that DGL has partitioned, of which each machine reads its part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import InvalidInputError, RankFailedError, UnsupportedByStoreError
from dgl_mgpu.graph.host.files import map_tensors
from tests.ranks import RankProcesses
from tests.store.test_span import NODES, _batches, _on_machines, of_two_types, power_law

FANOUTS = [4, 3]


def _partition(g: dgl.DGLGraph, folder: Path, num_parts: int) -> tuple[Path, Any, Any]:
    torch.manual_seed(0)
    for data in g.ndata, g.edata:
        for name in "number", "w":  # DGL's partition has no types like uint16
            data.pop(name, None)
    mapping = dgl.distributed.partition_graph(
        g, "g", num_parts, str(folder), part_method="random", return_mapping=True
    )
    return folder / "g.json", *mapping


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Any]]:
    path, nodes, edges = _partition(power_law(), tmp_path_factory.mktemp("parts"), 3)
    yield str(path), nodes, edges


def _as_the_graph(
    path: str, nodes: torch.Tensor, edges: torch.Tensor, ratio: float | str
) -> list[torch.Tensor]:
    """``nodes`` and ``edges`` have the ids of before."""
    g, rank = power_law(), dist.get_rank()
    with GlobalStore.from_partition(path, seed=3, replica_ratio=ratio) as store:
        assert store.graph.num_nodes() == NODES and store.graph.num_edges() == g.num_edges()
        ids = torch.arange(rank, NODES, 2)
        assert torch.equal(store.gather("feat", ids), g.ndata["feat"][nodes[ids]])
        assert torch.equal(store.gather("label", ids), g.ndata["label"][nodes[ids]])
        frontier = store.graph.sample_neighbors(ids, -1)
        eids = edges[frontier.edata[dgl.EID]]
        assert torch.equal(eids.sort().values, g.in_edges(nodes[ids], form="eid").sort().values)
        for found, end in zip(frontier.edges(), g.find_edges(eids), strict=True):
            assert torch.equal(nodes[found], end)
        draw = torch.Generator().manual_seed(rank)
        seeds = torch.randperm(NODES, generator=draw)[:50]
        sampled = []
        for inputs, _, blocks in _batches(store.graph, seeds, NeighborSampler(FANOUTS)):
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][nodes[inputs]])
            for block in blocks:
                sources, destinations = block.edges()
                ends = g.find_edges(edges[block.edata[dgl.EID]])
                assert torch.equal(nodes[block.srcdata[dgl.NID][sources]], ends[0])
                assert torch.equal(nodes[block.dstdata[dgl.NID][destinations]], ends[1])
                sampled.append(block.edata[dgl.EID])
        return sampled


def test_parts_are_the_graph(ranks: RankProcesses, parts: tuple[str, Any, Any]) -> None:
    expected = ranks.run(_on_machines, "abc", _as_the_graph, *parts, 0.0)
    for ratio in 0.2, "auto":
        found = ranks.run(_on_machines, "abc", _as_the_graph, *parts, ratio)
        for mine, others in zip(found, expected, strict=True):
            assert len(mine) and all(map(torch.equal, mine, others))


def _reads_its_own_part(path: str, folder: str) -> None:
    # A machine finds its own part alone.
    rank = dist.get_rank()
    metadata = json.loads(Path(path).read_text())
    for number in range(3):
        if number != rank:
            metadata[f"part-{number}"] = dict.fromkeys(metadata[f"part-{number}"], "nowhere")
    own = Path(path).with_name(f"own-{rank}.json")
    own.write_text(json.dumps(metadata))
    with GlobalStore.from_partition(own, replica_ratio=0.1) as store:
        assert store.gather("feat", torch.arange(NODES)).shape[0] == NODES


def test_a_machine_needs_its_own_part_alone(
    ranks: RankProcesses, parts: tuple[str, Any, Any], tmp_path: Path
) -> None:
    ranks.run(_on_machines, "abc", _reads_its_own_part, parts[0], str(tmp_path))


def _refused(path: str, other: str, several: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(InvalidInputError, match="2 parts for 3 machines"):
        GlobalStore.from_partition(other)
    with pytest.raises(InvalidInputError if rank == 1 else RankFailedError, match="cannot be read"):
        GlobalStore.from_partition("/nowhere.json" if rank == 1 else path)
    with pytest.raises(UnsupportedByStoreError, match=r"nodes of types \['item', 'user'\]"):
        GlobalStore.from_partition(several)
    with pytest.raises(InvalidInputError, match="span='machine' has a copy"):
        GlobalStore.from_partition(path, span="machine")
    with pytest.raises(UnsupportedByStoreError, match="hotness=presample"):
        GlobalStore.from_partition(path, hotness="presample")


def test_what_cannot_be_read_is_told(
    ranks: RankProcesses, parts: tuple[str, Any, Any], tmp_path: Path
) -> None:
    other, _, _ = _partition(power_law(), tmp_path / "other", 2)
    several, _, _ = _partition(of_two_types().long(), tmp_path / "several", 3)
    ranks.run(_on_machines, "abc", _refused, parts[0], str(other), str(several))


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
