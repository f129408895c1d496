"""The network between machines is measured once, and all ranks go by the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm import communicator, network
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.network import measured_network
from dgl_mgpu.machine import Network
from dgl_mgpu.utils.tuning_cache import TuningCache
from tests.ranks import RankProcesses


def _find(folder: str) -> tuple[float, float]:
    """As the first store of a job does, of ranks that are machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(communicator, "_groups", None)
        patch.setattr(communicator, "_across", None)
        patch.setattr(communicator, "_machine_id", lambda: str(dist.get_rank()))
        machines, ranks = Communicator.across_machines(), Communicator.of_this_machine()
        found = measured_network(machines, ranks, torch.device("cpu"))
        patch.setattr(network, "_measured", None)  # it is not measured again
        assert measured_network(machines, ranks, torch.device("cpu")) is found
    return found.bandwidth, found.latency


def test_all_ranks_know_the_same_and_a_file_keeps_it(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = ranks.run(_find, str(tmp_path))
    assert len(set(found)) == 1
    Network(*found[0])  # raises unless it is one
    file = TuningCache("network.json", 1, list)
    ((key, kept),) = file.read().items()
    assert tuple(kept) == found[0] and key.count(",") == len(found) and key.endswith("cpu")
    file.keep({key: [12.5, 0.25]})
    assert set(ranks.run(_find, str(tmp_path))) == {(12.5, 0.25)}
    for damaged in ([12.5], [0.0, 1.0], ["12", "3"]):
        file.keep({key: damaged})
        (again,) = set(ranks.run(_find, str(tmp_path)))
        assert again != (12.5, 0.25) and again[0] > 0
