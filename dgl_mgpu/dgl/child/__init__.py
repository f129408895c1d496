"""Carries the import hook into the processes that a script run by ``python -m dgl_mgpu`` starts.

A child Python knows of its parent only what the environment tells it, whether it was started by
multiprocessing, torchrun or subprocess. The runner therefore puts this folder at the head of its
own ``PYTHONPATH``, which the children inherit; every Python imports the ``sitecustomize`` in it
at its start. The user's own shell and files stay as they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parent)
#: The child acts only in the Python installation that this package was started from.
PREFIX_VARIABLE = "_DGL_MGPU_RUNNER_PREFIX"


def mend_children() -> None:
    """Make every Python that this process starts from now on mend ``import dgl``; idempotent."""
    os.environ[PREFIX_VARIABLE] = sys.prefix
    folders = [f for f in os.environ.get("PYTHONPATH", "").split(os.pathsep) if f]
    if _FOLDER not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *folders])
