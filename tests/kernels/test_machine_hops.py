"""Hops over machines by CUDA kernels: those of one machine that has all, bit for bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dgl_mgpu.ops import SampleKey, append_unique, sample_neighbors
from dgl_mgpu.ops.edges import HopOptions
from dgl_mgpu.ops.machine_hops import MachineBatch, MachineHop, Network, Room, most_nodes
from dgl_mgpu.ops.requests import NOTES, Owners, head_words
from dgl_mgpu.ops.workspace import Workspace
from tests.kernels.cuda_views import on_device
from tests.ops.views import power_law_graph

FANOUTS = [3, 4]
GRAPH = power_law_graph(200, 1500, seed=0)


class Machines:
    """Threads that send each other messages."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=100)
        self._sent: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, messages: torch.Tensor) -> torch.Tensor:
        self._sent[rank] = messages
        self._barrier.wait()
        received = torch.stack([sent[rank] for sent in self._sent])
        self._barrier.wait()
        return received


def sampled(where, dtype, rooms, replaced=False):
    """What each of three machines has sampled, and what one of all rows would have."""
    size = 3
    whole = GRAPH.view(idtype=dtype)
    num_rows = whole.num_rows
    bounds = torch.tensor([0, num_rows // 3, num_rows // 3, num_rows])  # one owns nothing
    machines, network_bounds = Machines(size), bounds.to(where)
    draw = torch.Generator().manual_seed(0)
    seeds = [torch.randperm(num_rows, generator=draw)[:count].to(dtype) for count in (40, 0, 25)]
    keys = [SampleKey(1, 2, batch, 0) for batch in range(size)]

    def hop_of(number: int, fanout: int) -> MachineHop:
        options = [HopOptions(fanout, replaced, replace(key, hop=number).fold()) for key in keys]
        return MachineHop(options, rooms[number])

    def run(rank: int):
        # Some rows of others are here as well.
        is_here = torch.rand(num_rows, generator=torch.Generator().manual_seed(rank)) < 0.2
        is_here[bounds[rank] : bounds[rank + 1]] = True
        position = torch.where(is_here, torch.arange(num_rows), -1).int()
        view = replace(on_device(whole, where), position=position.to(where))
        network = Network(
            Owners(network_bounds, rank), head_words(size, 1), torch.int32, size,
            lambda messages: machines.exchange(rank, messages),
        )  # fmt: skip
        most = most_nodes(len(seeds[rank]), FANOUTS, num_rows)
        batch = MachineBatch(Workspace(where), view, seeds[rank].to(where), most, network)
        for number, fanout in enumerate(FANOUTS):
            notes = (number, *range(1, NOTES))
            places, own, asked = batch.ask(rooms[number].ids, notes)
            batch.sample(hop_of(number, fanout), places, own, asked, notes)
        batch.expect_reports()
        return batch.finish()

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    expected = []
    for ids, key in zip(seeds, keys, strict=True):
        nodes, hops = ids, []
        for number, fanout in enumerate(FANOUTS):
            edges = sample_neighbors(
                whole, nodes, fanout, replace(key, hop=number), replace=replaced
            )
            nodes, local = append_unique(nodes, edges.neighbors)
            hops.append((edges.indptr, local, edges.eids))
        expected.append((nodes, hops))
    return found, expected


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hops_are_those_of_one_machine(where, dtype, replaced):
    found, expected = sampled(where, dtype, [Room(64, 192), Room(400, 1600)], replaced)
    for (heads, hops), (nodes, edges) in zip(found, expected, strict=True):
        assert torch.equal(hops.nodes.cpu(), nodes)
        for of_hop, others in zip(hops.edges, edges, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(of_hop, others, strict=True))
        assert hops.sizes[-1] == len(nodes) and len(heads) == 2 * len(FANOUTS)
    # All learn from the heads what was sent, and of which hop.
    assert all(heads == found[0][0] for heads, _ in found)
    for number, of_hop in enumerate(found[0][0]):
        assert [head[0] for head in of_hop] == [number // 2] * 3
    edges_sent = [sum(sum(head[NOTES : NOTES + 3]) for head in found[0][0][n]) for n in (1, 3)]
    for number, sent in enumerate(edges_sent):
        assert sent == sum(len(edges[number][2]) for _, edges in expected)


@pytest.mark.parametrize("rooms", [[Room(6, 18), Room(400, 1600)], [Room(64, 8), Room(30, 40)]])
def test_heads_tell_of_too_little_room(where, rooms):
    found, _ = sampled(where, torch.int64, rooms)
    assert all(heads == found[0][0] for heads, _ in found)
    needed = [max(max(head[NOTES : NOTES + 3]) for head in of_round) for of_round in found[0][0]]
    given = [count for room in rooms for count in room]
    assert needed[0] > given[0] or needed[1] > given[1]
