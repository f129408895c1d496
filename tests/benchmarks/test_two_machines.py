"""The benchmark of several machines, which are network namespaces here or torchruns."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import two_machines


def run(monkeypatch, tmp_path) -> dict:
    out = tmp_path / "found.json"
    few = f"--nodes 3000 --edges 30000 --epochs 2 --data {tmp_path} --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *few.split()])
    two_machines.main()
    return json.loads(out.read_text())


@pytest.mark.slow
def test_two_machines_train_as_one_does(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path)
    one, two = found["figures"]
    assert (one["machines"], two["machines"], two["ranks"]) == (1, 2, 2)
    assert two["times_one_machine"] == one["epoch_s"] / two["epoch_s"]
    assert len(one["samples_s"]) == len(two["samples_s"]) == 2
    assert two["loss"] == pytest.approx(one["loss"], rel=two_machines.TOLERANCE)
    if shutil.which("ip"):
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
        assert f"b0-{os.getpid()}" not in left.stdout and f"b1-{os.getpid()}" not in left.stdout


@pytest.mark.slow
def test_torchruns_stand_in_where_there_are_no_namespaces(monkeypatch, tmp_path, capsys):
    def forbidden(*_) -> None:
        raise PermissionError("not root")

    train = two_machines.Bench._train
    monkeypatch.setattr(two_machines, "_ip", forbidden)
    monkeypatch.setattr(
        two_machines.Bench,
        "_train",
        lambda bench, machines: train(bench, machines) if len(machines) > 1 else (1.0, [1.0]),
    )
    monkeypatch.setattr(two_machines, "TOLERANCE", float("inf"))  # one machine's loss is no loss
    found = run(monkeypatch, tmp_path)
    assert found["figures"][1]["ranks"] == len(found["figures"][1]["samples_s"]) == 2
    assert found["machines_are"] == "torchruns on the loopback"
    assert "without network namespaces: not root" in capsys.readouterr().out


def test_other_losses_on_two_machines_are_refused(monkeypatch, tmp_path):
    losses = iter((1.0, 1.2))
    monkeypatch.setattr(two_machines.Bench, "_train", lambda *_: (next(losses), [1.0]))
    with pytest.raises(ValueError, match=r"a loss of 1\.2 on two machines"):
        run(monkeypatch, tmp_path)
    assert not (tmp_path / "found.json").exists()


def test_a_machine_whose_peer_has_failed_is_ended_with_it(monkeypatch, tmp_path):
    """The port is another program's: the first one cannot listen, the second is not answered."""
    monkeypatch.setattr(two_machines, "AFTER_FAILURE_SECONDS", 0.5)
    monkeypatch.setattr(two_machines, "LIMIT_SECONDS", float("inf"))
    options = SimpleNamespace(data=tmp_path, ranks=1, nodes=3000, edges=30000, epochs=2)
    with socket.create_server(("", 0)) as other:
        monkeypatch.setattr(two_machines, "free_port", lambda: other.getsockname()[1])
        with pytest.raises(
            RuntimeError, match=r"(?s)on 2 machines ended with \[1, -9\].*EADDRINUSE"
        ):
            two_machines.Bench(options)._train([two_machines.Machine()] * 2)


def test_a_port_is_none_that_the_system_gives_to_connections():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [two_machines.free_port() for _ in range(100)]
    assert len(set(ports)) > 1
    assert not any(first <= port <= last for port in ports)


def test_a_job_that_fails_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(two_machines, "BATCH", 0)
    with pytest.raises(RuntimeError, match=r"(?s)training on 1 machines ended with .*batch_size"):
        run(monkeypatch, tmp_path)
