"""Makes ``import dgl`` work with a torch that is newer than DGL's binaries.

DGL's newest wheel on PyPI (2.1.0) carries C++ libraries for torch 2.0 to 2.2. Its core,
``libdgl.so``, works with any torch; what fails is the Python around it. `install` registers an
import hook that mends DGL's modules as they are imported. Nothing on disk, in the user's files or
in the environment is changed.

`registry` lists every change with its reason; `importer` carries them out; `patches` holds their
code; `graphbolt` stands in for GraphBolt's C++ library; `child` carries the hook into the
processes that ``python -m dgl_mgpu`` starts.
"""

from __future__ import annotations

import sys

from dgl_mgpu.dgl.environment import check_environment, installed_version
from dgl_mgpu.dgl.importer import PACKAGES, CompatFinder, replace_names
from dgl_mgpu.dgl.registry import REPLACEMENTS, SURROUNDINGS

__all__ = [
    "REPLACEMENTS",
    "SURROUNDINGS",
    "check_environment",
    "install",
    "installed_version",
]


def install() -> None:
    """Check Python and torch, and register the import hook; calling it again does nothing.

    Imports neither torch nor DGL, whose version is checked when it is imported. A package that has
    already been imported, and so works, is left alone; so is a DGL whose C++ libraries exist for
    the installed torch.

    Raises
    ------
    UnsupportedEnvironmentError
        If Python or torch is missing or outside the supported range.
    """
    check_environment("python", "torch")
    if any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        return
    packages = {package for package in PACKAGES if package not in sys.modules}
    sys.meta_path.insert(0, CompatFinder(packages))  # type: ignore[arg-type]
    # After a failed ``import dgl``, its submodules stay in `sys.modules` and are not run again;
    # and Hydra fails after its import, which plugins of pytest may have brought about.
    for name, module in list(sys.modules.items()):
        is_left = name.startswith("hydra.") or ("dgl" in packages and name.startswith("dgl."))
        if is_left and module is not None:
            replace_names(module)
