"""Checksums that files hold themselves: of JSON objects, and of archives."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

_KEY = "crc32"


def with_sum(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values and, last, their sum."""
    return {**values, _KEY: _sum(values)}


def without_sum(values: Any) -> Any:
    """What `with_sum` was given.  Values without a sum, of earlier versions, stay as they are.

    Raises ValueError if it was given something else.
    """
    if not isinstance(values, dict) or _KEY not in values:
        return values
    rest = {key: value for key, value in values.items() if key != _KEY}
    try:
        expected = _sum(rest)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if values[_KEY] != expected:
        raise ValueError(f"its {_KEY} is {values[_KEY]!r:.20}, that of what it holds {expected}")
    return rest


def _sum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())


def damaged_part(archive: zipfile.ZipFile) -> str | None:
    """The first part of an archive that is not as it was written; torch does not look.

    Raises whatever damaged bytes lead to (`DAMAGE`).
    """
    return archive.testzip() or _no_file(archive)


def _no_file(archive: zipfile.ZipFile) -> str | None:
    """A part that torch would take for a folder, and leave a tensor's memory as it finds it."""
    return next((part.filename for part in archive.infolist() if part.external_attr & 0x10), None)


#: What the readers of zip archives and pickles raise at bytes that make no sense to them.
DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError,
    TypeError, LookupError, ArithmeticError, AttributeError,
)  # fmt: skip
