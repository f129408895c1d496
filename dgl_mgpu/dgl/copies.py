"""Ranks that train a copy each without a word: torchrun's, of a script for one process."""

from __future__ import annotations

import os
import sys

from dgl_mgpu.utils.torchrun import under_torchrun

_is_noted = False


def note() -> None:
    """Remember that this rank moves a whole graph to a device, and no process group is there."""
    global _is_noted
    if not _is_noted and under_torchrun() and not _has_group():
        _is_noted = True


def warn() -> None:
    """At a script's end, say on the first rank that ranks have shared nothing.

    That is so if torchrun started several, each moved a graph to its device before there was a
    process group, and there is none now: none of them has sent anything to the others.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if _is_noted and ranks != "1" and os.environ.get("RANK") == "0" and not _has_group():
        print(
            f"python -m dgl_mgpu: each of {ranks} ranks ran the whole script, on a copy of the "
            "graph of its own; with --partition before the script they share one",
            file=sys.stderr,
        )


def _has_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
