"""Hops over machines by CUDA kernels: those of one machine that has all, bit for bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dgl_mgpu.ops import SampleKey, append_unique, sample_neighbors
from dgl_mgpu.ops.machine_hops import Hop, Network, PreparedHops, Requests, Room, most_nodes
from dgl_mgpu.ops.requests import (
    NOTES,
    Owners,
    RequestMessages,
    RequestOptions,
    head_words,
    requests_launch,
)
from dgl_mgpu.ops.workspace import NodePrefix, Workspace
from tests.kernels.cuda_views import on_device
from tests.ops.views import power_law_graph

FANOUTS = [3, 4]
GRAPH = power_law_graph(200, 1500, seed=0)


class Machines:
    """Threads that send each other messages."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=100)
        self._sent: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, messages: torch.Tensor, received: torch.Tensor) -> None:
        self._sent[rank] = messages
        self._barrier.wait()
        torch.stack([sent[rank] for sent in self._sent], out=received)
        self._barrier.wait()


def sampled(where, dtype, rooms, replaced=False):
    """What each of three machines has sampled, twice, and what one of all rows would have."""
    size = 3
    whole = GRAPH.view(idtype=dtype)
    num_rows = whole.num_rows
    bounds = torch.tensor([0, num_rows // 3, num_rows // 3, num_rows])  # one owns nothing
    machines, network_bounds = Machines(size), bounds.to(where)
    draw = torch.Generator().manual_seed(0)
    seeds = [torch.randperm(num_rows, generator=draw)[:count].to(dtype) for count in (40, 0, 25)]
    keys = [SampleKey(1, 2, batch, 0) for batch in range(size)]
    hops = [Hop(fanout, replaced, room) for fanout, room in zip(FANOUTS, rooms, strict=True)]
    of_hops = [*zip(*(key.fold_hops(len(hops)) for key in keys), strict=True)]

    def run(rank: int):
        # Some rows of others are here as well.
        is_here = torch.rand(num_rows, generator=torch.Generator().manual_seed(rank)) < 0.2
        is_here[bounds[rank] : bounds[rank + 1]] = True
        position = torch.where(is_here, torch.arange(num_rows), -1).int()
        view = replace(on_device(whole, where), position=position.to(where))
        network = Network(
            Owners(network_bounds, rank), head_words(size, 1), torch.int32, size,
            lambda sent, received: machines.exchange(rank, sent, received),
        )  # fmt: skip
        most = most_nodes(len(seeds[rank]), FANOUTS, num_rows)
        space, mine = Workspace(where), seeds[rank].to(where)
        prepared = PreparedHops(space, view, most, hops, network)
        assert prepared.is_valid
        in_flight = []
        for _ in range(2):  # the second is launched before the first is looked at
            to = RequestMessages(network.new_messages(rooms[0].ids, where), network.head_words)
            places = torch.empty(len(mine), dtype=torch.int64, device=where)
            own = torch.empty(len(mine), dtype=torch.int32, device=where)
            requests_launch(
                space, to, NodePrefix(mine, len(mine)), view.position, num_rows, network.owners,
                RequestOptions([0] * NOTES, 0), own, places,
            )()  # fmt: skip
            received = torch.empty_like(to.messages)
            network.exchange(to.messages, received)
            in_flight.append(prepared.launch(Requests(places, own, received), mine, of_hops))
        return [each.finish() for each in in_flight]

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
    rooms = [Room(64, 192), Room(400, 1600)]
    found, expected = sampled(where, dtype, rooms, replaced)
    for batches, (nodes, edges) in zip(found, expected, strict=True):
        for _, hops in batches:
            assert torch.equal(hops.nodes.cpu(), nodes)
            for of_hop, others in zip(hops.edges, edges, strict=True):
                assert all(torch.equal(a.cpu(), b) for a, b in zip(of_hop, others, strict=True))
            assert hops.sizes[-1] == len(nodes)
    # All learn how much room was needed, and that there was enough.
    needed = found[0][0][0]
    assert all(needed == of for batches in found for of, _ in batches)
    for of_hop, room in zip(needed, rooms, strict=True):
        assert 0 < of_hop.ids <= room.ids and 0 < of_hop.edges <= room.edges


@pytest.mark.parametrize("rooms", [[Room(64, 8), Room(400, 1600)], [Room(64, 192), Room(30, 40)]])
def test_machines_tell_of_too_little_room(where, rooms):
    found, _ = sampled(where, torch.int64, rooms)
    needed = found[0][0][0]
    assert all(needed == of for batches in found for of, _ in batches)
    assert any(
        used > room
        for of in zip(needed, rooms, strict=True)
        for used, room in zip(*of, strict=True)
    )


def test_rooms_are_those_of_the_longest_message(where):
    """Against the definition, where the graph says how many edges each node has."""
    (batches, *_), expected = sampled(where, torch.int64, [Room(64, 192), Room(400, 1600)])
    needed, _ = batches[0]
    num_rows = GRAPH.view().num_rows
    bounds = [0, num_rows // 3, num_rows // 3, num_rows]
    for number, of_hop in enumerate(needed):
        asked, answered = [], []
        for rank, (nodes, edges) in enumerate(expected):
            count = [40, 0, 25][rank] if number == 0 else len(edges[number][0]) - 1
            ids = nodes[:count]
            is_here = torch.rand(num_rows, generator=torch.Generator().manual_seed(rank)) < 0.2
            is_here[bounds[rank] : bounds[rank + 1]] = True
            degrees = edges[number][0].diff()
            for other in {0, 1, 2} - {rank}:
                of_other = (ids >= bounds[other]) & (ids < bounds[other + 1]) & ~is_here[ids]
                asked.append(int(of_other.sum()))
                answered.append(int(degrees[of_other].sum()))
        assert of_hop == (max(asked), max(answered))
