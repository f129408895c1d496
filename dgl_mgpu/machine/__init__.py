"""What a machine is: GPUs, the links between them, host memory and disk, as plain numbers."""

from dgl_mgpu.machine.cluster import Cluster, Network, cluster
from dgl_mgpu.machine.presets import preset, preset_names
from dgl_mgpu.machine.probe import measure, probe, probe_shared_memory
from dgl_mgpu.machine.topology import HostGroup, Topology

__all__ = [
    "Cluster",
    "HostGroup",
    "Network",
    "Topology",
    "cluster",
    "measure",
    "preset",
    "preset_names",
    "probe",
    "probe_shared_memory",
]
