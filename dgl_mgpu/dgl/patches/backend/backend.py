"""The import of `dgl.backend.backend` without a SyntaxWarning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_syntax_warnings() -> Iterator[None]:
    """Compile a module of DGL's without a word on its docstrings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        yield
