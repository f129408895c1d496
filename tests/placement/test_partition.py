"""Rows are found by a modulo and a division, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.placement import HOST, Tier, locate, part_sizes, position_of


def tiers_of(sizes_and_parts):
    tiers, start = [], 0
    for size, parts in sizes_and_parts:
        sources = (tuple(range(parts)),) * parts
        copies = tuple((part,) for part in range(parts))
        tiers.append(Tier(start, start + size, "gpu", parts, copies, sources))
        start += size
    return tiers


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=5))
def test_every_row_has_one_place(sizes_and_parts):
    tiers = tiers_of(sizes_and_parts)
    positions = np.arange(tiers[-1].stop)
    tier, part, local = locate(positions, tiers)
    # The definition, row by row.
    for position, *place in zip(positions, tier, part, local, strict=True):
        home = tiers[place[0]]
        assert home.start <= position < home.stop
        offset = position - home.start
        assert place[1:] == [offset % home.parts, offset // home.parts]
    assert np.array_equal(position_of(tier, part, local, tiers), positions)
    for index, home in enumerate(tiers):
        counts = np.bincount(part[tier == index], minlength=home.parts)
        assert counts.tolist() == part_sizes(home).tolist()
        for each in range(home.parts):
            mine = np.sort(local[(tier == index) & (part == each)])
            assert mine.tolist() == list(range(counts[each]))  # no gaps


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position):
    with pytest.raises(IdOutOfRangeError, match=str(position)):
        locate(np.array([0, position]), tiers_of([(10, 2)]))


def test_a_part_is_on_the_host_where_someone_reads_it_there():
    tier = Tier(0, 4, "gpu", 2, ((0,), (1,)), ((0, HOST), (0, 1)))
    assert [tier.on_host(part) for part in range(2)] == [False, True]
    assert Tier(0, 4, "host", 1, ((),), ((HOST,),)).on_host(0)
