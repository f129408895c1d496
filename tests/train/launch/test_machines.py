"""Two machines, which are network namespaces here, under torchrun: one is lost."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dgl_mgpu.cli import main
from dgl_mgpu.config.schema import Config
from dgl_mgpu.errors import CheckpointError, ConfigError
from dgl_mgpu.train import run as running
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.minibatch import run as minibatch_run
from dgl_mgpu.train.run import _run_rank
from tests.environment import search_path
from tests.train.jobs import SMALL, reports_of, train, until

SCRIPT = """
import os
import sys
import time
from torch.optim.optimizer import register_optimizer_step_pre_hook
from dgl_mgpu.cli import main
from dgl_mgpu.train.launch import peer_monitor

def hang(optimizer, *arguments):
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps == 7 and os.environ["RANK"] == os.environ.get("HANGS"):
        time.sleep(10_000)

register_optimizer_step_pre_hook(hang)
if __name__ == "__main__":
    # Ranks have what time they need to report their own end.
    peer_monitor._OWN_REPORT_SECONDS = 100
    sys.exit(main(["train", *sys.argv[1:]]))
"""
PORT = 29517
#: A state of a socket in `/proc/net/tcp`.
LISTENS = "0A"


@dataclass(frozen=True)
class Machine:
    """A network namespace, with its end of a cable."""

    name: str
    cable: str
    address: str

    def start(self, *command: str, output: Path) -> subprocess.Popen:
        """Run a command there; it has a /dev/shm of its own."""
        environment = {
            "GLOO_SOCKET_IFNAME": self.cable,
            "PYTHONPATH": search_path(),
            "TMPDIR": str(output.parent),
        }
        here = ["ip", "netns", "exec", self.name, "sh", "-c"]
        own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        with output.open("wb") as file:
            return subprocess.Popen(
                [*here, own, "sh", *command],
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces are root's to make")
    own = os.getpid()
    found = [Machine(f"m{i}-{own}", f"m{i}v{own}", f"10.77.0.{i + 1}") for i in range(2)]
    with ExitStack() as cleaning:
        for machine in found:
            if subprocess.run(["ip", "netns", "add", machine.name], check=False).returncode:
                pytest.skip("network namespaces cannot be made here")
            cleaning.callback(ip, "netns", "del", machine.name)
        one, two = found
        ends = [one.cable, "netns", one.name, "type", "veth"]
        ip("link", "add", *ends, "peer", "name", two.cable, "netns", two.name)
        for machine in found:
            of = ["-n", machine.name]
            ip(*of, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
            ip(*of, "link", "set", "lo", "up")
            ip(*of, "link", "set", machine.cable, "up")
        yield found


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def cut(machine: Machine, torchrun: subprocess.Popen) -> None:
    ip("-n", machine.name, "link", "set", machine.cable, "down")


def nothing(machine: Machine, torchrun: subprocess.Popen) -> None:
    """It hangs by itself."""


def stop(machine: Machine, torchrun: subprocess.Popen) -> None:
    for process in [torchrun, *psutil.Process(torchrun.pid).children(recursive=True)]:
        process.send_signal(signal.SIGSTOP)


def kill(machine: Machine, torchrun: subprocess.Popen) -> None:
    for process in [*psutil.Process(torchrun.pid).children(recursive=True), torchrun]:
        process.send_signal(signal.SIGKILL)


def listened_at(process: int) -> set[tuple[str, int]]:
    """Addresses and ports at which a process takes connections over TCP, in its own network."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # it is closed again
            sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == LISTENS and f"socket:[{others[5]}]" in sockets:
                address, port = local.split(":")
                words = [bytes.fromhex(address[n : n + 8])[::-1] for n in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def require_that_ranks_listen_on_their_network(
    machines: list[Machine], jobs: list[subprocess.Popen]
) -> None:
    stores = set()
    for machine, job in zip(machines, jobs, strict=True):
        stores |= listened_at(job.pid)
        addresses = {
            address
            for rank in psutil.Process(job.pid).children(recursive=True)
            for address, _ in listened_at(rank.pid)
        }
        assert addresses == {machine.address}
    # torchrun's own, at all of the first machine's addresses.
    assert stores == {("::", PORT)}


@pytest.mark.parametrize(
    ("lose", "reason"),
    [
        pytest.param(cut, "rank 1 is silent", marks=pytest.mark.slow),
        pytest.param(stop, "rank 1 is silent", marks=pytest.mark.slow),
        pytest.param(nothing, "cannot run rank 1: nothing has advanced", marks=pytest.mark.slow),
        (kill, "is gone"),
    ],
)
def test_the_job_ends_with_the_reason_and_goes_on_with_one(
    machines, tmp_path, monkeypatch, lose, reason
):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = [*SMALL, f"data.root={tmp_path / 'data'}", "trainer.epochs=100000"]
    if lose is nothing:
        monkeypatch.setenv("HANGS", "1")
        options.append("trainer.hang_after=20")
    folders = [tmp_path / "first", tmp_path / "second"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        f"--master-addr={machines[0].address}", f"--master-port={PORT}",
    ]  # fmt: skip
    jobs = [
        machine.start(
            *command, f"--node-rank={number}", str(tmp_path / "script.py"), *options,
            f"hydra.run.dir={folder}", output=tmp_path / f"{number}.txt",
        )
        for number, (machine, folder) in enumerate(zip(machines, folders, strict=True))
    ]  # fmt: skip
    try:
        until(lambda: any((folders[0] / "checkpoints").glob("epoch-*.pt")))
        require_that_ranks_listen_on_their_network(machines, jobs)
        lose(machines[1], jobs[1])
        assert jobs[0].wait() == 1
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    shown = (tmp_path / "0.txt").read_text()
    assert "RankFailedError" in shown
    assert reason in shown
    assert not (folders[1] / "checkpoints").exists()

    state = Checkpoint.load(folders[0])
    assert state.epoch > 0
    arguments = [*options, f"trainer.epochs={state.epoch + 1}", f"trainer.resume={folders[0]}"]
    assert main(["train", *arguments, f"hydra.run.dir={tmp_path / 'again'}"]) == 0
    assert [report.ranks for report in reports_of(tmp_path / "again")] == [2] * state.epoch + [1]


def test_a_preset_is_of_one_machine(monkeypatch):
    trained = []
    monkeypatch.setattr(running, "run", lambda make, config, folder: trained.append(config))
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "16"}
    config = Config(topology="dgx1")  # 8 GPUs
    for ranks_here, fits in (("8", True), ("16", False)):
        for key, value in (torchrun | {"LOCAL_WORLD_SIZE": ranks_here}).items():
            monkeypatch.setenv(key, value)
        if fits:
            running.train(config, Path())
        else:
            with pytest.raises(ConfigError, match="it has 8; use 1 to 8"):
                running.train(config, Path())
    assert [config.trainer.ranks for config in trained] == [16]


def _resumes_from_the_first_machines_folder(config: Config, folder: Path) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        folder = Path("/proc/not/here")
        config.trainer.resume = str(folder)
    _run_rank(minibatch_run.make_trainer, config, folder)


@pytest.mark.usefixtures("forked_ranks")
def test_the_first_rank_alone_needs_the_checkpoint(tmp_path):
    from dgl_mgpu.train.compose import compose

    data = f"data.root={tmp_path / 'data'}"
    first = train(tmp_path / "first", 2, data, "trainer.epochs=1")
    config = compose([*SMALL, data, "trainer.ranks=2", f"trainer.resume={first}"])
    launch(_resumes_from_the_first_machines_folder, 2, config, tmp_path / "again")
    assert [report.epoch for report in reports_of(tmp_path / "again")] == [1, 2, 3]
    config.trainer.resume = str(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no such file"):
        launch(_resumes_from_the_first_machines_folder, 2, config, tmp_path / "never")
