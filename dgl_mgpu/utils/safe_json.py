"""JSON that somebody else may have written, or changed."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """What ``json.loads`` returns.

    Raises ValueError if it is not JSON, or nested so deeply that Python's parser gives up.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
