"""Where ``configs/`` and ``kernels/`` are: in a checkout beside the package, installed inside."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def resource_folder(name: str) -> Path:
    """The folder ``configs`` or ``kernels``.

    Raises
    ------
    FileNotFoundError
        If the installation lacks it.
    """
    for base in (_PACKAGE / "_resources", _PACKAGE.parent):
        if (base / name).is_dir():
            return base / name
    raise FileNotFoundError(f"the installed dgl_mgpu has no folder '{name}': install it again")
