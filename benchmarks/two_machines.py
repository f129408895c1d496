"""Claim: an epoch on two machines takes half as long as on one.

After WholeGraph's figure 13: ``dgl-mgpu train`` under a torchrun for each machine, each of which
has a store of its own with the whole graph; gradients are averaged over all ranks.  The machines
are network namespaces of this host, joined by a cable, each with a /dev/shm of its own.  Where
these cannot be made (they are root's to make) they are torchruns on the loopback, which share a
store; the result says which.  Ranks have a GPU or as many cores each on any number of machines, so
what is measured is the software over the host's own network: memory is shared.

Optimizer steps have as many seeds on any number of machines, so the losses of the last epoch must
be alike; no time is reported where they are not.

    python -m benchmarks.two_machines --out two_machines.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from dgl_mgpu.report import read_metrics

#: Seeds of an optimizer step, over all ranks.
BATCH = 1024
#: By how much the losses of the last epoch may differ, relative to that on one machine.
TOLERANCE = 0.1
#: Times as fast as on one machine, of the number of machines, that is to be reached.
AIM = 0.9
#: What a training may take at most; one that hangs is ended, and what it printed is told.
LIMIT_SECONDS = 240.0
#: How long one machine's part goes on when another's has failed: it may wait for that one.
AFTER_FAILURE_SECONDS = 30.0


@dataclass(frozen=True)
class Machine:
    """What stands in for a machine.

    Attributes
    ----------
    address : str
        Of its network.
    cable : str
        Its end of a cable; the loopback's name without one.
    namespace : str
        Of its network; empty for the host's.
    """

    address: str = "127.0.0.1"
    cable: str = "lo"
    namespace: str = ""

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs a command there."""
        if not self.namespace:
            return list(words)
        own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", own, "sh", *words]


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two network namespaces, or the host twice where there can be none."""
    own = os.getpid()
    made = [Machine(f"10.78.0.{n + 1}", f"b{n}v{own}", f"b{n}-{own}") for n in range(2)]
    with contextlib.ExitStack() as cleaning:
        try:
            _join(made, cleaning)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"without network namespaces: {error}")
            made = [Machine(), Machine()]
        yield made


def _join(made: Sequence[Machine], cleaning: contextlib.ExitStack) -> None:
    """Make namespaces and the cable between them.

    Raises
    ------
    OSError, CalledProcessError
        If that is not possible here.
    """
    one, two = made
    for machine in made:
        _ip("netns", "add", machine.namespace)
        cleaning.callback(_ip, "netns", "del", machine.namespace)
    end = ("name", two.cable, "netns", two.namespace)
    _ip("link", "add", one.cable, "netns", one.namespace, "type", "veth", "peer", *end)
    for machine in made:
        here = ("-n", machine.namespace)
        _ip(*here, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
        for cable in ("lo", machine.cable):
            _ip(*here, "link", "set", cable, "up")
    # A mount of its own, which the job needs, may be forbidden where namespaces are not.
    for machine in made:
        subprocess.run(machine.command(["true"]), check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Bench:
    """Training on one and on two machines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        most = 2 * options.ranks
        self._gpus = torch.cuda.device_count() >= most
        self._threads = max(1, len(os.sched_getaffinity(0)) // most)

    def run(self) -> dict[str, Any]:
        """The result; nothing of it is a figure where losses differ."""
        options = self._options
        with two_machines() as machines:
            losses, samples = {}, {}
            for count in (1, 2):
                losses[count], samples[count] = self._train(machines[:count])
            apart = bool(machines[0].namespace)
        off = abs(losses[2] - losses[1]) / losses[1]
        if not off <= TOLERANCE:
            raise ValueError(f"a loss of {losses[2]} on two machines, of {losses[1]} on one")
        epoch_s = {count: statistics.median(each) for count, each in samples.items()}
        figures = [
            {
                "machines": count,
                "ranks": count * options.ranks,
                "epoch_s": epoch_s[count],
                "times_one_machine": epoch_s[1] / epoch_s[count],
                "reached": epoch_s[1] / epoch_s[count] >= AIM * count,
                "loss": losses[count],
                "samples_s": samples[count],
            }
            for count in (1, 2)
        ]
        return {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "machines_are": "network namespaces" if apart else "torchruns on the loopback",
            "device": "GPUs" if self._gpus else f"CPUs, {self._threads} threads a rank",
            "figures": figures,
        }

    def _train(self, machines: Sequence[Machine]) -> tuple[float, list[float]]:
        """The last epoch's loss, and the seconds of every epoch but the first."""
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            jobs = [
                self._start(number, machines, port, Path(folder)) for number in range(len(machines))
            ]
            try:
                deadline = time.monotonic() + LIMIT_SECONDS
                while None in [job.poll() for job in jobs] and time.monotonic() < deadline:
                    if any(job.returncode for job in jobs):
                        deadline = min(deadline, time.monotonic() + AFTER_FAILURE_SECONDS)
                    time.sleep(0.05)
            finally:
                for job in jobs:
                    if job.poll() is None:
                        os.killpg(job.pid, signal.SIGKILL)
                        job.wait()
            codes = [job.returncode for job in jobs]
            if any(codes):
                said = "".join(path.read_text() for path in sorted(Path(folder).glob("*.txt")))
                raise RuntimeError(
                    f"training on {len(machines)} machines ended with {codes}: {said}"
                )
            reports, _ = read_metrics(Path(folder) / "0" / "metrics.jsonl")
        if {report.ranks for report in reports} != {len(machines) * self._options.ranks}:
            raise ValueError(f"not {len(machines)} machines' ranks have trained")
        return reports[-1].loss, [report.training_seconds for report in reports[1:]]

    def _start(
        self, number: int, machines: Sequence[Machine], port: int, folder: Path
    ) -> subprocess.Popen[bytes]:
        options, machine = self._options, machines[number]
        words = {
            "data.root": options.data, "data.options.num_nodes": options.nodes,
            "data.options.num_edges": options.edges,
            "trainer.epochs": options.epochs + 1, "trainer.eval_every": options.epochs + 1,
            "trainer.batch_size": BATCH // (len(machines) * options.ranks),
            "hydra.run.dir": folder / str(number),
        }  # fmt: skip
        torchrun = {
            "nnodes": len(machines), "node-rank": number, "nproc-per-node": options.ranks,
            "master-addr": machines[0].address, "master-port": port,
        }  # fmt: skip
        own = range(number * options.ranks, (number + 1) * options.ranks)
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": machine.cable,
            "NCCL_SOCKET_IFNAME": machine.cable,
            "OMP_NUM_THREADS": str(self._threads),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, own)) if self._gpus else "",
        }
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--{name}={value}" for name, value in torchrun.items()]
        command += ["-m", "dgl_mgpu.cli", "train", *(f"{k}={v}" for k, v in words.items())]
        with (folder / f"{number}.txt").open("wb") as printed:
            return subprocess.Popen(
                machine.command(command),
                env=environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def free_port() -> int:
    """A port that no connection of any program is given by the system before it is listened at."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10_000, 2**16) if not first <= port <= last]
    # Drawn without the seed that others who look for one may have set as well.
    for port in random.SystemRandom().sample(others, len(others)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no port outside {first} to {last} is free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="root of the data sets")
    parser.add_argument("--ranks", type=int, default=1, help="of each machine")
    parser.add_argument("--nodes", type=int, default=200_000, help="of a generated graph")
    parser.add_argument("--edges", type=int, default=3_000_000)
    parser.add_argument("--epochs", type=int, default=5, help="that are timed, after another one")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    found = Bench(options).run()
    print(f"machines are {found['machines_are']}, ranks on {found['device']}")
    for figure in found["figures"]:
        print(
            f"{figure['machines']} machine{'s' * (figure['machines'] > 1)}:"
            f" {figure['epoch_s']:.3g} s an epoch, {figure['times_one_machine']:.2f} times as fast"
        )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
