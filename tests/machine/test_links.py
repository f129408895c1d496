"""Bandwidths that were measured, and what a machine is taken for with them."""

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.machine import links, preset
from dgl_mgpu.machine.links import FOUND, HOST, as_measured, figures, is_measured, reads

GPUS = ["gpu-a", "gpu-b", "gpu-c"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return monkeypatch


def test_what_was_measured_takes_the_place_of_usual_bandwidths():
    usual = preset("hgx-h200", 3)
    assert not is_measured(usual, GPUS)
    assert as_measured(usual, GPUS).name == f"{usual.name} (usual bandwidths, not measured)"
    FOUND.keep({
        reads(["gpu-a"], "gpu-a"): 7000.0,
        reads(["gpu-a"], "gpu-b"): 780.0,
        reads(["gpu-b"], HOST): 300.0,
    })  # fmt: skip
    some = as_measured(usual, GPUS)
    assert some.link_bandwidth[0].tolist() == [7000.0, 780.0, 396.0]
    assert some.link_bandwidth[1, 0] == 396.0  # the other way was not measured
    assert some.host_bandwidth.tolist() == [54.0, 300.0, 54.0]
    assert some.port_bandwidth.tolist() == [780.0, 373.0, 373.0]  # no narrower than its link
    assert "not measured" in some.name


def test_all_figures_of_a_machine_come_back():
    there = preset("dgx1", 3)
    FOUND.keep(figures(there, GPUS))
    assert is_measured(there, GPUS)
    again = as_measured(preset("hgx-h200", 3), GPUS)
    assert np.array_equal(again.link_bandwidth, there.link_bandwidth)
    assert np.array_equal(again.host_bandwidth, there.host_bandwidth)
    assert np.array_equal(again.port_bandwidth, there.port_bandwidth)
    total = sum(group.bandwidth for group in there.host_groups)
    assert [(group.gpus, group.bandwidth) for group in again.host_groups] == [((0, 1, 2), total)]
    assert again.name == "hgx-h200[0,1,2]"


def test_a_part_of_the_gpus_has_a_port_and_a_way_to_the_host_of_its_own():
    FOUND.keep(figures(preset("hgx-h200", 3), GPUS))
    assert not is_measured(preset("hgx-h200", 2), GPUS[:2])
    FOUND.keep(figures(preset("hgx-h200", 2), GPUS[:2]))
    assert is_measured(preset("hgx-h200", 2), GPUS[:2])


def test_another_driver_is_measured_anew(cache):
    there = preset("hgx-h200", 3)
    FOUND.keep(figures(there, GPUS))
    cache.setattr(links, "_driver", lambda: "another")
    assert not is_measured(there, GPUS)


def test_a_damaged_file_is_as_none():
    there = preset("hgx-h200", 3)
    FOUND.keep(figures(there, GPUS))
    FOUND.path.write_text(FOUND.path.read_text().replace("373.0", "3.0"))
    assert not is_measured(there, GPUS)
    assert np.array_equal(as_measured(there, GPUS).port_bandwidth, there.port_bandwidth)
