"""A topology checks itself, is cut down without losing meaning, and survives JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dgl_mgpu.errors import ConfigError, DataFormatError
from dgl_mgpu.machine import HostGroup, Topology, preset


def line(**fields) -> Topology:
    """GPU 0 - GPU 1 - GPU 2."""
    links = np.array([[900.0, 25.0, 0.0], [25.0, 900.0, 50.0], [0.0, 50.0, 900.0]])
    values = {
        "name": "line",
        "link_bandwidth": links,
        "gpu_memory": np.full(3, 1000),
        "host_bandwidth": np.full(3, 12.0),
        "host_memory": 10**6,
        **fields,
    }
    return Topology(**values)


def test_neighbors_are_the_linked_others():
    assert [line().neighbors(gpu) for gpu in range(3)] == [(1,), (0, 2), (1,)]
    assert not line().fully_linked
    assert preset("hgx-h200").fully_linked


def test_ports_are_as_wide_as_the_links_unless_given():
    assert line().ports().tolist() == [25.0, 75.0, 50.0]
    assert line(port_bandwidth=np.full(3, 40.0)).ports().tolist() == [25.0, 40.0, 40.0]


def test_a_gpu_without_links_has_no_port_limit():
    assert line().subset([0, 2]).ports().tolist() == [np.inf, np.inf]


def test_subset_renumbers_links_memory_and_groups():
    machine = line(
        gpu_memory=np.array([1, 2, 3]),
        host_groups=(HostGroup((0, 1), 12.0), HostGroup((2,), 20.0)),
    )
    part = machine.subset([2, 1])
    assert part.link_bandwidth.tolist() == [[900.0, 50.0], [50.0, 900.0]]
    assert part.gpu_memory.tolist() == [3, 2]
    assert part.host_groups == (HostGroup((1,), 12.0), HostGroup((0,), 20.0))
    assert part.host_memory == machine.host_memory


@pytest.mark.parametrize("gpus", [[], [0, 0], [3], [-1]])
def test_subset_refuses_gpus_that_are_not(gpus):
    with pytest.raises(ConfigError, match="GPUs 0 to 2"):
        line().subset(gpus)


def test_without_links_cuts_both_ways():
    cut = line().without_links((1, 0))
    assert cut.link_bandwidth[0, 1] == cut.link_bandwidth[1, 0] == 0
    assert cut.neighbors(1) == (2,)


@pytest.mark.parametrize("pair", [(0, 2), (1, 1), (0, 7)])
def test_without_links_refuses_what_is_not_linked(pair):
    with pytest.raises(ConfigError, match="no such link"):
        line().without_links(pair)


@pytest.mark.parametrize(
    "fields",
    [
        {"link_bandwidth": np.ones((2, 3))},
        {"link_bandwidth": np.zeros((0, 0)), "gpu_memory": [], "host_bandwidth": []},
        {"link_bandwidth": np.diag([900.0, 0.0, 900.0])},
        {"link_bandwidth": np.full((3, 3), -1.0)},
        {"link_bandwidth": np.full((3, 3), np.nan)},
        {"gpu_memory": np.array([1, -1, 1])},
        {"host_bandwidth": np.zeros(3)},
        {"host_memory": -1},
        {"disk_bandwidth": np.inf},
        {"port_bandwidth": np.zeros(3)},
        {"host_groups": (HostGroup((0, 3), 1.0),)},
        {"host_groups": (HostGroup((0, 0), 1.0),)},
        {"host_groups": (HostGroup((0, 1), 0.0),)},
    ],
)
def test_numbers_that_describe_no_machine_are_refused(fields):
    with pytest.raises(ConfigError, match="describe topology"):
        line(**fields)


def test_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        line().link_bandwidth[0, 1] = 1.0


def test_json_round_trip():
    machine = line(host_groups=(HostGroup((0, 1), 12.5),), disk_bandwidth=2.0, disk_memory=99)
    again = Topology.from_dict(json.loads(json.dumps(machine.to_dict())))
    assert again == machine
    assert again != line()


@pytest.mark.parametrize("field", list(line().to_dict()))
def test_json_that_lacks_a_field_is_refused(field):
    data = line().to_dict()
    del data[field]
    with pytest.raises(DataFormatError, match=field):
        Topology.from_dict(data)


def test_json_of_another_type_is_refused():
    with pytest.raises(DataFormatError):
        Topology.from_dict({**line().to_dict(), "gpu_memory": "much"})
