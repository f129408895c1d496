"""A machine on the screen: its GPUs, what joins them, and the machines known by name."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from dgl_mgpu.machine import Topology
from dgl_mgpu.utils.units import human_bytes


def machine_tables(topology: Topology, names: Sequence[str]) -> list[RenderableType]:
    """Tables of a topology, and a line with the names of the known ones.

    Parameters
    ----------
    topology : Topology
    names : sequence of str
        Machines known by name.
    """
    devices = range(topology.num_gpus)
    links = Table(title=topology.name)
    links.add_column("")
    for column in devices:
        links.add_column(str(column), justify="right")
    links.add_column("host", justify="right")
    links.add_column("memory", justify="right")
    for row in devices:
        reads = [f"{value:g}" if value else "-" for value in topology.link_bandwidth[row].round(1)]
        links.add_row(
            str(row),
            *reads,
            f"{topology.host_bandwidth[row]:g}",
            human_bytes(float(topology.gpu_memory[row])),
        )
    shared = [
        f"GPUs {', '.join(map(str, group.gpus))} share {group.bandwidth:g} GB/s to host memory"
        for group in topology.host_groups
    ]
    read = (
        "no GPU: GB/s at which ranks read each other's shared memory, which are assumed"
        if topology.name == "cpu"
        else "GB/s at which the GPU of a row reads the memory of a column's"
    )
    facts = [
        read,
        f"host memory {human_bytes(float(topology.host_memory))}",
        *shared,
        f"known by name: {', '.join(names)}",
    ]
    return [links, *facts]
