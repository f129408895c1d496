"""A rank that waits for its GPU for ever ends its process, and says where it waits."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.environment import search_path
from tests.train.jobs import SMALL

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)

SCRIPT = """
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from dgl_mgpu.cli import main

def hang(optimizer, *arguments):
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps == 5:
        torch.cuda._sleep(1 << 37)  # about a minute; a GPU is never to be left without an end
        waits_for_the_gpu()

def waits_for_the_gpu():
    torch.cuda.synchronize()

register_optimizer_step_pre_hook(hang)
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_gpu_that_is_waited_for_is_noticed(data, tmp_path, graphs):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable, str(tmp_path / "script.py"), *SMALL, data, "store.device=cuda",
        f"trainer.cuda_graphs={graphs}", "trainer.hang_after=15",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": search_path()}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    assert re.search(r"cannot run rank 0: nothing has advanced for 15 s: it hangs in stage", said)
    assert "in waits_for_the_gpu" in said
