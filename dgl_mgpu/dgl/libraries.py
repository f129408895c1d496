"""DGL's C++ libraries: its binary, and those that are built for one exact torch version."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
import os
from pathlib import Path

from dgl_mgpu.dgl.environment import installed_version
from dgl_mgpu.errors import ConfigError

log = logging.getLogger(__name__)

#: Whether to use DGL's binary, libdgl: ``off``, or ``auto``, which is where it loads.
VARIABLE = "DGL_MGPU_LIBDGL"

#: Paths in DGL's folder.
SPARSE_LIBRARY = "dgl_sparse/libdgl_sparse_pytorch_{torch}.so"
GRAPHBOLT_LIBRARY = "graphbolt/libgraphbolt_pytorch_{torch}.so"


def has_library(library: str, dgl_folder: Path) -> bool:
    """Whether DGL ships a library for the installed torch."""
    torch = (installed_version("torch") or "").partition("+")[0]
    return (dgl_folder / library.format(torch=torch)).is_file()


@functools.cache
def uses_libdgl() -> bool:
    """Whether DGL runs on its binary: unless `VARIABLE` says ``off``, or it does not load.

    Asked while DGL is imported; from the first answer on graphs on the CPU are made accordingly.

    Raises
    ------
    ConfigError
        If the variable says something else.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in ("auto", "off"):
        raise ConfigError(
            f"{VARIABLE}={choice}", "it is 'auto' or 'off'", "unset it to use libdgl where it loads"
        )
    if choice == "auto":
        failure = _failure_of_libdgl()
        if failure is None:
            return True
        log.warning("DGL runs on this package's operators alone: %s", failure)
    importlib.import_module("dgl_mgpu.graph.dispatch").do_without_library()
    return False


def _failure_of_libdgl() -> str | None:
    """Why DGL's binary does not load; None if it does."""
    paths = importlib.import_module("dgl._ffi.libinfo").find_lib_path(optional=True)
    if paths is None:
        return "its folder has no libdgl for this system"
    try:
        ctypes.CDLL(paths[0])
    except OSError as error:
        return str(error)
    return None


def graphbolt_works_by_itself(dgl_folder: Path) -> bool:
    """Whether `dgl.graphbolt` has all that it needs: its library, and torchdata's datapipes."""
    return has_library(GRAPHBOLT_LIBRARY, dgl_folder) and _is_installed("torchdata.datapipes")


def dgl_works_by_itself(dgl_folder: Path) -> bool:
    """Whether every library of DGL exists for the installed torch: then nothing needs mending."""
    if os.environ.get(VARIABLE, "auto") == "off":
        return False
    return has_library(SPARSE_LIBRARY, dgl_folder) and graphbolt_works_by_itself(dgl_folder)


def _is_installed(module: str) -> bool:
    """Whether ``package.module`` exists, without importing the package (it may warn)."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any((Path(folder) / rest).is_dir() for folder in folders)
