"""What was measured on a machine, kept in files for the next run."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.atomic_write import atomic_write
from dgl_mgpu.utils.checksums import with_sum, without_sum


@dataclass(frozen=True)
class TuningCache:
    """A file of what was found, by what it was found for."""

    name: str  # The file's
    format: int  # A higher number when older findings no longer hold
    kind: type  # Of a finding; others in the file are left out

    @property
    def path(self) -> Path:
        """Where it is, for all machines that share the folder."""
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return folder / "dgl_mgpu" / self.name

    def read(self) -> dict[str, Any]:
        """What was found before; nothing where the file is missing, damaged or an older one."""
        try:
            content = without_sum(safe_json.loads(self.path.read_text()))
            values = content["found"] if content["format"] == self.format else {}
            return {case: value for case, value in values.items() if type(value) is self.kind}
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def keep(self, values: Mapping[str, Any]) -> None:
        """Keep what was found, beside what others have found meanwhile."""
        try:
            whole = with_sum({"format": self.format, "found": {**self.read(), **values}})
            with atomic_write(self.path) as file:
                file.write((json.dumps(whole, indent=1) + "\n").encode())
        except (OSError, RuntimeError) as error:
            warnings.warn(f"what was measured is not kept for the next time: {error}", stacklevel=2)
