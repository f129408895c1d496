"""In which stage a rank was when it failed, for the error that tells of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from multiprocessing.sharedctypes import RawArray

import torch

from dgl_mgpu.pipeline.stage import StageTimes

_NOTE = "in stage "


class Whereabouts(StageTimes):
    """Follows the stages that this process is in, within ``with``.

    An exception that leaves a stage has a note of it (:func:`stage_of`).

    Parameters
    ----------
    shown : array of bytes, optional
        Has them as well, for another process that asks for the :func:`last_stage` of this one when
        it was killed (:func:`shared_stage`).
    """

    def __init__(self, shown: ctypes.Array[ctypes.c_char] | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._process = os.getpid()
        self._stage = ""
        self._shown = shown

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        if os.getpid() != self._process:  # a worker's stages are not this process's
            yield
            return
        around = self._stage
        self._enter(f"{name} of {around}" if around else name)
        try:
            yield
        except Exception as error:
            if not stage_of(error):
                error.add_note(_NOTE + self._stage)
            raise
        finally:
            self._enter(around)

    def _enter(self, stage: str) -> None:
        self._stage = stage
        if self._shown is not None:
            self._shown.value = stage.encode()[: len(self._shown)]


def shared_stage() -> ctypes.Array[ctypes.c_char]:
    """Memory for a stage, empty, which reaches a process that it is given to when that starts."""
    return RawArray(ctypes.c_char, 80)


def stage_of(error: BaseException) -> str:
    """``" in stage gather of evaluate"``, say, for the end of a sentence; "" if in none."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next((f" {note}" for note in notes), "")


def last_stage(shown: ctypes.Array[ctypes.c_char]) -> str:
    """The same of a process that has ended, from what it has shown."""
    stage = shown.value.decode(errors="replace")
    return f" {_NOTE}{stage}" if stage else ""
