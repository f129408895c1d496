"""The import of `dgl.backend`: PyTorch unless the user chose another, without output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

_BACKENDS = ("pytorch", "tensorflow", "mxnet")


def get_preferred_backend() -> str:
    """What DGL's function of this name answers, without printing or writing when undecided."""
    return _chosen() or "pytorch"


def _chosen() -> str | None:
    name = os.environ.get("DGLBACKEND")
    if name is None:
        folder = os.environ.get("DGLDEFAULTDIR", os.path.join(os.path.expanduser("~"), ".dgl"))
        try:
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
                name = json.load(file).get("backend", "").lower()
        except (FileNotFoundError, json.JSONDecodeError):
            name = None  # the file of a rank that was still writing it reads as undecided
    return name if name in _BACKENDS else None


@contextmanager
def pytorch_by_default() -> Iterator[None]:
    """Decide for PyTorch while ``dgl.backend`` is executed, if the user has not decided.

    DGL asks inside the module it defines the question in, where only its environment variable
    can answer; it is set in this process and for this moment alone.
    """
    if _chosen() is not None:
        yield
        return
    before = os.environ.get("DGLBACKEND")
    os.environ["DGLBACKEND"] = "pytorch"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DGLBACKEND"]
        else:
            os.environ["DGLBACKEND"] = before
