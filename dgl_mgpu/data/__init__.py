"""Data sets: OGB, Planetoid, the Facebook page graph, Reddit, and generated graphs.

Those of one type of nodes and edges are loaded by `load`, heterogeneous ones by `load_hetero`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dgl_mgpu.data import (
    facebook,
    generate,
    igbh,
    ogb,
    ogb_hetero,
    planetoid,
    reddit,
    relations,
)
from dgl_mgpu.data.checks import UNLABELLED, require_labelled_split, require_options
from dgl_mgpu.data.csc import CSC, csc_from_chunks, from_edges
from dgl_mgpu.data.dataset import Dataset
from dgl_mgpu.data.generate import SHAPES, GraphSpec
from dgl_mgpu.data.hetero import HeteroDataset, without_inputs
from dgl_mgpu.errors import ConfigError, nearest

__all__ = [
    "CSC",
    "HETEROGENEOUS",
    "SHAPES",
    "UNLABELLED",
    "Dataset",
    "GraphSpec",
    "HeteroDataset",
    "csc_from_chunks",
    "from_edges",
    "load",
    "load_hetero",
    "names",
    "require_labelled_split",
    "without_inputs",
]

Loaded = TypeVar("Loaded", Dataset, HeteroDataset)

_LOADERS: dict[str, Callable[..., Dataset]] = {
    **dict.fromkeys(("cora", "citeseer", "pubmed"), planetoid.load),
    "facebook": facebook.load,
    "reddit": reddit.load,
    **dict.fromkeys(("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "ogbn-proteins"), ogb.load),
    "generated": generate.load,
    **dict.fromkeys((f"generated-{shape}" for shape in SHAPES), generate.load),
}

_HETERO_LOADERS: dict[str, Callable[..., HeteroDataset]] = {
    "ogbn-mag": ogb_hetero.load,
    relations.NAME: relations.load,
    igbh.NAME: igbh.load,
}

#: Names of the data sets that have several types of nodes or edges.
HETEROGENEOUS = tuple(_HETERO_LOADERS)


def names() -> list[str]:
    """Return the names of all data sets."""
    return [*_LOADERS, *_HETERO_LOADERS]


def load(name: str, root: str | Path, **options: Any) -> Dataset:
    """Load a data set of one type of nodes and edges by name.

    Parameters
    ----------
    name : str
        One of `names`.
    root : str or Path
        Folder of the data, the same for all data sets.
    **options
        Options of the data set's own ``load``: ``self_loops`` for all of them; see `planetoid`,
        `facebook`, `ogb` and `generate`.

    Raises
    ------
    ConfigError
        The name or an option is unknown; the message has the nearest one.  Or it is heterogeneous.
    DataFormatError
        Data are missing and cannot be downloaded, or are truncated or corrupt.
    """
    if name in HETEROGENEOUS:
        raise ConfigError(
            f"load data set {name!r} as a graph of one type of nodes and edges",
            "it has several types of nodes or edges",
            "use dgl_mgpu.data.load_hetero",
        )
    return _load(_LOADERS, name, root, options)


def load_hetero(name: str, root: str | Path, **options: Any) -> HeteroDataset:
    """Load a heterogeneous data set by name.

    Parameters
    ----------
    name : str
        One of `HETEROGENEOUS`.
    root : str or Path
        Folder of the data, the same for all data sets.
    **options
        Options of the data set's own ``load``: see `ogb_hetero`, `relations` and `igbh`.

    Raises
    ------
    ConfigError
        The name or an option is unknown; the message has the nearest one.
    DataFormatError
        Data are missing and cannot be downloaded, or are truncated or corrupt.
    """
    return _load(_HETERO_LOADERS, name, root, options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check a data set's name and the options of its ``load``, before anything is read or made.

    Raises ConfigError for an unknown name or option, and for a generator's option out of its range.
    """
    _loader({**_LOADERS, **_HETERO_LOADERS}, name, options)
    if name == relations.NAME:
        relations.named_spec(**options)
    elif name == igbh.NAME:
        igbh.named_spec(**options)
    elif name.startswith("generated"):
        generate.named_spec(name, **options)


def _load(
    loaders: Mapping[str, Callable[..., Loaded]],
    name: str,
    root: str | Path,
    options: Mapping[str, Any],
) -> Loaded:
    return _loader(loaders, name, options)(name, Path(root).expanduser(), **options)


def _loader(
    loaders: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """The loader of a name, which must know the options; one that takes any checks them itself."""
    if name not in loaders:
        known = list(_HETERO_LOADERS) if loaders is _HETERO_LOADERS else names()
        raise ConfigError(
            f"load data set {name!r}", "there is no data set of this name", nearest(name, known)
        )
    parameters = inspect.signature(loaders[name]).parameters.values()
    if not any(option.kind is option.VAR_KEYWORD for option in parameters):
        allowed = [option.name for option in parameters if option.kind is option.KEYWORD_ONLY]
        require_options(name, options, allowed)
    return loaders[name]
