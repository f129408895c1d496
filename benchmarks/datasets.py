"""Data sets that accuracies are measured on: where their files are, and that they are there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgl_mgpu.data import Dataset, load
from dgl_mgpu.errors import DataFormatError

#: Exit status of a program whose files are not there; the last line that it prints names them.
NO_FILES = os.EX_NOINPUT
#: Options of data sets: OGB's directed ones are trained on in both directions.
OPTIONS: dict[str, dict[str, Any]] = {
    "ogbn-arxiv": {"add_reverse": True},
    "ogbn-papers100M": {"add_reverse": True},
    "ogbn-proteins": {"mean_edge_features": True},
    "proteins' size": {
        "num_nodes": 132_534, "num_edges": 39_561_252, "num_features": 128, "num_labels": 112,
    },
}  # fmt: skip
#: Sets that are of a size, with labels made up, by what makes them.
_MADE = {"proteins' size": "generated"}


def datasets_here(names: Sequence[str], root: str | Path) -> dict[str, Dataset]:
    """Load data sets by name, or end the program with :data:`NO_FILES` before it does any work."""
    found, absent = {}, []
    for name in names:
        try:
            found[name] = dataset_here(name, root)
        except DataFormatError as error:
            print(error)
            absent.append(name)
    if absent:
        print(f"needs the files of {', '.join(absent)}")
        sys.exit(NO_FILES)
    return found


def dataset_here(name: str, root: str | Path) -> Dataset:
    """Load a data set; OGB's, which may be very large, not by way of a download.

    Raises
    ------
    DataFormatError
        If a file is not there, or damaged.
    """
    folder = Path(root).expanduser() / name.replace("-", "_")
    if name.startswith("ogbn-") and not (folder / "raw").is_dir():
        raise DataFormatError(
            f"train on {name}",
            f"no folder {folder / 'raw'}",
            f"put OGB's folder of it there, or have 'dgl-mgpu train data={name} "
            f"data.root={root}' download it",
        )
    return load(_MADE.get(name, name), root, **OPTIONS.get(name, {}))


def data_overrides(name: str, root: str | Path) -> tuple[str, ...]:
    """What has the command line load the same as :func:`dataset_here`."""
    options = (f"data.options.{key}={value}" for key, value in OPTIONS.get(name, {}).items())
    return f"data={_MADE.get(name, name)}", f"data.root={root}", *options
