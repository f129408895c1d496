"""What a benchmark ran on, and the JSON that keeps its figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("torch", "dgl", "numpy", "numba", "cupy-cuda13x"),
    *("pylibwholegraph-cu13", "torch-geometric", "pyg-lib"),
)


def keep(options: argparse.Namespace, figures: Any) -> None:
    """Write figures to the file that ``--out`` names, if it does, with options and machine."""
    if options.out is None:
        return
    content = {
        "machine": describe_machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "figures": figures,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    """Processor, GPUs, versions and commit."""
    import torch

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    # A copy of the checkout without its history is told what it is a copy of.
    if "DGL_MGPU_COMMIT" in os.environ:
        return os.environ["DGL_MGPU_COMMIT"]
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or "unknown"
