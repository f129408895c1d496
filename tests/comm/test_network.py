"""The network between machines is measured once, and all ranks go by the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm import communicator, network
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.network import FOUND, measured_network
from tests.ranks import RankProcesses


def _found(folder: str, kept: list[list]) -> list[tuple[float, float]]:
    """What ranks that are machines find, at first, and with these figures in the file."""
    rank, cpu = dist.get_rank(), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(communicator, "_groups", None)
        patch.setattr(communicator, "_across", None)
        patch.setattr(communicator, "_machine_id", lambda: str(rank))
        machines, ranks = Communicator.across_machines(), Communicator.of_this_machine()
        first = measured_network(machines, ranks, cpu)
        ((key, values),) = FOUND.read().items()
        assert values == [first.bandwidth, first.latency]
        assert key.count(",") == dist.get_world_size() and key.endswith("1 ranks each, cpu")
        found = [first]
        for figures in kept:
            machines.all_gather(None)
            if rank == 0:
                FOUND.keep({key: figures})
            machines.all_gather(None)
            assert measured_network(machines, ranks, cpu) is found[-1]  # of this job
            network._known.clear()
            found.append(measured_network(machines, ranks, cpu))
    return [(each.bandwidth, each.latency) for each in found]


def test_all_ranks_know_the_same_and_a_file_keeps_it(ranks: RankProcesses, tmp_path: Path) -> None:
    found = ranks.run(_found, str(tmp_path), [[12.5, 0.25], [12.5], [0.0, 1.0], ["12", "3"]])
    assert all(of_rank == found[0] for of_rank in found)
    measured, kept, *damaged = found[0]
    assert kept == (12.5, 0.25)
    # What is no network is measured again.
    for bandwidth, latency in (measured, *damaged):
        assert 0 < bandwidth < 1e3 and 0 < latency < 10
