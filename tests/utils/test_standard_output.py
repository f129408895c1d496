"""A full disk behind stdout: a run goes on, and other commands say so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO

import pytest

from dgl_mgpu.cli import main
from dgl_mgpu.utils.standard_output import lasting_stdout


@contextlib.contextmanager
def full() -> Iterator[TextIO]:
    """A stdout that takes nothing, which is found when it is written out."""
    with open("/dev/full", "w") as file, contextlib.redirect_stdout(file):
        yield file


def test_what_a_run_shows_is_dropped_with_a_warning():
    with (
        full() as file,
        pytest.warns(UserWarning, match=r"No space left on device.*continues") as told,
        lasting_stdout(),
    ):
        for _ in range(2):
            print("x" * 100_000)
            print("more", flush=True)
        file.flush()
    assert len(told) == 1


def test_a_run_goes_on_without_a_stdout(tmp_path, monkeypatch):
    def train(config, folder):
        print("x" * 100_000, flush=True)
        (folder / "done").touch()

    monkeypatch.setattr("dgl_mgpu.train.run.train", train)
    with full(), pytest.warns(UserWarning, match="takes no more"):
        assert main(["train", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "done").exists()


def test_a_command_that_only_shows_fails_without_a_stdout(capfd):
    with full() as file:
        assert main(["topology", "dgx1"]) == 1
        file.flush()
    told = "dgl-mgpu topology: OutputError: cannot write to stdout: [Errno 28] No space left"
    assert told in capfd.readouterr().err


def test_a_gone_reader_is_no_other_case():
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "w") as file,
        contextlib.redirect_stdout(file),
        pytest.warns(UserWarning, match="Broken pipe"),
        lasting_stdout(),
    ):
        print("more", flush=True)
