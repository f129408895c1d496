"""A seed reaches its loss from the command line through few files, named in the architecture."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import dgl_mgpu
from dgl_mgpu.cli import main
from dgl_mgpu.train.minibatch import trainer
from dgl_mgpu.train.objectives import SingleLabel
from dgl_mgpu.utils.stages import stage
from tests.train.jobs import SMALL

PACKAGE = Path(dgl_mgpu.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
#: Those that call the store and samplers: others' files are their own tests' matter.
ROOMS = ("cli.py", "train/", "report/", "config/")


def test_a_seed_goes_through_the_files_that_the_page_names(tmp_path, monkeypatch, without_pictures):
    files: dict[str, None] = {}
    loads, loss = [], SingleLabel.loss

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename) if frame is not None else Path()
        if event == "call" and path.is_relative_to(PACKAGE):
            files[path.relative_to(PACKAGE).as_posix()] = None

    def stage_and_note(name: str) -> stage:
        loads.append(name) if name == "load" else None
        if loads == ["load"] * 2 and not files:  # the first step loads modules
            sys.setprofile(note)
        return stage(name)

    def noted_loss(*arguments: Any) -> Any:
        if files and sys.getprofile() is note:
            sys.setprofile(None)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if frame.f_code.co_name != "<module>":
                    note(frame, "call", None)
                frame = frame.f_back
            files[Path(loss.__code__.co_filename).relative_to(PACKAGE).as_posix()] = None
        return loss(*arguments)

    monkeypatch.setattr(trainer, "stage", stage_and_note)
    monkeypatch.setattr(SingleLabel, "loss", noted_loss)
    options = f"data.root={tmp_path}", "trainer.epochs=1", f"hydra.run.dir={tmp_path / 'run'}"
    try:
        assert main(["train", *SMALL, *options]) == 0
    finally:
        sys.setprofile(None)
    sentence = re.search(r"a seed goes through (.*?) to its loss\.", PAGE.read_text(), re.DOTALL)
    assert sentence
    here = [file for file in files if file.startswith(ROOMS)]
    assert sorted(here) == sorted(re.findall(r"`([\w/]+\.py)`", sentence[1]))
    assert len(here) <= 7
    assert len(files) <= 50, sorted(files)
