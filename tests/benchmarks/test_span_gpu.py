"""The benchmark of stores over machines runs without GPUs, and its figures are what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.span_gpu import Bench
from tests.benchmarks.fake_wholegraph import fake_peer

_SMALL = (
    *("--nodes=3000", "--edges=30000", "--rows=200", "--batch=32", "--steps=3", "--repeats=1"),
    *("--fanouts", "3", "3", "--hidden=8", "--replica-ratio", "0.1"),
)


def test_two_ranks_are_two_machines(tmp_path):
    out = tmp_path / "span.json"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    words = "--nproc-per-node=2", "-m", "benchmarks.span_gpu", *_SMALL, f"--out={out}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*torchrun, *words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    rows, step = json.loads(out.read_text())["figures"]
    assert rows["case"] == "200 rows of 512 B" and rows["ceiling"] > 0
    # Two hops, and features with labels, of two each, and now and then more.
    assert 6 <= step["more"]["collectives_a_batch"]["all_to_all_single"] <= 10
    calls = step["more"]["calls_a_batch"]
    assert 7 <= calls["waits"] < calls["operators"]
    assert 0.1 < step["more"]["remote_share_of_rows"] < 0.5


def test_the_peer_gathers_the_same_rows_from_distributed_memory(monkeypatch):
    peer, rows = fake_peer(monkeypatch), torch.randn(9, 4)
    ids = torch.tensor([7, 2, 5])
    with peer.table("cuda", 9, 4, lambda of: rows[of], kind="distributed") as gather:
        assert gather.__self__.kind == "distributed"
        ways = Bench._peers_ways(gather, ids, rows[ids])
        assert torch.equal(ways["peer, ids of 32 bits"](), rows[ids])
        assert torch.equal(ways["peer, ids in order"](), rows[ids.sort().values])
        with pytest.raises(ValueError, match="other rows were gathered"):
            Bench._peers_ways(gather, ids, rows[ids + 1])
