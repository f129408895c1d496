"""`update_all` reaches its kernel through few files, which docs/architecture.md names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import dgl
import dgl.function as fn
import torch

import dgl_mgpu
from dgl_mgpu.graph.dispatch import tensor_backed_graphs

PACKAGE = Path(dgl_mgpu.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def files_of(call: Callable[[], object]) -> list[str]:
    """Files of the package with functions that are called meanwhile, in order."""
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files[path.relative_to(PACKAGE).as_posix()] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files)


def test_update_all_goes_through_the_files_that_the_page_names():
    with tensor_backed_graphs():
        g = dgl.rand_graph(50, 300)
        g.ndata["h"] = torch.randn(50, 8).requires_grad_()
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))  # makes formats, loads modules
        found = files_of(lambda: g.update_all(fn.copy_u("h", "m"), fn.sum("m", "out")))
    sentence = re.search(r"`update_all` of a sum goes through (.*?)\.\n", PAGE.read_text(), re.S)
    assert sentence
    assert found == re.findall(r"`([\w/]+\.py)`", sentence[1])
    assert len(found) <= 7
