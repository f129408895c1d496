from __future__ import annotations

import itertools

import pytest
import torch

from dgl_mgpu.distributed import partition as ownership
from dgl_mgpu.distributed.partition import (
    Ownership,
    assigned,
    balanced_bounds,
    check_assignment,
    fingerprint,
    ranges,
    shuffled,
)
from dgl_mgpu.errors import InvalidInputError


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 1000])
@pytest.mark.parametrize("seed", [0, 1, -3, 2**40, 2**63])
def test_a_shuffle_is_a_permutation_and_the_same_each_time(num_nodes, seed):
    order = shuffled(num_nodes, seed)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(num_nodes))
    assert torch.equal(order, shuffled(num_nodes, seed))


def test_a_shuffle_depends_on_the_seed_and_leaves_no_trace_of_the_order():
    order, other = shuffled(10_000, 0), shuffled(10_000, 1)
    assert not torch.equal(order, other)
    for found in (order, other):
        places = torch.stack([torch.arange(10_000), found]).double()
        # Of random permutations the correlation has a standard deviation of 0.01.
        assert torch.corrcoef(places)[0, 1].abs() < 0.05
    # Each tenth of the positions has about a tenth of each tenth of the nodes: 100 ± 9.
    counts = torch.bincount(order // 1000 * 10 + torch.arange(10_000) // 1000, minlength=100)
    assert counts.min() > 50 and counts.max() < 150


def _heaviest(work: list[int], bounds: tuple[int, ...]) -> int:
    return max(sum(work[low:high]) for low, high in itertools.pairwise(bounds))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_ranges_are_nearly_as_balanced_as_any(num_ranks, seed):
    draw = torch.Generator().manual_seed(seed)
    size = int(torch.randint(0, 12, (1,), generator=draw))
    degrees = torch.randint(0, 1 + 3 ** (seed % 4), (size,), generator=draw)
    bounds = balanced_bounds(degrees, num_ranks)
    assert len(bounds) == num_ranks + 1 and bounds[0] == 0 and bounds[-1] == size
    assert list(bounds) == sorted(bounds)
    work = (degrees + 1).tolist()
    best = min(
        _heaviest(work, (0, *inner, size))
        for inner in itertools.combinations_with_replacement(range(size + 1), num_ranks - 1)
    )
    assert _heaviest(work, bounds) <= best + max(work, default=0)


def test_work_that_divides_evenly_is_divided_evenly():
    assert balanced_bounds(torch.full((12,), 4), 3) == (0, 4, 8, 12)
    assert balanced_bounds(torch.tensor([9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 2) == (0, 1, 11)


def test_nodes_in_ranges_of_an_order():
    degrees = torch.tensor([0, 5, 0, 5])
    owned = ranges(torch.tensor([1, 3, 0, 2]), degrees, 2)
    assert owned.bounds == (0, 1, 4)
    assert ranges(None, degrees, 2).nodes(0).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_nodes_as_assigned(dtype):
    ranks = torch.tensor([2, 0, 2, 0, 3, 2], dtype=dtype)
    owned = assigned(ranks, 5)
    assert owned.num_ranks == 5 and owned.num_nodes == 6
    assert [owned.nodes(rank).tolist() for rank in range(5)] == [[1, 3], [], [0, 2, 5], [4], []]
    assert [owned.count(rank) for rank in range(5)] == [2, 0, 3, 1, 0]
    positions = owned.positions(dtype)
    assert positions.dtype == dtype
    assert torch.equal(owned.owners(positions), ranks.long())
    check_assignment(ranks, 6, 5)


def test_positions_are_the_places_of_nodes_in_the_order():
    order = shuffled(50, 4)
    owned = Ownership(order, (0, 20, 20, 50))
    assert torch.equal(order[owned.positions(torch.int64)], torch.arange(50))
    owners = owned.owners(torch.arange(50))
    assert owners.tolist() == [0] * 20 + [2] * 30
    as_they_are = Ownership(None, (0, 20, 20, 50))
    assert torch.equal(as_they_are.positions(torch.int32), torch.arange(50, dtype=torch.int32))
    assert as_they_are.nodes(2).tolist() == list(range(20, 50))


@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_fingerprint_tells_edges_apart(monkeypatch, dtype, size):
    draw = torch.Generator().manual_seed(size)
    src, dst = (torch.randint(9, (size,), generator=draw, dtype=dtype) for _ in range(2))
    found = fingerprint(src, dst)
    others = set()
    for place in range(size):
        for src_shift, dst_shift in ((0, 1), (1, 0), (1, -1), (1, 1)):
            other_src, other_dst = src.clone(), dst.clone()
            other_src[place] += src_shift
            other_dst[place] += dst_shift
            others.add(fingerprint(other_src, other_dst))
    assert len(others) == 4 * size and found not in others
    # Which edge is which matters, and which end.
    order = torch.randperm(size, generator=draw)
    for other in ((src[order], dst[order]), (src[order], dst), (dst, src)):
        same = torch.equal(other[0], src) and torch.equal(other[1], dst)
        assert (fingerprint(*other) == found) == same
    # It is the same however edges are stretched over memory, or over time.
    assert fingerprint(src.long(), torch.stack([dst, dst], 1)[:, 0].int()) == found
    for stretch in (1, 3, 64):
        monkeypatch.setattr(ownership, "_STRETCH", stretch)
        assert fingerprint(src, dst) == found


def test_no_edges_have_a_fingerprint():
    none = torch.empty(0, dtype=torch.int32)
    assert fingerprint(none, none) == fingerprint(none.long(), none.long())


@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        (torch.tensor([0, 1, 3]), "0 to 3"),
        (torch.tensor([0, -1, 1]), "-1 to 1"),
        (torch.tensor([0, 1]), "3 nodes"),
        (torch.tensor([[0, 1, 1]]), "3 nodes"),
        (torch.tensor([0.0, 1.0, 1.0]), "float32"),
    ],
)
def test_an_assignment_gives_each_node_a_rank(ranks, match):
    with pytest.raises(InvalidInputError, match=match):
        check_assignment(ranks, 3, 3)


def test_no_nodes_can_be_assigned():
    empty = torch.empty(0, dtype=torch.int64)
    check_assignment(empty, 0, 3)
    assert assigned(empty, 3).bounds == (0, 0, 0, 0)
