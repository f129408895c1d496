"""Machines of one kind and the network between them; known by name as ``8x-hgx-h200``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dgl_mgpu.errors import ConfigError
from dgl_mgpu.machine.presets import preset
from dgl_mgpu.machine.topology import GB, Topology

#: GB/s of the network adapters that each GPU has its share of, a way: of a DGX-1 four of 100 Gb/s
#: for eight GPUs, of a DGX A100 one of 200 Gb/s for each, of later ones one of 400 Gb/s.  Nominal.
_ADAPTERS = {
    "dgx1": 6.25, "dgx-a100": 25.0, "dgx-h100": 50.0, "hgx-h200": 50.0, "gb200": 50.0,
    "gb200-nvl72": 50.0, "pcie": 3.1, "quad-v100": 3.1, "single": 12.5, "cpu": 0.15,
}  # fmt: skip
#: Seconds of an all-to-all of few bytes between machines, by InfiniBand.  Assumed.
_LATENCY = 40e-6
_NAME = re.compile(r"(\d+)x-(.+)")
_MOST_MACHINES = 1024


@dataclass(frozen=True)
class Network:
    """What joins the machines of a job.

    Attributes
    ----------
    bandwidth : float
        GB/s that each GPU receives from other machines while all GPUs do, and the same again that
        it sends.
    latency : float
        Seconds that an exchange of few bytes between all machines takes.

    Raises
    ------
    ConfigError
        If the bandwidth is not positive, the latency negative, or one of them not finite.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf and 0 <= self.latency < math.inf):
            raise ConfigError(
                "describe the network between machines",
                f"its bandwidth is {self.bandwidth} GB/s and its latency {self.latency} s",
                "give a positive bandwidth and a latency of 0 or more, both finite",
            )

    def seconds(self, nbytes: float, exchanges: int) -> float:
        """Seconds in which a GPU sends, and receives, so many bytes in so many exchanges."""
        return nbytes / (self.bandwidth * GB) + exchanges * self.latency


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind.

    Attributes
    ----------
    machine : Topology
        Of each.
    num_machines : int
    network : Network or None
        What joins them; None for one alone.
    """

    machine: Topology
    num_machines: int = 1
    network: Network | None = None


def cluster(name: str, gpus: int | None = None) -> Cluster:
    """Known machines by the name of one, with their number before it if there are several.

    Parameters
    ----------
    name : str
        One of :func:`~dgl_mgpu.machine.preset_names`, as ``hgx-h200``, or ``8x-hgx-h200``.
    gpus : int, optional
        How many GPUs of each machine to use; all of them by default.

    Returns
    -------
    Cluster

    Raises
    ------
    ConfigError
        If there is no machine of this name, it has fewer GPUs, or the number is out of range.
    """
    match = _NAME.fullmatch(name.lower().replace("_", "-"))
    if match is None:
        return Cluster(preset(name, gpus))
    number, kind = int(match[1]), match[2]
    machine = preset(kind, gpus)
    if not 1 <= number <= _MOST_MACHINES:
        raise ConfigError(
            f"use the topology '{name}'",
            f"it has {number} machines",
            f"name 1 to {_MOST_MACHINES}",
        )
    if number == 1:
        return Cluster(machine)
    whole = "dgx1" if kind.startswith("dgx1") else kind  # of which it may be a part
    return Cluster(machine, number, Network(_ADAPTERS[whole], _LATENCY))
