"""What GPUs have received over NVLink, as the driver counts it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dgl_mgpu.comm.communicator import Communicator

_GPU = re.compile(r"^GPU \d+: .*\(UUID: GPU-(?P<uuid>[0-9a-f-]+)\)", re.MULTILINE)
_RECEIVED = re.compile(r"Link \d+: Data Rx: (\d+) KiB")
# After the last kernel has ended, until its bytes are counted.
_SETTLE_SECONDS = 0.2


def received_bytes(listing: str, gpus: Sequence[str]) -> int:
    """Sum over the links of some GPUs, by UUID, in what ``nvidia-smi nvlink -gt d`` prints.

    Raises
    ------
    ValueError
        If one of them has no link that is counted.
    """
    _, *fields = _GPU.split(listing)
    links = {
        uuid: _RECEIVED.findall(text) for uuid, text in zip(fields[::2], fields[1::2], strict=True)
    }
    missing = [gpu for gpu in gpus if not links.get(gpu)]
    if missing:
        raise ValueError(f"no counters of NVLink data for GPU {missing[0]}")
    return sum(1024 * int(kib) for gpu in gpus for kib in links[gpu])


class Counters:
    """The counters of all ranks' GPUs, read on the first rank.

    Collective, as is all that it does.

    Attributes
    ----------
    missing : str
        Why there are none; '' where there are.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        mine = ""
        if torch.cuda.is_available():
            mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._gpus = ranks.all_gather(mine)
        self.missing = ranks.broadcast_from_rank0("find NVLink counters", self._why_missing)

    def _why_missing(self) -> str:
        if "" in self._gpus:
            return "this machine has no GPU"
        if len(set(self._gpus)) < 2:
            return "no two GPUs take part"
        try:
            self._read()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return str(error)
        return ""

    def _read(self) -> int:
        listing = subprocess.run(
            ["nvidia-smi", "nvlink", "-gt", "d"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        return received_bytes(listing, self._gpus)

    def _settled(self) -> int:
        torch.cuda.synchronize()
        self._ranks.all_gather(None)
        time.sleep(_SETTLE_SECONDS)
        return self._ranks.broadcast_from_rank0("read NVLink counters", self._read)

    def bytes_a_call(self, call: Callable[[Any], Any], given: Sequence[Any], repeats: int) -> float:
        """What a rank's GPU receives in one call, the mean over ranks and what they are given."""
        for each in given:
            call(each)
        before = self._settled()
        for _ in range(repeats):
            for each in given:
                call(each)
        calls = sum(self._ranks.all_gather(repeats * len(given)))
        return (self._settled() - before) / calls
