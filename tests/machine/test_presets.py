"""Presets are the machines that the papers and makers describe."""

from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.errors import ConfigError
from dgl_mgpu.machine import preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_machine_with_links_both_ways(name):
    machine = preset(name)
    assert np.array_equal(machine.link_bandwidth > 0, machine.link_bandwidth.T > 0)
    assert (machine.gpu_memory > 0).all()


def test_dgx1_is_the_hybrid_cube_mesh_of_the_paper():
    machine = preset("dgx1")
    assert machine.num_gpus == 8
    unreachable = set(range(1, 8)) - set(machine.neighbors(0))
    assert unreachable == {4, 5, 7}
    remote = machine.link_bandwidth - np.diag(np.diag(machine.link_bandwidth))
    # Six NVLinks of 25 GB/s on every GPU, at most two to the same peer.
    assert (remote.sum(1) == 150).all()
    assert set(np.unique(remote)) == {0.0, 25.0, 50.0}
    assert np.array_equal(remote, remote.T)
    # XGNN, figure 7: worker 4 reads GPUs 2, 5, 6 and 7 beside its own.
    assert machine.neighbors(4) == (2, 5, 6, 7)


def test_parts_of_dgx1_have_the_shapes_of_section_6_6():
    full, circle = preset("dgx1-4gf"), preset("dgx1-4gc")
    assert full.fully_linked
    assert all(len(circle.neighbors(gpu)) == 2 for gpu in range(4))
    # A ring, of two single and two double links: no three GPUs are linked with each other.
    assert circle.link_bandwidth[np.triu_indices(4, 1)].tolist() == [25, 50, 0, 0, 50, 25]
    assert [len(preset("dgx1-6g").neighbors(gpu)) for gpu in range(6)] == [3, 3, 4, 4, 2, 2]
    assert preset("dgx1-8g").num_gpus == 8


def test_names_are_forgiving_about_case_and_underscores():
    assert preset("HGX_H200") == preset("hgx-h200")


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'dgx-a100'"):
        preset("dgx-a10")


def test_gpus_takes_the_first_of_them():
    assert preset("hgx-h200", 4).num_gpus == 4
    assert preset("cpu", 12).num_gpus == 12


@pytest.mark.parametrize(("name", "gpus"), [("dgx1", 9), ("dgx1", 0), ("cpu", 0)])
def test_gpus_that_are_not_there_are_refused(name, gpus):
    with pytest.raises(ConfigError):
        preset(name, gpus)


def test_cpu_ranks_are_all_equally_near():
    machine = preset("cpu", 4)
    assert len(np.unique(machine.link_bandwidth)) == 1
    assert machine.gpu_memory.sum() <= machine.host_memory
