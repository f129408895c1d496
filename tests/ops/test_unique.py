"""Append-unique against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import append_unique
from tests.ops import reference

IDS = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 2**31 - 1)), max_size=60)


def check(seeds: torch.Tensor, neighbors: torch.Tensor) -> None:
    nodes, local = append_unique(seeds, neighbors)
    assert nodes.dtype == local.dtype == seeds.dtype
    expected = reference.append_unique(seeds.tolist(), neighbors.tolist())
    assert (nodes.tolist(), local.tolist()) == expected


@settings(max_examples=200)
@given(IDS, IDS, st.sampled_from([torch.int32, torch.int64]))
def test_small(seeds, neighbors, dtype):
    check(torch.tensor(seeds, dtype=dtype), torch.tensor(neighbors, dtype=dtype))


def big(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(2)
    count = 200_000
    neighbors = {
        "random": random.integers(0, 10**6, count),
        "skewed": (10**6 * random.random(count) ** 4).astype(np.int64),
        "one node": np.full(count, 7),
        "all new": random.permutation(count) + 10**6,
        "far apart": random.integers(0, 1000, count) << 50,
        "strided": random.integers(0, 10**5, count) * 4096,
    }[kind]
    seeds = random.permutation(20_000)
    return torch.from_numpy(seeds), torch.from_numpy(neighbors)


KINDS = ["random", "skewed", "one node", "all new", "far apart", "strided"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_many_buckets(on_threads, kind, number):
    on_threads(number, lambda: check(*big(kind)))


def test_int32_agrees():
    seeds, neighbors = big("skewed")
    wide = append_unique(seeds, neighbors)
    narrow = append_unique(seeds.int(), neighbors.int())
    assert all(torch.equal(a, b.long()) for a, b in zip(wide, narrow, strict=True))


def test_repeated_seeds_keep_their_rows():
    nodes, local = append_unique(torch.tensor([4, 9, 4]), torch.tensor([4, 5, 9, 5]))
    assert nodes.tolist() == [4, 9, 4, 5]
    assert local.tolist() == [0, 3, 1, 3]


@pytest.mark.parametrize("where", ["seeds", "neighbors"])
def test_negative_id(where):
    seeds, neighbors = big("random")
    (seeds if where == "seeds" else neighbors)[17] = -3
    with pytest.raises(IdOutOfRangeError, match="-3"):
        append_unique(seeds, neighbors)


def test_wrong_dtypes():
    ids = torch.arange(3)
    for seeds, neighbors in [(ids, ids.int()), (ids.float(), ids), (ids, ids.double())]:
        with pytest.raises(InvalidInputError, match="dtype"):
            append_unique(seeds, neighbors)


def test_children(in_children):
    seeds, neighbors = big("random")
    expected = append_unique(seeds, neighbors)
    for answer in in_children(lambda: append_unique(seeds, neighbors)):
        assert all(torch.equal(a, b) for a, b in zip(answer, expected, strict=True))


def test_registration():
    torch.library.opcheck(
        torch.ops.dgl_mgpu.append_unique.default, (torch.tensor([3, 1]), torch.tensor([1, 7, 7]))
    )
