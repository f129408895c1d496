"""`dgl.sparse` on this package's operators, where its own C++ library is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dgl_mgpu.graph import sparse


@contextmanager
def operators_without_library() -> Iterator[None]:
    """Execute ``dgl.sparse``, with this package's operators if there is no library for this torch.

    Loading the library is the last thing that the module does: if it is missing, all names of the
    module are there, and look for operators in ``torch.ops.dgl_sparse``.
    """
    try:
        yield
    except FileNotFoundError:
        torch.ops.dgl_sparse = sparse  # type: ignore[attr-defined]
