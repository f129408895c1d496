"""Data sets: OGB, Planetoid, the Facebook page graph, and generated graphs in OGB's format."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import facebook, generate, ogb, planetoid
from .csc import CSC, csc_from_chunks, from_edges
from .dataset import UNLABELLED, Dataset
from .generate import SHAPES, GraphSpec

__all__ = [
    "CSC",
    "SHAPES",
    "UNLABELLED",
    "Dataset",
    "GraphSpec",
    "csc_from_chunks",
    "from_edges",
    "load",
    "names",
]

_LOADERS: dict[str, Callable[..., Dataset]] = {
    **dict.fromkeys(("cora", "citeseer", "pubmed"), planetoid.load),
    "facebook": facebook.load,
    **dict.fromkeys(("ogbn-arxiv", "ogbn-products", "ogbn-papers100M"), ogb.load),
    "generated": generate.load,
    **dict.fromkeys((f"generated-{shape}" for shape in SHAPES), generate.load),
}


def names() -> list[str]:
    """Return the names of all data sets."""
    return list(_LOADERS)


def load(name: str, root: str | Path, **options: Any) -> Dataset:
    """Load a data set by name.

    Parameters
    ----------
    name : str
        One of `names`.
    root : str or Path
        Folder of the data, the same for all data sets.
    **options
        Options of the data set's own ``load``: ``self_loops`` for all of them; see `planetoid`,
        `facebook`, `ogb` and `generate`.

    Returns
    -------
    Dataset

    Raises
    ------
    ConfigError
        The name or an option is unknown; the message has the nearest ones.
    DataFormatError
        Data are missing and cannot be downloaded, or are truncated or corrupt.
    """
    if name not in _LOADERS:
        raise _unknown(f"load data set {name!r}", name, names())
    loader = _LOADERS[name]
    parameters = inspect.signature(loader).parameters.values()
    known = [option.name for option in parameters if option.kind is option.KEYWORD_ONLY]
    if not any(option.kind is option.VAR_KEYWORD for option in parameters):
        for option in options:
            if option not in known:
                raise _unknown(f"load {name} with option {option!r}", option, known)
    return loader(name, Path(root).expanduser(), **options)


def _unknown(asked: str, name: str, known: list[str]) -> ConfigError:
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)
    fix = "the nearest are " if near else "choose from "
    fix += ", ".join([by_lower[match] for match in near] or known)
    return ConfigError(asked, "no such name", fix)
