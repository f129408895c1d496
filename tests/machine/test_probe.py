"""Probing: this machine as it is, and made-up GPUs through torch's own interface."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import ConfigError, UnsupportedEnvironmentError
from dgl_mgpu.machine import measure, probe

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_without_a_gpu_ranks_share_memory_that_is_there():
    machine = probe(3)
    assert (machine.name, machine.num_gpus) == ("cpu", 3)
    assert 0 < machine.gpu_memory.sum() <= shutil.disk_usage("/dev/shm").total


@without_gpu
def test_without_a_gpu_there_is_nothing_to_measure():
    with pytest.raises(UnsupportedEnvironmentError, match="torch sees no GPU"):
        measure()


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """Four H200 of which each reads all but the opposite one, and nothing measured of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"uuid-{gpu}")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i - j) % 4 != 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (100 + gpu, 143))
    # None makes `import pynvml` fail.
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return monkeypatch


def test_links_are_where_peer_access_works(four_gpus):
    machine = probe()
    assert machine.neighbors(0) == (1, 3)
    assert machine.gpu_memory.tolist() == [100, 101, 102, 103]
    assert machine.name == "4x NVIDIA H200 (usual bandwidths, not measured)"


def test_what_was_measured_is_known_from_then_on(four_gpus):
    """Copies are timed in the order of what is measured; here each takes its turn's number."""
    four_gpus.setattr(torch, "zeros", lambda size, device="cpu", **_: str(device))
    four_gpus.setattr(torch, "empty_like", lambda block: f"target on {block}")
    gb = {"cpu": 50.0, "cuda:0": 700.0, "cuda:1": 710.0, "cuda:2": 720.0, "cuda:3": 730.0}

    def rates(copies):
        """Copies within a GPU are ten times as fast, and those that are not alone half as."""
        alone = 1.0 if len(copies) == 1 else 0.5
        return [alone * gb[of] * (10 if to.endswith(of) else 1) for to, of in copies]

    four_gpus.setattr(sys.modules["dgl_mgpu.machine.probe"], "_rates", rates)
    for machine in (measure(), probe()):
        assert machine.name == "4x NVIDIA H200"
        assert machine.link_bandwidth[0].tolist() == [7000.0, 710.0, 0.0, 730.0]
        assert machine.port_bandwidth[0] == 720.0  # 355 and 365 at once
        assert machine.host_bandwidth.tolist() == [50.0] * 4
        assert [(group.gpus, group.bandwidth) for group in machine.host_groups] == [
            ((0, 1, 2, 3), 100.0)
        ]


def test_a_stores_machine_opens_no_gpu_of_another_rank(four_gpus):
    """What is free on a GPU is not to be had without a context there; its properties are."""

    def opens_a_context(gpu):
        raise AssertionError(f"a context on GPU {gpu}")

    four_gpus.setattr(torch.cuda, "mem_get_info", opens_a_context)
    four_gpus.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(uuid=f"uuid-{gpu}", total_memory=143 + gpu),
    )
    machine = probe(free_memory=False)
    assert machine.gpu_memory.tolist() == [143, 144, 145, 146]
    runtime = object.__new__(Runtime)
    assert runtime.gpus() == [f"uuid-{gpu}" for gpu in range(4)]
    assert runtime.machine().neighbors(0) == (1, 3)


def test_more_ranks_than_gpus_are_refused(four_gpus):
    with pytest.raises(ConfigError, match="this machine has 4 GPUs"):
        probe(5)


def test_nvlinks_are_counted_through_nvml(four_gpus):
    """GPU 0 and 1 share two NVLinks; the links of 2 and 3 end at a switch."""

    class NVMLError(Exception):
        pass

    remote = {0: ["bus1", "bus1"], 1: ["bus0", "bus0"], 2: ["switch"], 3: ["switch"]}

    def state(gpu, link):
        if link >= len(remote[gpu]):
            raise NVMLError
        return 1

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]),
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=f"bus{gpu}"),
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda gpu, link: SimpleNamespace(busId=remote[gpu][link]),
    )
    four_gpus.setitem(sys.modules, "pynvml", fake)
    links = probe().link_bandwidth
    assert links[0, 1] == 2 * links[2, 3] == 44.0
    # No NVLink between 1 and 2 from the side of 1, but peer access: over PCIe.
    assert links[1, 2] == 22.0
    assert links[0, 2] == 0.0
