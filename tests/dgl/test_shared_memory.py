"""Shared memory of DGL's embeddings is gone when the process is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BEGIN = """
import os, dgl_mgpu, dgl, torch
from pathlib import Path
name = "test_embedding_{}"
def made():
    embedding = dgl.nn.NodeEmbedding(100, 4, name)
    embedding.set_optm_state(None)
    rows = embedding(torch.arange(3))
    assert (Path("/dev/shm") / name).exists()
    # Autograd keeps a tensor that nothing frees before the process ends.
    return (embedding.weight * torch.ones(4, requires_grad=True)).sum(), rows
"""
_ENDS = {
    "main": "kept = made()",
    "raised": "kept = made()\nraise SystemExit(0)",
    "child": """
import torch.multiprocessing as mp
def run():
    global kept
    kept = made()
child = mp.get_context("fork").Process(target=run)
child.start(), child.join()
raise SystemExit(child.exitcode)
""",
    # What another process has made under the name since stays.
    "another": """
kept = made()
path = Path("/dev/shm") / name
path.unlink(), path.write_text("another's")
""",
}


@pytest.mark.parametrize("end", _ENDS.values(), ids=_ENDS)
def test_it_is_unlinked(end, run_python):
    name = f"test_embedding_{os.getpid()}"
    path = Path("/dev/shm") / name
    try:
        run = run_python(_BEGIN.format(os.getpid()) + end)
        assert run.returncode == 0, run.stderr
        assert path.exists() == ("another" in end)
    finally:
        path.unlink(missing_ok=True)
