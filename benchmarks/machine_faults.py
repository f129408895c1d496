"""Claim: whatever befalls a machine, its job ends everywhere within 30 s, with the reason.

``dgl-mgpu train`` runs under a torchrun for each of two machines, which have one copy of the graph
together (``store.span=job``).  They are network namespaces of this host, as in `two_machines`.
Something happens to one of them in the third epoch.  Then the run goes on from its last checkpoint,
on one machine with as many ranks, and comes to the weights of a run that nothing happened to: on
CPUs to the same bits.

Where there can be no namespaces the machines are torchruns on the loopback, between which nothing
can be cut; ranks take them for machines all the same.

torchrun itself starts ranks again with ``--max-restarts``: on both machines when a rank is killed,
and on the one that is left when the other one is lost.

    python -m benchmarks.machine_faults --out machine_faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.machine import describe_machine
from benchmarks.two_machines import Machine, free_port, two_machines
from dgl_mgpu import cli
from dgl_mgpu.comm import communicator
from dgl_mgpu.report import read_metrics
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint

#: Within which all machines that can still run have ended.
AIM_SECONDS = 30.0
#: What a job may take at most; one that hangs is ended, and what it printed is told.
LIMIT_SECONDS = 240.0
#: After which epoch something happens.
EPOCH = 2


@dataclass(frozen=True)
class Job:
    """A torchrun on each machine, and what they print."""

    machines: Sequence[Machine]
    folder: Path
    torchruns: Sequence[subprocess.Popen[bytes]]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def printed(self, machine: int) -> str:
        return (self.folder / f"{machine}.txt").read_text(errors="replace")

    def processes(self, machine: int) -> list[psutil.Process]:
        """Of a machine, torchrun first."""
        torchrun = psutil.Process(self.torchruns[machine].pid)
        return [torchrun, *torchrun.children(recursive=True)]

    def rank(self, machine: int) -> psutil.Process:
        """The machine's first rank."""
        ranks = [p for p in self.processes(machine) if p.environ().get("LOCAL_RANK") == "0"]
        return ranks[0]

    def reason(self, machine: int) -> str:
        """The error that a machine's rank has ended with, or the signal, as torchrun says it."""
        found = re.findall(r"RankFailedError: .*|Signal \d+ .* received", self.printed(machine))
        return found[0] if found else ""


def kill(job: Job, machine: int) -> None:
    for process in job.processes(machine):
        process.kill()


def stop(job: Job, machine: int) -> None:
    for process in job.processes(machine):
        process.suspend()


def cut(job: Job, machine: int) -> None:
    of = job.machines[machine]
    subprocess.run(["ip", "-n", of.namespace, "link", "set", of.cable, "down"], check=True)


def kill_rank(job: Job, machine: int) -> None:
    job.rank(machine).kill()


#: What happens, to which machine, and which ones can tell of it.
FAULTS: dict[str, tuple[Callable[[Job, int], None], int, Sequence[int]]] = {
    "a machine is killed": (kill, 1, (0,)),
    "the first machine is killed": (kill, 0, (1,)),
    "a machine is stopped": (stop, 1, (0,)),
    "the first machine is stopped": (stop, 0, (1,)),
    "the network between them is cut": (cut, 1, (0, 1)),
    "a rank is killed": (kill_rank, 1, (0, 1)),
}


class Bench:
    """Jobs to which something happens."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._gpus = torch.cuda.device_count() >= 2
        self._jobs = 0

    def run(self) -> dict[str, Any]:
        """The result.

        Raises
        ------
        RuntimeError, ValueError
            If a job does not do what it is to.
        """
        figures: list[dict[str, Any]] = []
        undisturbed = self._undisturbed()
        for what in FAULTS:
            if re.search(self._options.only, what):
                with two_machines() as machines:
                    figures.append(self._fault(machines, what, undisturbed))
                print(json.dumps(figures[-1]), flush=True)
        for what, case in (("rank", self._rank_again), ("machine", self._machine_again)):
            if re.search(self._options.only, f"started again without a {what}"):
                with two_machines() as machines:
                    figures.append(case(machines, undisturbed))
                print(json.dumps(figures[-1]), flush=True)
        return {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(self._options).items()},
            "device": "GPUs" if self._gpus else "CPUs",
            "figures": figures,
        }

    # -- what happens ------------------------------------------------------------------------------

    def _undisturbed(self) -> Checkpoint:
        """Of a run of two ranks on one machine."""
        job = self._start([Machine()], ranks=2)
        self._end(job, [0])
        return Checkpoint.load(job.run)

    def _fault(
        self, machines: Sequence[Machine], what: str, undisturbed: Checkpoint
    ) -> dict[str, Any]:
        happens, lost, others = FAULTS[what]
        if happens is cut and not machines[0].namespace:
            return {"fault": what, "left_out": "without network namespaces no link can be cut"}
        job = self._start(machines)
        self._wait_for_epoch(job)
        happens(job, lost)
        begin = time.monotonic()
        seconds = dict(self._ends(job, others, begin))
        figure: dict[str, Any] = {
            "fault": what,
            "seconds": max(seconds.values()),
            "reached": max(seconds.values()) <= AIM_SECONDS,
            "seconds_of_machine": seconds,
            "reason": {machine: job.reason(machine) for machine in others},
        }
        if not all(figure["reason"].values()):
            raise ValueError(f"{what}, and not all machines say so: {job.printed(others[0])}")
        if happens is stop:
            for process in job.processes(lost):
                process.resume()
            begin = time.monotonic()
            figure["seconds_once_it_goes_on"] = dict(self._ends(job, [lost], begin))[lost]
        self._kill(job)
        epoch = Checkpoint.load(job.run).epoch
        again = self._start([Machine()], ranks=2, resume=job.run)
        self._end(again, [0])
        figure["epochs_kept"] = epoch
        figure["weights_off_by"] = self._off_by(undisturbed, again.run)
        return figure

    def _rank_again(self, machines: Sequence[Machine], undisturbed: Checkpoint) -> dict[str, Any]:
        job = self._start(machines, restarts=1)
        self._wait_for_epoch(job)
        kill_rank(job, 1)
        begin = time.monotonic()
        self._end(job, [0, 1])
        return {
            "fault": "a rank is killed, and torchrun starts all again",
            "seconds_to_the_run's_end": time.monotonic() - begin,
            "weights_off_by": self._off_by(undisturbed, job.run),
        }

    def _machine_again(
        self, machines: Sequence[Machine], undisturbed: Checkpoint
    ) -> dict[str, Any]:
        job = self._start(machines, restarts=1, elastic=True)
        self._wait_for_epoch(job)
        kill(job, 1)
        begin = time.monotonic()
        self._end(job, [0])
        ranks = [report.ranks for report in read_metrics(job.run / "metrics.jsonl")[0]]
        if ranks[-1] != 1:
            raise ValueError(f"the run went on with {ranks} ranks")
        return {
            "fault": "a machine is killed, and torchrun goes on with the other one",
            "seconds_to_the_run's_end": time.monotonic() - begin,
            "ranks_of_epochs": ranks,
        }

    def _off_by(self, undisturbed: Checkpoint, run: Path) -> float:
        """The largest difference of a weight, which is to be none but on GPUs."""
        found = Checkpoint.load(run)
        if found.epoch != undisturbed.epoch:
            raise ValueError(f"the run ended after epoch {found.epoch}")
        off_by = max(
            float((tensor - found.model[name]).abs().max())
            for name, tensor in undisturbed.model.items()
        )
        if off_by and not self._gpus:
            raise ValueError(f"the run that went on has other weights, by {off_by}")
        return off_by

    # -- jobs --------------------------------------------------------------------------------------

    def _start(
        self,
        machines: Sequence[Machine],
        ranks: int = 1,
        resume: Path | None = None,
        restarts: int = 0,
        elastic: bool = False,
    ) -> Job:
        options, count = self._options, len(machines)
        folder = self._folder / str(self._jobs)
        self._jobs += 1
        folder.mkdir()
        words = {
            "data.root": options.data, "data.options.num_nodes": options.nodes,
            "data.options.num_edges": options.edges, "store.span": "job",
            "trainer.epochs": options.epochs, "trainer.eval_every": options.epochs,
            "trainer.batch_size": options.batch, "hydra.run.dir": folder / "run",
        } | ({} if resume is None else {"trainer.resume": resume})  # fmt: skip
        port = free_port()
        jobs = []
        for number, machine in enumerate(machines):
            torchrun = {"nproc-per-node": ranks, "max-restarts": restarts} | (
                {
                    "nnodes": f"1:{count}", "rdzv-backend": "c10d", "rdzv-id": "job",
                    "rdzv-endpoint": f"{machines[0].address}:{port}",
                    "local-addr": machine.address,
                    "rdzv-conf": f"is_host={int(number == 0)},last_call_timeout=5",
                }
                if elastic
                else {
                    "nnodes": count, "node-rank": number,
                    "master-addr": machines[0].address, "master-port": port,
                }
            )  # fmt: skip
            command = [sys.executable, "-m", "torch.distributed.run"]
            command += [f"--{name}={value}" for name, value in torchrun.items()]
            rank = ["dgl_mgpu.cli", "train"]
            if count > 1 and not machine.namespace:
                rank = ["benchmarks.machine_faults", "rank"]
            command += ["-m", *rank, *(f"{k}={v}" for k, v in words.items())]
            own = range(number * ranks, (number + 1) * ranks)
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": machine.cable,
                "NCCL_SOCKET_IFNAME": machine.cable,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, own)) if self._gpus else "",
            }
            with (folder / f"{number}.txt").open("wb") as printed:
                jobs.append(
                    subprocess.Popen(
                        machine.command(command),
                        env=environment, stdout=printed, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )  # fmt: skip
        return Job(machines, folder, jobs)

    def _wait_for_epoch(self, job: Job) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any((job.run / "checkpoints").glob(f"epoch-*{EPOCH}.pt")):
            if time.monotonic() > deadline or any(
                each.poll() is not None for each in job.torchruns
            ):
                self._kill(job)
                raise RuntimeError(f"the job did not come to epoch {EPOCH}: {self._all_of(job)}")
            time.sleep(0.01)

    def _ends(self, job: Job, machines: Sequence[int], begin: float) -> Iterator[tuple[int, float]]:
        """Seconds until each of some machines has ended."""
        running = set(machines)
        while running and time.monotonic() < begin + LIMIT_SECONDS:
            for machine in [m for m in running if job.torchruns[m].poll() is not None]:
                running.remove(machine)
                yield machine, time.monotonic() - begin
            time.sleep(0.05)
        if running:
            self._kill(job)
            raise RuntimeError(f"machines {running} do not end: {self._all_of(job)}")

    def _end(self, job: Job, machines: Sequence[int]) -> None:
        """Wait for the job's end, which is to be a good one."""
        list(self._ends(job, machines, time.monotonic()))
        codes = [job.torchruns[machine].returncode for machine in machines]
        if any(codes):
            raise RuntimeError(f"a job ended with {codes}: {self._all_of(job)}")
        self._kill(job)

    def _kill(self, job: Job) -> None:
        for torchrun in job.torchruns:
            if torchrun.poll() is None:
                os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()

    def _all_of(self, job: Job) -> str:
        return "".join(map(job.printed, range(len(job.torchruns))))


def as_a_rank(arguments: Sequence[str]) -> int:
    """Train on a rank whose machine is its torchrun."""
    communicator._machine_id = lambda: os.environ["GROUP_RANK"]
    return cli.main(["train", *arguments])


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        sys.exit(as_a_rank(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="root of the data sets")
    parser.add_argument("--nodes", type=int, default=20_000, help="of a generated graph")
    parser.add_argument("--edges", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=128, help="seeds of a rank")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--only", default="", help="the faults that this pattern is found in")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Bench(options, Path(folder)).run()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
