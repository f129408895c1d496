"""The import of `dgl`, without packages that few of its functions use."""

from __future__ import annotations

from contextlib import AbstractContextManager

from dgl_mgpu.utils.late_imports import late_imports

#: Packages, and of their names those that no import and no making of a graph is to load.
LATE = {
    "networkx": ("networkx:Graph", "networkx.readwrite:json_graph"),
    "ogb": ("ogb.utils:smiles2graph",),
    "pandas": (),
    "requests": (),
    "scipy": (
        "scipy:io", "scipy.linalg:expm", "scipy.sparse:spmatrix", "scipy.spatial.distance:cdist",
    ),
}  # fmt: skip


def packages_at_their_first_use() -> AbstractContextManager[None]:
    """Execute ``dgl``, whose modules see packages that are loaded when they are used."""
    return late_imports(LATE)
