"""The machine that a run was on, and the versions of what it used."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from dgl_mgpu.utils.units import human_bytes

_PACKAGES = ("dgl-mgpu", "dgl", "torch", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x")


def environment() -> dict[str, str]:
    """This machine and these versions, by what they are called; what is not known is left out."""
    import torch  # who only reads a report does without it

    facts = {
        "CPU": _first_match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.machine(),
        "CPU cores": str(len(os.sched_getaffinity(0))),
        "host memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        facts[f"GPU {number}"] = (
            f"{gpu.name}, {human_bytes(gpu.total_memory)}, "
            f"{gpu.multi_processor_count} multiprocessors"
        )
    facts |= {
        "operating system": platform.platform(),
        "NVIDIA driver": _first_match(
            Path("/proc/driver/nvidia/version"), r"Kernel Module.*?\s(\d+\.[\d.]+)\s"
        ),
        "CUDA of torch": torch.version.cuda or "",
        "Python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }
    return {name: value for name, value in facts.items() if value}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_match(path: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found.group(1).strip() if found else ""
