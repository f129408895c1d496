"""Which way to exchange rows was the fastest, kept in a file for the next run."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from dgl_mgpu.store import calibration

#: Of the file; a higher number when exchanges have changed and older findings no longer hold.
_FORMAT = 1


def cache_file() -> Path:
    """Where it is kept, for all machines that share the folder."""
    return calibration.cache_file().with_name("exchanges.json")


def read() -> dict[str, str]:
    """What was found before; nothing where the file is missing, damaged or of another format."""
    try:
        kept = json.loads(cache_file().read_text())
        found = kept["found"] if kept["format"] == _FORMAT else {}
        return {case: way for case, way in found.items() if isinstance(way, str)}
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def write(found: Mapping[str, str]) -> None:
    """Keep what was found, beside what others have found meanwhile."""
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"format": _FORMAT, "found": {**read(), **found}}
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text(json.dumps(whole, indent=1) + "\n")
        written.replace(path)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"what was measured is not kept for the next time: {error}", stacklevel=2)
