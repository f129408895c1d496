from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
import resource
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dgl_mgpu.comm.serialization import dumps, loads
from dgl_mgpu.errors import CheckpointError
from dgl_mgpu.report import EpochReport, StageSeconds
from dgl_mgpu.train.checkpoint import checkpoint as statefile
from dgl_mgpu.train.checkpoint.checkpoint import (
    Checkpoint,
    SpilledState,
    checkpoints,
    require_resumable,
)
from dgl_mgpu.train.objectives import SingleLabel
from dgl_mgpu.train.trainer import Trainer

CONFIG = {
    "model": {"name": "gcn", "hidden": 16},
    "trainer": {"epochs": 3, "ranks": 1, "lr": 0.1},
    "store": {"policy": "auto"},
}


def make(epoch: int = 1) -> Checkpoint:
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 40)).sum().backward()
    optimizer.step()
    return Checkpoint(
        epoch=epoch,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        best_model=model.state_dict(),
        random=[torch.get_rng_state()],
        reports=[report(number) for number in range(1, epoch + 1)],
        config=CONFIG,
        plan={},
    )


def report(epoch: int) -> dict:
    seconds = StageSeconds(evaluate=0.0, total=1.0)
    return EpochReport(epoch, 1, 1, 0.5, 1.0, None, None, seconds, (), 1).to_dict()


def test_round_trip(tmp_path):
    saved = make()
    loaded = Checkpoint.load(saved.save(tmp_path))
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    moments = saved.optimizer["state"][0]["exp_avg"]
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], moments)
    assert torch.equal(loaded.random[0], saved.random[0])
    assert (loaded.epoch, loaded.reports, loaded.config, loaded.plan) == (
        saved.epoch, saved.reports, saved.config, saved.plan,
    )  # fmt: skip


def test_a_run_that_knew_of_no_captured_steps_goes_on_without_any(tmp_path):
    path = make().save(tmp_path)
    content = torch.load(path, weights_only=True)
    del content["captured"]
    torch.save(content, path)
    assert Checkpoint.load(path).captured == []


def epochs(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("epoch-")) for path in checkpoints(folder)]


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        (1, None, [10]),
        (3, None, [8, 9, 10]),
        (3, 7, [7, 8, 9, 10]),
        (2, 4, [6, 9, 10]),  # no checkpoint was written of the best epoch
        (2, 9, [9, 10]),
        (9, 10, [6, 7, 8, 9, 10]),
    ],
)
def test_a_folder_keeps_the_last_ones_and_the_best(tmp_path, keep, best, kept):
    for epoch in (6, 7, 8, 9):
        make(epoch).save(tmp_path / "checkpoints", keep=9)
    make(10).save(tmp_path / "checkpoints", keep, best)
    assert epochs(tmp_path / "checkpoints") == kept
    assert Checkpoint.load(tmp_path).epoch == 10


def test_a_run_that_goes_on_from_an_earlier_epoch_takes_back_the_later_ones(tmp_path):
    for epoch in (1, 2, 3, 4):
        make(epoch).save(tmp_path, keep=9)
    make(2).save(tmp_path, keep=2, best=4)
    assert epochs(tmp_path) == [1, 2]


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def test_in_place_of_a_damaged_one_the_one_before_is_taken(tmp_path, caplog):
    first, middle, last = [make(epoch).save(tmp_path, keep=3) for epoch in (1, 2, 3)]
    assert Checkpoint.load(tmp_path).epoch == 3 and not caplog.text
    damage(last)
    other = {**CONFIG, "model": {"name": "gat"}}
    assert Checkpoint.load(tmp_path).epoch == 2
    assert f"{last} is left out, it is damaged (" in caplog.text
    assert f"; {middle} is taken instead" in caplog.text
    require_resumable(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match="was saved with model"):
        require_resumable(tmp_path, other)
    with pytest.raises(CheckpointError, match=r"epoch-0003\.pt: it is damaged"):
        Checkpoint.load(last)  # asked for by name
    damage(middle)
    assert Checkpoint.load(tmp_path).epoch == 1
    damage(first)
    with pytest.raises(CheckpointError, match=r"epoch-0003.*damaged.*and so are the 2 before it"):
        Checkpoint.load(tmp_path)


def test_a_checkpoint_of_another_package_is_no_damage(tmp_path):
    make(1).save(tmp_path)
    torch.save({"format": 99}, tmp_path / "epoch-0002.pt")
    with pytest.raises(CheckpointError, match=r"epoch-0002\.pt: it is not a checkpoint of format"):
        Checkpoint.load(tmp_path)


def test_a_crash_while_writing_leaves_the_last_one(tmp_path, monkeypatch):
    make(1).save(tmp_path)

    def full_disk(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        make(2).save(tmp_path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["epoch-0001.pt"]
    assert Checkpoint.load(tmp_path).epoch == 1


def test_what_the_system_says_of_a_full_disk_is_told(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit of this process alone, whose words differ from those of a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; free space"):
            make(2).save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="choose another folder"):
        make().save(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_truncated(tmp_path, keep):
    path = make().save(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint.load(path)


def test_one_flipped_bit(tmp_path):
    path = make().save(tmp_path)
    data = bytearray(path.read_bytes())
    weight = make().model["weight"]
    needle = Checkpoint.load(path).model["weight"].numpy().tobytes()[: weight.element_size() * 8]
    data[data.find(needle) + 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint.load(path)


def test_a_part_that_became_a_folder(tmp_path):
    """Torch leaves memory as it is where a tensor's part is none."""
    path = make().save(tmp_path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = data.index(b"PK\x01\x02", archive.start_dir)
        while b"data/0" not in data[entry : entry + 100]:
            entry = data.index(b"PK\x01\x02", entry + 4)
    data[entry + 38] ^= 0x10  # of the attributes
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="data/0 is damaged"):
        Checkpoint.load(path)


def test_no_flipped_bit_gives_an_untyped_error(tmp_path):
    path = make().save(tmp_path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, len(data), 300):
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            Checkpoint.load(path)
        except CheckpointError:
            refused += 1
    assert refused > 200  # the rest hit padding and time stamps


def test_fields_of_another_type(tmp_path):
    path = make().save(tmp_path)
    content = torch.load(path, weights_only=True)
    for reports in ("{not json", 5):
        torch.save(content | {"reports": reports}, path)
        with pytest.raises(CheckpointError, match="not JSON"):
            Checkpoint.load(path)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "model": Trap()}, "trap.pt")
    with pytest.raises(CheckpointError, match="something other than"):
        Checkpoint.load(tmp_path / "trap.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError):
        Checkpoint.load(tmp_path / "raw.pt")
    assert not (tmp_path / "executed").exists()


def test_missing_and_foreign(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint.load(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Checkpoint.load(tmp_path)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of format"):
        Checkpoint.load(tmp_path / "other.pt")


def test_another_run_is_refused_and_another_machine_is_not():
    checkpoint = make()
    moved = {**CONFIG, "store": {"policy": "host"}, "trainer": {**CONFIG["trainer"], "ranks": 4}}
    checkpoint.require_same_run(moved)
    with pytest.raises(CheckpointError, match=r"model\.hidden=32.*model\.hidden=16"):
        checkpoint.require_same_run({**CONFIG, "model": {"name": "gcn", "hidden": 32}})
    narrow = {**CONFIG, "store": {"feature_dtypes": {"feat": "float16"}}}
    with pytest.raises(CheckpointError, match=r"store\.feature_dtypes\.feat"):
        checkpoint.require_same_run(narrow)
    checkpoint.require_same_run({**CONFIG, "store": {"feature_dtypes": {}}})
    renamed = dataclasses.replace(checkpoint, config={**CONFIG, "extra": 1})
    with pytest.raises(CheckpointError, match="extra"):
        renamed.require_same_run(CONFIG)


class _Resumes(Trainer):
    """A trainer that takes steps when it is told to."""

    steps_per_epoch = 1

    def __init__(self, fused: bool) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        super().__init__(model, optimizer, torch.device("cpu"), 1, SingleLabel())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        self.optimizer.step()

    def _run_epoch(self, number, validate):
        raise NotImplementedError

    def predict(self):
        raise NotImplementedError

    def _test(self):
        raise NotImplementedError


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_an_optimizer_goes_on_in_its_own_way(before, after):
    """Fused or not, as on a GPU and on a CPU."""
    whole, resumed = _Resumes(before), _Resumes(after)
    whole.step()
    state = whole.checkpoint(CONFIG)
    resumed.resume(loads(dumps(state)))
    assert resumed.optimizer.param_groups[0]["fused"] == after
    assert state.optimizer["param_groups"][0]["fused"] == before
    for _ in range(2):
        whole.step()
        resumed.step()
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())


def test_an_optimizer_of_other_groups_is_refused():
    trainer = _Resumes(False)
    state = trainer.checkpoint(CONFIG)
    state.optimizer["param_groups"].append({})
    with pytest.raises(CheckpointError, match="its states are not this run's"):
        trainer.resume(state)


# -- what is too large for memory ----------------------------------------------------------


def with_files(**content: bytes) -> Checkpoint:
    """A checkpoint whose states have files with what is given for them."""
    files = {each: SpilledState.copy_of(io.BytesIO(each)) for each in set(content.values())}
    saved = make()
    states = {
        name: {**getattr(saved, name), "rows._extra_state": files[each]}
        for name, each in content.items()
    }
    return dataclasses.replace(saved, **states)


def content_of(state: dict) -> bytes:
    return state["rows._extra_state"].path.read_bytes()


def test_files_come_back_and_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    last, best = b"last" * 5000, b"best" * 5000
    path = with_files(model=last, best_model=best).save(tmp_path / "checkpoints")
    loaded = Checkpoint.load(path)
    path.unlink()
    assert content_of(loaded.model) == last and content_of(loaded.best_model) == best
    assert "weight" in loaded.model
    assert content_of(copy.deepcopy(loaded.model)) == last
    assert content_of(loads(dumps(loaded.model))) == b""  # another rank's
    assert not list((tmp_path / "scratch").iterdir())


def test_what_two_states_share_is_saved_once(tmp_path):
    path = with_files(model=b"same" * 5000, best_model=b"same" * 5000).save(tmp_path)
    with zipfile.ZipFile(path) as archive:
        (member,) = (name for name in archive.namelist() if "/files/" in name)
        assert archive.read(member) == b"same" * 5000
    loaded = Checkpoint.load(path)
    assert loaded.model["rows._extra_state"] is loaded.best_model["rows._extra_state"]


def test_files_take_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(statefile, "_PIECE_BYTES", 1 << 20)
    size = 32 << 20
    with open(tmp_path / "large", "w+b") as file:
        file.truncate(size)
        state = {"rows._extra_state": SpilledState(file)}
        checkpoint = dataclasses.replace(make(), model=state)
        tracemalloc.start()
        try:
            loaded = Checkpoint.load(checkpoint.save(tmp_path))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert loaded.model["rows._extra_state"].path.stat().st_size == size
    assert most < size // 4


def test_a_file_with_one_flipped_bit(tmp_path):
    content = os.urandom(5000)
    path = with_files(model=content).save(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.find(content) + 4000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint.load(path)


def test_without_space_for_files(tmp_path, monkeypatch):
    path = with_files(model=b"rows").save(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"cannot be copied.*TMPDIR"):
        Checkpoint.load(path)


def test_a_state_that_is_written_to_no_file_is_empty():
    nothing = SpilledState.written_by(lambda path: None)
    assert nothing.path.read_bytes() == b""
    written = SpilledState.written_by(lambda path: path.write_bytes(b"rows"))
    assert written.path.read_bytes() == b"rows"
