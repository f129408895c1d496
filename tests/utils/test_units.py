from __future__ import annotations

import math

import pytest

from dgl_mgpu.utils.units import human_bytes, human_count, human_seconds, human_share


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (12.5 * 2**20, "12.5 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (141 * 2**30, "141 GiB"),
        (5000 * 2**50, "5000 PiB"),
        (-1536, "-1.50 KiB"),
        (math.inf, "inf"),
    ],
)
def test_bytes(value, text):
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (2_449_029, "2.45M"),
        (7.5, "7.50"),
    ],
)
def test_count(value, text):
    assert human_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 s"),
        (8.5e-5, "85.0 us"),
        (0.9999e-3, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (1.234, "1.23 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (123.4, "2 min 03 s"),
        (3725, "1 h 02 min"),
        (math.nan, "nan"),
    ],
)
def test_seconds(value, text):
    assert human_seconds(value) == text


def test_share():
    assert [human_share(x) for x in (0.0, 0.1234, 1.0)] == ["0.0%", "12.3%", "100.0%"]
