"""Machines of one kind by name, and the time that the network between them takes."""

from __future__ import annotations

import math

import pytest

from dgl_mgpu.errors import ConfigError
from dgl_mgpu.machine import Network, cluster, preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_several_machines(name):
    alone, eight = cluster(name), cluster(f"8x-{name}")
    assert (alone.num_machines, alone.network) == (1, None)
    assert eight.num_machines == 8
    assert alone.machine == eight.machine == preset(name)
    # What a GPU gets from other machines is less than what it gets from its own memory.
    assert 0 < eight.network.bandwidth < eight.machine.link_bandwidth.diagonal().min()


def test_some_gpus_of_each_machine():
    assert cluster("2X_DGX_H100", 4).machine == preset("dgx-h100", 4)
    assert cluster("1x-dgx1") == cluster("dgx1")


def test_a_rack_is_one_machine_of_linked_gpus():
    rack = preset("gb200-nvl72")
    assert rack.num_gpus == 72 and rack.fully_linked
    assert rack.host_memory == 18 * preset("gb200").host_memory


@pytest.mark.parametrize(
    ("name", "found"),
    [("0x-dgx1", "0 machines"), ("9999x-dgx1", "9999 machines"), ("2x-dgx-a10", "did you mean")],
)
def test_machines_that_there_are_not(name, found):
    with pytest.raises(ConfigError, match=found):
        cluster(name)


def test_several_machines_are_no_machine():
    with pytest.raises(ConfigError, match=r"several machines.*name one of them, as dgx1;"):
        preset("4x-dgx1")


def test_time_is_of_bytes_and_of_exchanges():
    assert Network(50.0, 1e-5).seconds(100e6, 4) == pytest.approx(2e-3 + 4e-5)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0, 0), (math.nan, 0), (math.inf, 0), (1, -1), (1, math.nan)]
)
def test_a_network_has_a_bandwidth(bandwidth, latency):
    with pytest.raises(ConfigError, match="both finite"):
        Network(bandwidth, latency)
