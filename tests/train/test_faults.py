"""What fails in the middle of a run: a typed error for all, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing as mp
import os
import queue
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import reduction
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu import watch_machines
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data import load
from dgl_mgpu.errors import (
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    DGLMGPUError,
    InvalidInputError,
    OutputError,
    RankFailedError,
    SharedMemoryError,
    WorkerFailedError,
)
from dgl_mgpu.report import metrics, read_metrics
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import check_overrides, compose
from dgl_mgpu.train.launch import launch as launching
from dgl_mgpu.train.launch import peer_monitor as watch
from dgl_mgpu.train.launch import typed_errors
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.launch.preemption import Stopped
from dgl_mgpu.train.launch.typed_errors import typed_worker_losses
from dgl_mgpu.train.report import RunReport
from dgl_mgpu.train.run import _require_one_configuration
from dgl_mgpu.train.trainer import Trainer
from dgl_mgpu.utils.stages import Heartbeat
from tests.train import jobs
from tests.train.jobs import at_step, reports_of, shared_memory, torchrun, train, until

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("data")
    assert 320 < len(load("generated", str(root), num_nodes=600, num_edges=4000).train) <= 384
    return f"data.root={root}"


#: What was put in the place of what: runs of one rank are in this process.
_replaced: list[tuple[object, str, object]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, and nothing in shared memory."""
    shared, processes = shared_memory(), forked()
    yield
    while _replaced:
        setattr(*_replaced.pop())
    assert forked() <= processes
    left = shared_memory() - shared  # also of tests that run at the same time
    until(lambda: not left & shared_memory())


def forked() -> set[psutil.Process]:
    """What runs of that which the server of forked processes has forked, and they in turn."""
    me = psutil.Process()
    return set(me.children(recursive=True)) - set(me.children())


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


def build(act: Callable[[], None], trainer: Trainer) -> None:
    """Before the run's other ranks have what they train on."""
    act()


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


def checkpoint(act: Callable[[], None], trainer: Trainer) -> None:
    """When the second checkpoint is about to get its name."""
    after(1, act, Path, "replace")


def report(act: Callable[[], None], trainer: Trainer, lines: int = 1) -> None:
    """When some of a line, after others, has got to the disk."""
    write, count = metrics.MetricsLog._write, 0
    _replaced.append((metrics.MetricsLog, "_write", write))

    def counted(self: metrics.MetricsLog, line: str) -> None:
        nonlocal count
        count += 1
        if count <= lines:
            return write(self, line)
        self._file.write(line[:10])
        return act()

    metrics.MetricsLog._write = counted


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
    """The error with which a run of these ranks ends."""
    with pytest.raises(DGLMGPUError) as failure:
        train(folder, num_ranks, *options, hook=hook)
    return failure.value


MODES = {
    "minibatch": [build, sample, gather, forward, backward, update, evaluate, checkpoint, report],
    "fullgraph": [build, forward, backward, update, evaluate, checkpoint, report],
}
CELLS = [(mode, stage) for mode, stages in MODES.items() for stage in stages]


def told_of(act: Callable, rank: int, stage: Callable) -> str:
    """What is told of a rank to which this happened in a stage."""
    at = f"in stage {stage.__name__}"
    if act is is_killed:
        return f"run rank {rank}: it was killed by SIGKILL {at}"
    return f"run rank {rank}: it raised KeyError: 'lost' {at}"


# Launchers tell alike of all trainers: each fault is in every second stage of each.
@pytest.mark.parametrize(("number", "mode", "stage"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_a_rank_fails(tmp_path, data, capfd, number, mode, stage):
    act = [is_killed, raises][number % 2]
    rank = int(stage not in (checkpoint, report))  # which the first one does
    hook = partial(on_rank, rank, stage, act)
    error = fails(tmp_path, hook, data, f"mode={mode}", "trainer.epochs=9")
    assert isinstance(error, RankFailedError)
    assert told_of(act, rank, stage) in str(error)
    assert act is is_killed or "Traceback" in capfd.readouterr().err


# What is told of a stage does not depend on the launcher: torchrun's ranks need not fail in all.
@pytest.mark.parametrize(
    ("mode", "stage", "act"),
    [
        ("minibatch", build, raises),
        ("minibatch", gather, is_killed),
        ("minibatch", evaluate, raises),
        ("minibatch", report, raises),
        ("fullgraph", backward, is_killed),
        ("fullgraph", checkpoint, raises),
    ],
)
def test_a_rank_of_torchrun_fails(tmp_path, data, mode, stage, act):
    rank = int(stage not in (checkpoint, report))
    hook = partial(on_rank, rank, stage, act)
    ends = torchrun(tmp_path, 2, data, f"mode={mode}", "trainer.epochs=9", hook=hook)
    assert ends[rank] == "" if act is is_killed else told_of(act, rank, stage) in ends[rank]
    assert ends[1 - rank].startswith("RankFailedError: ")


def test_the_first_rank_is_killed_while_it_writes_a_checkpoint(tmp_path, data):
    error = fails(tmp_path / "run", partial(on_rank, 0, checkpoint, is_killed), data)
    assert "rank 0: it was killed by SIGKILL" in str(error)
    assert Checkpoint.load(tmp_path / "run").epoch == 1
    assert list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    options = [data, "trainer.checkpoint_every=3", f"trainer.resume={tmp_path / 'run'}"]
    again = train(tmp_path / "run", 1, *options)
    left = {path.name for path in (again / "checkpoints").iterdir()}
    assert left == {"epoch-0001.pt", "epoch-0003.pt"}


def kills_a_worker(others: set[int | None]) -> None:
    worker = next(each for each in mp.active_children() if each.pid not in others)
    os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_worker_is_killed(tmp_path, data, num_ranks):
    # A run of one rank is in this process, where workers of earlier tests' loaders may still wait.
    others = {each.pid for each in mp.active_children()}
    options = [data, "sampler.num_workers=2", "trainer.epochs=40"]
    hook = partial(at_step, 8, num_ranks - 1, partial(kills_a_worker, others))
    error = fails(tmp_path, hook, *options, num_ranks=num_ranks)
    assert isinstance(error, WorkerFailedError)
    # Torch's handler may have told where nobody hears it, as in a destructor.
    told = r"DataLoader worker \(pid\S* \d+\) \S+|the connection to one was lost \("
    assert re.search(f"processes: ({told}).*see why it ended", str(error))
    assert len(reports_of(tmp_path)) >= 1


@pytest.mark.parametrize("signalled", ["at once", "later", "never"])
def test_the_end_of_a_workers_connection_is_told_as_its_end(signalled, monkeypatch):
    def torchs_handler(_) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(typed_errors.time, "sleep", lambda seconds: None)
    if signalled == "later":
        monkeypatch.setattr(typed_errors.time, "sleep", torchs_handler)
    elif signalled == "at once":
        monkeypatch.setattr(typed_errors.traceback, "walk_tb", torchs_handler)
    lost = r"DataLoader worker \(pid 7\) is killed by signal: Killed"
    told = r"the connection to one was lost \(EOFError\(\)\)" if signalled == "never" else lost
    here, there = mp.Pipe()
    there.close()
    with pytest.raises(WorkerFailedError, match=f"processes: {told}; see why"):  # noqa: SIM117
        with typed_worker_losses():
            here.recv()


def test_a_worker_ends_before_it_has_handed_a_tensor_over(monkeypatch):
    monkeypatch.setattr(typed_errors.time, "sleep", lambda seconds: None)
    here, there = mp.Pipe()
    there.close()
    with pytest.raises(WorkerFailedError, match="lost"), typed_worker_losses():
        reduction.recv_handle(here)


def test_a_worker_that_ends_while_its_rank_waits_for_others_is_told_of():
    torchs = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    told = RankFailedError("exchange", f"one of them is gone ({torchs})", "see why it ended")
    with pytest.raises(WorkerFailedError, match=r"DataLoader worker \(pid 7\) is killed"):  # noqa: SIM117
        with typed_worker_losses():
            raise told from torchs


def test_a_worker_that_ends_while_its_rank_writes_a_checkpoint_is_told_of():
    torchs = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    told = CheckpointError("write checkpoint a.pt", str(torchs), "free space there")
    with pytest.raises(WorkerFailedError, match=r"DataLoader worker \(pid 7\) is killed"):  # noqa: SIM117
        with typed_worker_losses():
            raise told from torchs


def test_an_error_that_explains_a_workers_end_is_raised_as_it_is():
    torchs = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. ")
    told = SharedMemoryError("hand over", "no room in /dev/shm", "free some")
    with pytest.raises(SharedMemoryError), typed_worker_losses():
        raise told from torchs


def test_a_rank_that_is_gone_is_told_as_that():
    gloos = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    told = RankFailedError("exchange", f"one of them is gone ({gloos})", "see why it ended")
    with pytest.raises(RankFailedError), typed_worker_losses():
        raise told from gloos


def test_a_rank_that_has_no_file_left_for_its_workers_is_told_so():
    torchs = (
        "Too many open files. Communication with the workers is no longer possible. Please increase"
    )
    with (
        pytest.raises(WorkerFailedError, match="Too many open"),
        typed_worker_losses(),
    ):
        raise RuntimeError(torchs)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "reset"),
        ValueError("of the model"),
        RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback"),
    ],
)
def test_what_is_no_workers_end_is_raised_as_it_is(error):
    with pytest.raises(type(error)) as raised, typed_worker_losses():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(("num_ranks", "act"), [(1, has_no_memory), (2, has_no_gpu_memory)])
def test_memory_is_too_small_for_the_model(tmp_path, data, num_ranks, act):
    hook = partial(on_rank, num_ranks - 1, forward, act)
    error = fails(tmp_path, hook, data, num_ranks=num_ranks)
    assert isinstance(error, DeviceMemoryError)
    assert f"rank {num_ranks - 1}: " in str(error)
    assert "in stage forward; lower trainer.batch_size" in str(error)


def test_memory_is_too_small_for_links(tmp_path, data):
    hook = partial(on_rank, 0, forward, has_no_gpu_memory)
    error = fails(tmp_path, hook, data, "task=link_prediction", num_ranks=1)
    assert isinstance(error, DeviceMemoryError)
    assert "lower trainer.batch_size, links.negatives, sampler.fanouts, model.hidden" in str(error)


def test_memory_is_too_small_for_a_full_graph(tmp_path, data):
    hook = partial(on_rank, 0, backward, has_no_gpu_memory)
    error = fails(tmp_path, hook, data, "mode=fullgraph", "trainer.epochs=9", num_ranks=1)
    assert isinstance(error, DeviceMemoryError)
    assert "in stage backward of whole graph; use more ranks" in str(error)
    assert "fullgraph.features=host" in str(error)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("lost"), "RankFailedError: cannot run rank 3: it raised KeyError: 'lost'"),
        (
            DeviceMemoryError("train", "too little", "buy"),
            "DeviceMemoryError: cannot train: too little",
        ),
        (RankFailedError("train", "rank 1 is gone", "see why"), None),
    ],
)
def test_torchrun_is_told_of_causes_alone(tmp_path, monkeypatch, error, told):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(DGLMGPUError), launching._reporting_to_torchrun(3):
        raise error
    assert (tmp_path / "error.json").exists() == (told is not None)
    if told is not None:
        written = json.loads((tmp_path / "error.json").read_text())["message"]
        assert written["message"].startswith(told)
        assert type(error).__name__ in written["extraInfo"]["py_callstack"]


def test_memory_is_too_small_on_a_rank_of_torchrun(tmp_path, data):
    hook = partial(on_rank, 1, forward, has_no_gpu_memory)
    ends = torchrun(tmp_path, 2, data, "mode=fullgraph", "trainer.epochs=9", hook=hook)
    assert ends[1].startswith("DeviceMemoryError: cannot train as configured on rank 1")
    assert "2.00 GiB. in stage forward of whole graph; use more ranks" in ends[1]
    assert ends[0].startswith("RankFailedError: ")


@pytest.mark.parametrize("mode", MODES)
def test_the_disk_is_full_for_a_checkpoint(tmp_path, data, mode):
    error = fails(tmp_path, partial(on_rank, 0, checkpoint, is_full), data, f"mode={mode}")
    assert isinstance(error, CheckpointError)
    assert "free space there" in str(error)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-0001.pt"]
    assert len(reports_of(tmp_path)) == Checkpoint.load(tmp_path).epoch == 1


@pytest.mark.parametrize("lines", [1, 3])
def test_the_disk_is_full_for_metrics(tmp_path, data, lines):
    hook = partial(on_rank, 0, partial(report, lines=lines), is_full)
    error = fails(tmp_path / "run", hook, data)
    assert isinstance(error, OutputError)
    assert "free space there" in str(error)
    # What was trained is not lost.
    assert Checkpoint.load(tmp_path / "run").epoch == min(lines + 1, 3)
    assert len(reports_of(tmp_path / "run")) == lines


def test_a_run_whose_page_could_not_be_written_is_not_complete(tmp_path, data, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "nothing_drawn", contextlib.nullcontext)
        patch.setattr(RunReport, "_write_page", lambda *report: is_full())
        with pytest.raises(OSError, match="No space"):
            train(tmp_path / "run", 1, data)
    again = train(tmp_path / "run", 1, data, f"trainer.resume={tmp_path / 'run'}")
    assert read_metrics(again / "metrics.jsonl")[1] is not None


@pytest.mark.parametrize("place", ["run", "another"])
def test_a_run_that_failed_after_its_last_epoch_is_brought_to_its_end(tmp_path, data, place):
    """Once; then there is nothing left to go on with."""
    hook = partial(on_rank, 0, partial(report, lines=3), is_full)
    fails(tmp_path / "run", hook, data, num_ranks=1)
    while _replaced:
        setattr(*_replaced.pop())
    again = train(tmp_path / place, 1, data, f"trainer.resume={tmp_path / 'run'}")
    whole = train(tmp_path / "whole", 1, data)
    ends = [read_metrics(folder / "metrics.jsonl")[1] for folder in (again, whole)]
    assert ends[0] == ends[1] is not None
    assert Checkpoint.load(again).epoch == len(reports_of(again)) == 3
    with pytest.raises(ConfigError, match="checkpoint is of epoch 3; raise"):
        train(tmp_path / "third", 1, data, f"trainer.resume={again}")


def test_a_run_does_not_end_where_it_was_not_to(tmp_path, data):
    """Its best model may not have been looked for."""
    fails(tmp_path / "run", partial(on_rank, 0, report, is_full), data, num_ranks=1)
    options = [data, f"trainer.resume={tmp_path / 'run'}", "trainer.epochs=2"]
    with pytest.raises(ConfigError, match="checkpoint is of epoch 2; raise"):
        train(tmp_path / "run", 1, *options)


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


# -- SIGTERM -----------------------------------------------------------------------------------


def tells_launcher(launcher: int, trainer: Trainer) -> None:
    """Hook: while the run is being built, when nothing is trained that could be kept."""
    os.kill(launcher, signal.SIGTERM)
    signal.pause()


def test_sigterm_before_there_is_anything_to_keep(tmp_path, data):
    with pytest.raises(Stopped):
        train(tmp_path, 2, data, hook=partial(tells_launcher, os.getpid()))
    assert not (tmp_path / "checkpoints").exists()


def tells_agent() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


@pytest.mark.parametrize("mode", MODES)
def test_torchrun_passes_sigterm_on(tmp_path, data, mode):
    options = [data, f"mode={mode}", "trainer.epochs=100000"]
    ends = torchrun(tmp_path, 2, *options, hook=partial(at_step, 5, 1, tells_agent))
    assert ends == ["Stopped: 143"] * 2
    state = Checkpoint.load(tmp_path)
    assert {path.suffix for path in (tmp_path / "checkpoints").iterdir()} == {".pt"}
    assert len(reports_of(tmp_path)) == state.epoch > 0


# -- ranks that nothing but a watch can tell of another's end --------------------------------------


def _one_ends(folder: Path) -> None:
    watch._OWN_REPORT_SECONDS = 0.5
    ranks = Communicator.of_all_machines()
    heard: queue.Queue[Exception] = queue.Queue()
    with contextlib.suppress(KeyError), watch.PeerMonitor(ranks, Heartbeat(), None, heard.put):
        ranks.all_gather(None)
        if ranks.rank == 1:
            raise KeyError("lost")
        (folder / str(ranks.rank)).write_text(str(heard.get(timeout=100)))
    ranks.all_gather(None)


def _all_hear_of_rank_1(tmp_path, monkeypatch, work):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    launch(work, 3, tmp_path)
    for rank in (0, 2):
        told = (tmp_path / str(rank)).read_text()
        assert "rank 1 has ended before its work was done" in told


def test_all_hear_of_a_rank_that_ended_too_early(tmp_path, monkeypatch):
    _all_hear_of_rank_1(tmp_path, monkeypatch, _one_ends)


def _one_of_a_script_ends(folder: Path) -> None:
    watch._OWN_REPORT_SECONDS = 0.5
    heard: queue.Queue[Exception] = queue.Queue()
    os.environ["TORCHELASTIC_RUN_ID"] = "job"  # of this process
    launching._leave = heard.put  # type: ignore[assignment]
    ranks = Communicator.of_all_machines()
    with pytest.raises(InvalidInputError, match=r"silent_after is 1\.0"), watch_machines(1.0):
        pass
    with contextlib.suppress(KeyError), watch_machines():
        ranks.all_gather(None)
        if ranks.rank == 1:
            raise KeyError("lost")
        (folder / str(ranks.rank)).write_text(str(heard.get(timeout=100)))
    ranks.all_gather(None)


def test_a_script_ends_when_a_rank_is_lost(tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match="torchrun has not started"), watch_machines():
        pass
    _all_hear_of_rank_1(tmp_path, monkeypatch, _one_of_a_script_ends)


# -- ranks that were told different things, as those of torchrun may be ----------------------------


def _are_told(folder: Path) -> None:
    ranks = Communicator.of_all_machines()
    for name, options in (
        ("alike", [f"data.root=there-{ranks.rank}"]),
        ("otherwise", [f"model.hidden={32 + ranks.rank}"]),
        ("more", ["data.options.num_nodes=9"] if ranks.rank else []),
    ):
        config = compose(check_overrides(options))
        try:
            _require_one_configuration(ranks, config)
            found = ""
        except ConfigError as error:
            found = str(error)
        (folder / f"{name}-{ranks.rank}").write_text(found)


def test_ranks_are_told_the_same(tmp_path):
    launch(_are_told, 2, tmp_path)
    for rank in range(2):
        alike, otherwise, more = (
            (tmp_path / f"{name}-{rank}").read_text() for name in ("alike", "otherwise", "more")
        )
        assert alike == ""
        assert "model.hidden=32 on every rank: rank 1 has model.hidden=33" in otherwise
        assert "rank 1 has data.options.num_nodes=9" in more
