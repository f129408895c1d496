"""What fails in the middle of a run: a typed error for all, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.backend.global_store.storage import TableStorage
from dgl_mgpu.data import load
from dgl_mgpu.errors import (
    CheckpointError,
    DeviceMemoryError,
    DGLMGPUError,
    OutputError,
    RankFailedError,
)
from dgl_mgpu.report import metrics
from dgl_mgpu.store import Ranks
from dgl_mgpu.training import launch as launching
from dgl_mgpu.training import watch
from dgl_mgpu.training.checkpoint import Checkpoint
from dgl_mgpu.training.launch import launch
from dgl_mgpu.training.stop import Stopped
from dgl_mgpu.training.trainer import Trainer
from tests.training.jobs import reports_of, train

pytestmark = pytest.mark.usefixtures("forked_ranks", "quick_causes")


@pytest.fixture
def quick_causes(monkeypatch) -> None:
    monkeypatch.setattr(launching, "_GATHER_SECONDS", 0.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("data")
    assert 320 < len(load("generated", str(root), num_nodes=600, num_edges=4000).train) <= 384
    return f"data.root={root}"


#: What was put in the place of what: runs of one rank are in this process.
_replaced: list[tuple[object, str, object]] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process, and nothing in shared memory."""
    shared = set(os.listdir("/dev/shm"))
    yield
    while _replaced:
        setattr(*_replaced.pop())
    mine = psutil.Process().children(recursive=True)
    assert [p for p in mine if p.is_running() and "rank" in p.name()] == []
    assert set(os.listdir("/dev/shm")) <= shared


# -- where in a run something happens --------------------------------------------------------------


def after(calls: int, act: Callable[[], None], owner: object, name: str) -> None:
    """Call ``act`` in place of a function, once that was called so many times."""
    original, count = getattr(owner, name), 0
    _replaced.append((owner, name, original))

    def counted(*arguments, **options):
        nonlocal count
        count += 1
        return act() if count > calls else original(*arguments, **options)

    setattr(owner, name, counted)


def sample(act: Callable[[], None], trainer: Trainer) -> None:
    after(4, act, trainer._train.sampler, "sample_blocks")


def gather(act: Callable[[], None], trainer: Trainer) -> None:
    after(20, act, TableStorage, "fetch")


def forward(act: Callable[[], None], trainer: Trainer) -> None:
    after(4, act, trainer.model, "forward")


def backward(act: Callable[[], None], trainer: Trainer) -> None:
    """In the middle of the exchange of gradients: of some they were sent, of others not."""
    first, *_ = trainer.model.parameters()
    count = 0

    def hook(gradient: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count > 4:
            act()

    first.register_hook(hook)


def update(act: Callable[[], None], trainer: Trainer) -> None:
    after(4, act, trainer.optimizer, "step")


def evaluate(act: Callable[[], None], trainer: Trainer) -> None:
    after(1, act, trainer, "evaluate")


def save(act: Callable[[], None], trainer: Trainer) -> None:
    """When the second checkpoint is about to get its name."""
    after(1, act, Path, "replace")


STAGES = [sample, gather, forward, backward, update, evaluate]


def on_rank(rank: int, stage: Callable, act: Callable[[], None], trainer: Trainer) -> None:
    """Hook of a run: let it happen on one rank."""
    if (dist.get_rank() if dist.is_initialized() else 0) == rank:
        stage(act, trainer)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise KeyError("lost")


def has_no_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")


def has_no_memory() -> None:
    torch.empty(1 << 60)


def is_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fails(folder: Path, hook: partial, *options: str, num_ranks: int = 2) -> DGLMGPUError:
    """The error with which a run of these ranks ends, at once."""
    begin = time.monotonic()
    with pytest.raises(DGLMGPUError) as failure:
        train(folder, num_ranks, *options, hook=hook)
    assert time.monotonic() - begin < 30
    return failure.value


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_killed(tmp_path, data, stage):
    error = fails(tmp_path, partial(on_rank, 1, stage, is_killed), data)
    assert isinstance(error, RankFailedError)
    assert "rank 1: it was killed by SIGKILL" in str(error)


@pytest.mark.parametrize("stage", [sample, backward])
def test_a_stage_raises(tmp_path, data, stage, capfd):
    error = fails(tmp_path, partial(on_rank, 1, stage, raises), data)
    assert isinstance(error, RankFailedError)
    assert "rank 1: it raised KeyError: 'lost'" in str(error)
    assert "Traceback" in capfd.readouterr().err


def test_the_first_rank_is_killed_while_it_writes_a_checkpoint(tmp_path, data):
    error = fails(tmp_path / "run", partial(on_rank, 0, save, is_killed), data)
    assert "rank 0: it was killed by SIGKILL" in str(error)
    assert Checkpoint.load(tmp_path / "run").epoch == 1
    assert list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    options = [data, "trainer.checkpoint_every=3", f"trainer.resume={tmp_path / 'run'}"]
    again = train(tmp_path / "run", 1, *options)
    assert [path.name for path in (again / "checkpoints").iterdir()] == ["epoch-0003.pt"]


@pytest.mark.parametrize(("num_ranks", "act"), [(1, has_no_memory), (2, has_no_gpu_memory)])
def test_memory_is_too_small_for_the_model(tmp_path, data, num_ranks, act):
    hook = partial(on_rank, num_ranks - 1, forward, act)
    error = fails(tmp_path, hook, data, num_ranks=num_ranks)
    assert isinstance(error, DeviceMemoryError)
    assert "lower trainer.batch_size" in str(error)


def test_memory_is_too_small_for_a_full_graph(tmp_path, data):
    hook = partial(on_rank, 0, backward, has_no_gpu_memory)
    error = fails(tmp_path, hook, data, "mode=fullgraph", "trainer.epochs=9", num_ranks=1)
    assert isinstance(error, DeviceMemoryError)
    assert "fullgraph.features=host" in str(error)


def test_the_disk_is_full_for_a_checkpoint(tmp_path, data):
    error = fails(tmp_path, partial(on_rank, 0, save, is_full), data)
    assert isinstance(error, CheckpointError)
    assert "free space there" in str(error)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-0001.pt"]
    assert len(reports_of(tmp_path)) == Checkpoint.load(tmp_path).epoch == 1


def metrics_are_written(calls: int, act: Callable[[], None], trainer: Trainer) -> None:
    """Some of a line gets to the disk."""
    write, count = metrics.MetricsLog._write, 0

    def counted(self: metrics.MetricsLog, line: str) -> None:
        nonlocal count
        count += 1
        if count <= calls:
            return write(self, line)
        self._file.write(line[:10])
        return act()

    metrics.MetricsLog._write = counted


@pytest.mark.parametrize("calls", [1, 3])
def test_the_disk_is_full_for_metrics(tmp_path, data, calls):
    hook = partial(on_rank, 0, partial(metrics_are_written, calls), is_full)
    error = fails(tmp_path / "run", hook, data)
    assert isinstance(error, OutputError)
    assert "free space there" in str(error)
    # What was trained is not lost.
    assert Checkpoint.load(tmp_path / "run").epoch == min(calls + 1, 3)
    assert len(reports_of(tmp_path / "run")) == calls


def test_a_run_on_a_full_file_system(tmp_path, data):
    """In earnest; on a file system with room for the first checkpoint, not for the next."""
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=40k tmpfs {small} 2>/dev/null"):
        pytest.skip("file systems are root's to mount")
    try:
        with pytest.raises((CheckpointError, OutputError), match="No space left"):
            train(small / "run", 1, data, "model.hidden=16")
        assert not list((small / "run").rglob("*.partial"))
    finally:
        os.system(f"umount {small}")


def test_ranks_without_a_batch(tmp_path, data):
    """Two batches of training nodes, fewer of the others, three ranks."""
    options = [data, "trainer.batch_size=250", "sampler.num_workers=1"]
    reports = reports_of(train(tmp_path, 3, *options))
    root = data.partition("=")[2]
    seeds = len(load("generated", root, num_nodes=600, num_edges=4000).train)
    assert [(report.seeds, report.steps, report.ranks) for report in reports] == [(seeds, 1, 3)] * 3
    assert all(report.valid_accuracy is not None for report in reports)


# -- ranks that nothing but a watch can tell of another's end --------------------------------------


def _one_ends(folder: Path, is_well: bool) -> None:
    watch._OWN_WORD_SECONDS = 0.5
    ranks = Ranks.of_all_machines()
    heard: list[Exception] = []
    if ranks.rank == 2:  # so late that the first rank's goodbye has come as well
        hear = watch.Watch._hear
        watch.Watch._hear = lambda *of: (time.sleep(1), hear(*of))[1]
    with (
        contextlib.suppress(KeyError, Stopped),
        watch.Watch(ranks, "127.0.0.1", heard.append),
    ):
        ranks.all_gather(None)
        if ranks.rank == 1:
            raise Stopped if is_well else KeyError("lost")
        deadline = time.monotonic() + (1.5 if is_well else 10)
        while not heard and time.monotonic() < deadline:
            time.sleep(0.05)
    (folder / str(ranks.rank)).write_text("\n".join(map(str, heard)))
    ranks.all_gather(None)


@pytest.mark.parametrize("is_well", [False, True])
def test_all_hear_of_a_rank_that_ended_too_early(tmp_path, is_well):
    launch(_one_ends, 3, tmp_path, is_well)
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    if is_well:
        assert found == [""] * 3
    else:
        assert found[1] == ""
        assert all("rank 1 has ended before its work was done" in found[rank] for rank in (0, 2))
