"""The tutorial's script, step by step, prints what the page shows."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks

DECIMAL = re.compile(r"\d+\.\d+")
#: Without GPUs, and on a port that no other job has.
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


def test_the_script_prints_what_the_page_shows(tmp_path):
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    steps = []
    for block, following in itertools.pairwise(blocks(ROOT / "docs" / "tutorial.md")):
        if block.file:
            (tmp_path / block.file).write_text(block.code)
        elif block.language == "diff":
            apply = ["git", "apply", "-p0", "--unidiff-zero", "-"]
            subprocess.run(apply, input=block.code, text=True, check=True, cwd=tmp_path)
        elif block.language == "bash" and following.language == "text":
            program, *words = block.code.split()
            command = [*PROGRAMS[program], *words]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            steps.append((block.code.strip(), done.stdout, following.code))
    assert [command for command, _, _ in steps] == [
        "python -m dgl_mgpu sage.py",
        "python sage.py",
        *["torchrun --nproc-per-node=2 sage.py"] * 2,
    ]
    # The first one's samples are those of DGL's C++, which depend on the number of threads.
    for command, printed, shown in steps[1:]:
        # Processors add up in other orders: of losses and accuracies the last digits may differ.
        assert DECIMAL.sub("#", printed) == DECIMAL.sub("#", shown), command
        found, expected = (list(map(float, DECIMAL.findall(text))) for text in (printed, shown))
        assert found == pytest.approx(expected, abs=0.006), command
