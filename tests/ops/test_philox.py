"""Philox against its authors' answers, and the key schedule against plain integers."""

from __future__ import annotations

import math
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import SampleKey, philox
from dgl_mgpu.ops.philox import as_below, draw_blocks
from tests.ops import reference

# Lines «philox4x32 10» of Random123's tests/kat_vectors: counter, key, expected.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]
WORDS = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@numba.njit
def philox_block(node, number, stream, key):
    return philox.philox(node, number, stream, key)


@numba.njit
def one_draw(node, index, key):
    return philox.draw(node, index, 0, key)


@numba.njit
def one_exponential(random):
    return philox.exponential(random)


@numba.njit
def one_below(random, bound):
    return philox.below(random, bound)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def block(counter: list[int], key: list[int]) -> list[int]:
    node, folded = signed(counter[0] | counter[1] << 32), signed(key[0] | key[1] << 32)
    first, second = (int(d) for d in philox_block(node, counter[2], counter[3], folded))
    return [first & 0xFFFFFFFF, first >> 32, second & 0xFFFFFFFF, second >> 32]


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers(line):
    words = [int(word, 16) for word in line.split()]
    assert block(words[:4], words[4:6]) == words[6:]
    assert reference.philox_words(words[:4], words[4:6]) == words[6:]


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=2, max_size=2))
def test_matches_reference(counter, key):
    assert block(counter, key) == reference.philox_words(counter, key)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(-(2**63), 2**63 - 1))
def test_draws_are_numbered_through_blocks(node, index, key):
    assert int(one_draw(node, index, key)) == reference.draw(node, index, key)


@given(U64, st.integers(1, 2**62))
def test_below_is_the_high_half_of_the_product(random, bound):
    assert one_below(np.uint64(random), bound) == random * bound >> 64


@given(U64)
def test_exponential(random):
    value = one_exponential(np.uint64(random))
    assert value == reference.exponential(random)  # bit for bit
    t = 2 * (random >> 12) + 1
    exact = -math.log1p((t - 2**53) / 2**53) if t > 2**52 else -math.log(t / 2**53)
    assert value == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("random", [0, 1, 2**12, 2**63 - 1, 2**63, 2**64 - 1])
def test_exponential_at_the_ends_is_positive_and_finite(random):
    assert 0 < one_exponential(np.uint64(random)) < math.inf


def test_key_is_documented_mix():
    key = SampleKey(seed=1, epoch=2, batch=3, hop=4, etype=5)
    state = 0
    for field in (1, 2, 3, 4, 5):
        state = philox.splitmix64(state ^ field)
    assert key.fold() == signed(state)
    assert philox.splitmix64(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 from state 0


@given(*[U64] * 5, st.sampled_from(["seed", "epoch", "batch", "hop", "etype"]), U64)
def test_keys_that_differ_in_one_field_fold_apart(seed, epoch, batch, hop, etype, field, other):
    key = SampleKey(seed, epoch, batch, hop, etype)
    changed = replace(key, **{field: other})
    assert (key == changed) == (key.fold() == changed.fold())
    assert -(2**63) <= key.fold() < 2**63


@pytest.mark.parametrize("bad", [-1, 2**64, 1.0, "1", None])
def test_key_rejects(bad):
    with pytest.raises(InvalidInputError, match="batch"):
        SampleKey(0, batch=bad)


def test_draws_below_bounds_are_those_of_kernels():
    draws, _ = draw_blocks(torch.arange(2000), 0, 0, key=5)
    bounds = torch.tensor([0, 1, 2, 3, 1000, 2**31 - 1]).repeat(334)[:2000]
    exact = [(int(d) % 2**64) * int(b) >> 64 for d, b in zip(draws, bounds, strict=True)]
    assert as_below(draws, bounds).tolist() == exact
