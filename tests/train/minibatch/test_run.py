"""The main job end to end, through the command line's own entry point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from dgl_mgpu.cli import main
from dgl_mgpu.data import load
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from tests.train.jobs import equal_states, shared_memory, start_command, until

SMALL = [
    "data.options.num_nodes=2000",
    "data.options.num_edges=20000",
    "trainer.batch_size=256",
    "model.hidden=32",
    "store.device=cpu",
]
ROOT = Path(__file__).parents[3]


def train(folder: Path, *overrides: str) -> Path:
    assert main(["train", *SMALL, f"hydra.run.dir={folder}", *overrides]) == 0
    return folder


def test_a_run_learns_and_leaves_its_report(tmp_path, data, capsys):
    folder = train(tmp_path / "run", data, "trainer.epochs=8", "trainer.lr=0.01")
    reports, summary = read_metrics(folder / "metrics.jsonl")
    assert [report.epoch for report in reports] == list(range(1, 9))
    assert reports[-1].loss < reports[0].loss
    # Chance is 10 %, and features alone give about 57 %.
    assert summary["test_accuracy"] > 0.75
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("events.out.tfevents.*"))
    kept = {6, 7, 8, summary["best_epoch"]}
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {f"epoch-{epoch:04d}.pt" for epoch in kept}
    feat = [tier for tier in reports[-1].tiers if tier.table == "feat"]
    assert sum(tier.bytes for tier in feat) == 64 * 4 * sum(tier.rows for tier in feat)
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("model", ["gcn", "gat", "gin", "rgcn", "pinsage"])
def test_every_model_learns(tmp_path, data, model):
    folder = train(tmp_path / "run", data, f"model={model}", "trainer.epochs=6", "trainer.lr=0.01")
    _, summary = read_metrics(folder / "metrics.jsonl")
    assert summary["test_accuracy"] > 0.5


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat", "gin", "rgcn", "pinsage"])
def test_every_model_learns_in_half_precision(tmp_path, data, model):
    options = data, f"model={model}", "trainer.epochs=2", "trainer.lr=0.01"
    folders = [
        train(tmp_path / precision, *options, f"trainer.precision={precision}")
        for precision in ("float32", "bfloat16")
    ]
    whole, half = ([r.loss for r in read_metrics(f / "metrics.jsonl")[0]] for f in folders)
    assert half == pytest.approx(whole, rel=0.1) and half != whole


@pytest.mark.usefixtures("without_pictures")
def test_where_nothing_is_captured_steps_are_the_same(tmp_path, data):
    # About 1200 seeds: one rank has no batch in the last round, and the other's is a part of one.
    options = data, "trainer.ranks=2", "trainer.epochs=2", "trainer.batch_size=500"
    folders = [
        train(tmp_path / graphs, *options, f"trainer.cuda_graphs={graphs}")
        for graphs in ("false", "true")
    ]
    one, other = (read_metrics(folder / "metrics.jsonl") for folder in folders)
    assert [r.loss for r in other[0]] == pytest.approx([r.loss for r in one[0]], rel=1e-5)
    assert other[1]["test_accuracy"] == pytest.approx(one[1]["test_accuracy"], abs=0.01)
    seconds = other[0][0].seconds
    assert seconds.compute > 0 and seconds.forward is None and one[0][0].seconds.forward > 0


@pytest.mark.usefixtures("without_pictures")
def test_ranks_and_workers_train_together(tmp_path, data):
    # About 1200 seeds in batches of 250: the ranks have 3 and 2 of them.
    seeds = len(load("generated", data.partition("=")[2], num_nodes=2000, num_edges=20000).train)
    assert 1000 < seeds <= 1250
    folder = train(
        tmp_path / "run", data, "trainer.ranks=2", "trainer.epochs=5", "trainer.lr=0.02",
        "trainer.batch_size=250", "sampler.num_workers=1",
    )  # fmt: skip
    reports, summary = read_metrics(folder / "metrics.jsonl")
    assert all(report.ranks == 2 and report.seeds == seeds for report in reports)
    shares = reports[-1].tier_shares("feat")
    assert 0.4 < shares["device"] < 0.6
    assert summary["test_accuracy"] > 0.7


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    return Checkpoint.load(folder).model


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (4, 1)])
def test_killed_and_resumed_is_bit_identical(tmp_path, data, ranks, workers):
    options = [*SMALL, data, f"trainer.ranks={ranks}", "trainer.batch_size=64"]
    options.append(f"sampler.num_workers={workers}")
    # Processes of their own throughout: sums depend on the number of threads, which tests change.
    killed = start_command(tmp_path / "killed", *options, "trainer.epochs=100000")
    checkpoints = tmp_path / "killed" / "checkpoints"
    until(lambda: any(path.name > "epoch-0001.pt" for path in checkpoints.glob("epoch-*.pt")))
    killed.kill()
    killed.join()
    epoch = Checkpoint.load(tmp_path / "killed").epoch
    assert epoch >= 2
    options.append(f"trainer.epochs={epoch + 2}")
    resume = f"trainer.resume={tmp_path / 'killed'}"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for command in (start_command(whole, *options), start_command(resumed, *options, resume)):
        command.join()
        assert command.exitcode == 0
    assert equal_states(final_state(whole), final_state(resumed))
    reports, _ = read_metrics(resumed / "metrics.jsonl")
    whole_reports, _ = read_metrics(whole / "metrics.jsonl")
    assert len(reports) == epoch + 2
    assert [r.loss for r in reports] == [r.loss for r in whole_reports]


@pytest.mark.usefixtures("without_pictures")
def test_same_seed_same_run_and_another_seed_another(tmp_path, data):
    options = [data, "trainer.epochs=1"]
    first = final_state(train(tmp_path / "a", *options))
    assert equal_states(first, final_state(train(tmp_path / "b", *options)))
    assert equal_states(
        first, final_state(train(tmp_path / "c", *options, "sampler.num_workers=2"))
    )
    assert not equal_states(first, final_state(train(tmp_path / "d", *options, "trainer.seed=1")))


# Two ranks with workers, which train until something ends them.
ENDLESS = [*SMALL, "trainer.ranks=2", "trainer.epochs=100000", "sampler.num_workers=1"]


def ends_all_that(number: int, how: signal.Signals, shared: set[str]) -> None:
    """A signal to a run's process ends the others of the run too, and nothing is left of them."""
    children = psutil.Process(number).children(recursive=True)
    assert len(children) >= 2
    os.kill(number, how)
    until(lambda: not any(child.is_running() for child in children))
    # Tests that run at the same time have some, too: torch's says whose it is.
    others = "torch_"
    own = tuple(f"torch_{child.pid}_" for child in children)
    left = {n for n in shared_memory() - shared if n.startswith(own) or not n.startswith(others)}
    until(lambda: not left & shared_memory())


def test_an_interrupted_run_leaves_no_process_and_no_shared_memory(tmp_path, data):
    shared = shared_memory()
    command = [sys.executable, "-m", "dgl_mgpu.cli", "train", *ENDLESS, data]
    # A shell has the jobs that it puts in the background ignore it, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = subprocess.Popen(
        [*command, f"hydra.run.dir={tmp_path}"], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    signal.signal(signal.SIGINT, before)
    until((tmp_path / "checkpoints").is_dir)
    ends_all_that(run.pid, signal.SIGINT, shared)
    shown, errors = run.communicate()
    assert (run.returncode, errors) == (130, b"")
    assert b"stopped by SIGINT; the last checkpoint is " in shown


def test_a_killed_run_leaves_no_process_and_no_shared_memory(tmp_path, data):
    shared = shared_memory()
    run = start_command(tmp_path / "run", *ENDLESS, data)
    until((tmp_path / "run" / "checkpoints").is_dir)
    ends_all_that(run.pid, signal.SIGKILL, shared)


def test_a_killed_rank_ends_the_run_with_the_reason(tmp_path, data):
    run = start_command(tmp_path / "run", *ENDLESS, data)
    until((tmp_path / "run" / "checkpoints").is_dir)
    first, _ = sorted(psutil.Process(run.pid).children(), key=lambda rank: rank.pid)
    first.kill()
    run.join()
    assert run.exitcode == 1
    assert "rank 0: it was killed by SIGKILL" in (tmp_path / "run" / "errors").read_text()


@pytest.mark.usefixtures("without_pictures")
def test_resume_alone_goes_on_as_the_run_was_told_to(tmp_path, data):
    options = [data, "trainer.batch_size=64", "model.dropout=0.1"]
    whole = train(tmp_path / "whole", *options, "trainer.epochs=2")
    train(tmp_path / "half", *options, "trainer.epochs=1")
    for at in (tmp_path / "half", next((tmp_path / "half" / "checkpoints").iterdir())):
        rest = tmp_path / at.name.replace("half", "rest")
        resume = [f"trainer.resume={at}", "trainer.epochs=2", f"hydra.run.dir={rest}"]
        assert main(["train", *resume]) == 0
        assert equal_states(final_state(whole), final_state(rest))


def test_resume_refuses_what_is_not_this_run(tmp_path, data, capsys):
    folder = train(tmp_path / "run", data, "trainer.epochs=1")
    resume = f"trainer.resume={folder}"
    again = ["train", *SMALL, data, f"hydra.run.dir={tmp_path / 'again'}", resume]
    for override, message in (
        (["model.hidden=16"], "model.hidden=16"),
        (["trainer.epochs=1"], "raise trainer.epochs"),
    ):
        assert main([*again, *override]) == 1
        assert message in capsys.readouterr().err
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert main([*again, "trainer.epochs=2"]) == 1
    assert "damaged" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_store_on_gpus_that_are_missing_is_told_before_data_is_there(tmp_path, capsys):
    options = [*SMALL, f"data.root={tmp_path / 'data'}", "store.device=cuda"]
    assert main(["train", *options, f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("without_pictures")
def test_gcn_on_cora_is_kipfs(tmp_path, real_data):
    folder = tmp_path / "run"
    assert (
        main(
            ["train", "data=cora", "model=gcn", f"data.root={real_data}", f"hydra.run.dir={folder}"]
        )
        == 0
    )
    _, summary = read_metrics(folder / "metrics.jsonl")
    # The mean over seeds is above 81 %; a single run scatters by about one point.
    assert summary["test_accuracy"] > 0.785


@pytest.mark.usefixtures("without_pictures")
def test_metrics_are_json_lines(tmp_path, data):
    folder = train(tmp_path / "run", data, "trainer.epochs=1")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
