"""A run that goes on by itself when a rank is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dgl_mgpu.errors import CheckpointError, ConfigError, RankFailedError
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train import run as running
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import compose
from tests.environment import search_path
from tests.train.jobs import SMALL, at_step, equal_states, make_trainer, train


def killed_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


SCRIPT = """
import os
import signal
import sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
from dgl_mgpu.cli import main

def is_killed(optimizer, *arguments):
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps == 5 and os.environ["RANK"] == "1":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_pre_hook(is_killed)
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("names_folder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_torchrun_starts_ranks_again_that_go_on_with_the_run(tmp_path, data, names_folder):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = [*SMALL, data, "trainer.batch_size=128"]
    folder = tmp_path / "a run's=folder"
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=1", str(tmp_path / "script.py"), *options,
         *([f"hydra.run.dir='{folder}'".replace("n's", "n\\'s")] if names_folder else [])],
        env={**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    if not names_folder:
        (metrics,) = tmp_path.glob("outputs/*/*/metrics.jsonl")
        folder = metrics.parent
    whole = train(tmp_path / "whole", 2, *options)
    assert equal_states(Checkpoint.load(folder).model, Checkpoint.load(whole).model)
    reports, summary = read_metrics(folder / "metrics.jsonl")
    assert [report.epoch for report in reports] == [1, 2, 3]
    assert summary is not None and summary["restarts"] == 1


@pytest.mark.usefixtures("forked_ranks", "without_pictures")
def test_a_run_goes_on_by_itself_from_its_last_checkpoint(tmp_path, data, caplog):
    options = [*SMALL, data, "trainer.ranks=2", "trainer.batch_size=128", "trainer.max_restarts=1"]
    # About 360 training nodes, so 2 steps an epoch: in the third one.
    hook = partial(at_step, 5, 1, partial(killed_once, tmp_path / "was killed"))
    folder = tmp_path / "run"
    running.run(partial(make_trainer, hook), compose(options), folder)
    (told,) = [each.message for each in caplog.records if "restart" in each.message]
    assert "run rank 1: it was killed by SIGKILL" in told
    assert f"restart 1 of 1 continues from {folder / 'checkpoints' / 'epoch-000'}" in told
    whole = train(tmp_path / "whole", 2, *options)
    assert equal_states(Checkpoint.load(folder).model, Checkpoint.load(whole).model)
    (reports, summary), (expected, others) = (
        read_metrics(each / "metrics.jsonl") for each in (folder, whole)
    )
    assert [each.loss for each in reports] == [each.loss for each in expected]
    assert summary == {**others, "restarts": 1} and others["restarts"] == 0


def launched(errors: list[Exception], resumed: list[str | None]) -> Callable[..., None]:
    """In place of `launch`: ends with one error after the other, and then well."""

    def launch(work, num_ranks, make_trainer, config, folder, restarts, **options):
        assert restarts == len(resumed)
        resumed.append(config.trainer.resume)
        if errors:
            raise errors.pop(0)

    return launch


LOST = RankFailedError("run rank 1", "it was killed by SIGKILL", "mend the cause")


@pytest.mark.parametrize(
    ("errors", "most", "times"),
    [
        ([], 2, 1),
        ([LOST, LOST], 2, 3),
        ([LOST, LOST], 1, 2),  # once too often
        ([CheckpointError("resume", "it is damaged", "take another")], 2, 1),  # it would come again
    ],
)
def test_a_lost_rank_is_started_again_a_few_times(tmp_path, monkeypatch, errors, most, times):
    resumed: list[str | None] = []
    left = [*errors]
    monkeypatch.setattr(running, "launch", launched(left, resumed))
    config = compose(["trainer.ranks=2", f"trainer.max_restarts={most}"])
    if len(errors) == times:
        with pytest.raises(type(errors[-1])):
            running.run(make_trainer, config, tmp_path)
    else:
        running.run(make_trainer, config, tmp_path)
    assert resumed == [None] * times  # there is no checkpoint


@pytest.mark.parametrize(("ranks", "rank"), [(1, None), (2, "0")])
def test_a_run_that_nothing_would_start_again_is_refused(monkeypatch, ranks, rank):
    if rank is not None:
        monkeypatch.setattr(running, "under_torchrun", lambda: True)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    config = compose([f"trainer.ranks={ranks}", "trainer.max_restarts=1"])
    with pytest.raises(ConfigError, match=r"trainer\.max_restarts=1"):
        running.check_start(config)
