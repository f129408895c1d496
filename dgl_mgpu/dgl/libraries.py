"""DGL's C++ libraries, each of which is built for one exact torch version."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dgl_mgpu.dgl.environment import installed_version

#: Paths in DGL's folder.
SPARSE_LIBRARY = "dgl_sparse/libdgl_sparse_pytorch_{torch}.so"
GRAPHBOLT_LIBRARY = "graphbolt/libgraphbolt_pytorch_{torch}.so"


def has_library(library: str, dgl_folder: Path) -> bool:
    """Whether DGL ships a library for the installed torch."""
    torch = (installed_version("torch") or "").partition("+")[0]
    return (dgl_folder / library.format(torch=torch)).is_file()


def graphbolt_works_by_itself(dgl_folder: Path) -> bool:
    """Whether `dgl.graphbolt` has all that it needs: its library, and torchdata's datapipes."""
    return has_library(GRAPHBOLT_LIBRARY, dgl_folder) and _is_installed("torchdata.datapipes")


def dgl_works_by_itself(dgl_folder: Path) -> bool:
    """Whether every library of DGL exists for the installed torch: then nothing needs mending."""
    return has_library(SPARSE_LIBRARY, dgl_folder) and graphbolt_works_by_itself(dgl_folder)


def _is_installed(module: str) -> bool:
    """Whether ``package.module`` exists, without importing the package (it may warn)."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any((Path(folder) / rest).is_dir() for folder in folders)
