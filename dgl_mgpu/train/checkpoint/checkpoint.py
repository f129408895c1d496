"""Checkpoints: written atomically, read without executing code.

A file is an archive of ``torch.save``.  Parts of a state dict that are in files, learned rows, are
members of their own there, copied in pieces: a checkpoint may be larger than memory.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from dgl_mgpu.comm.serialization import register
from dgl_mgpu.config.schema import config_of_run, flat
from dgl_mgpu.errors import CheckpointError, ConfigError
from dgl_mgpu.train.checkpoint.validation import MEMBER, invalid_field
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.atomic_write import atomic_write
from dgl_mgpu.utils.checksums import DAMAGE, damaged_part
from dgl_mgpu.utils.temporary_folder import temporary_folder

log = logging.getLogger(__name__)

_FORMAT = 3
_JSON = ("reports", "config", "plan", "parts", "captured")
_STATES = ("model", "best_model")
_NAME = re.compile(r"epoch-(\d+)\.pt")
_PIECE_BYTES = 16 << 20


class _Damaged(Exception):
    """Damage of a file, in place of which an earlier one is read."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue as if it had never stopped."""

    epoch: int  # Epochs done
    # State dicts. What is too large for memory is a `SpilledState` in them.
    model: dict[str, Any]
    optimizer: dict[str, Any]
    best_model: dict[str, Any]  # State dict of the epoch of best validation accuracy
    # uint8: states of each rank's generators, that of the device its model is on and the CPU's
    random: list[torch.Tensor]
    reports: list[dict]  # The report of each epoch so far
    config: dict  # The run's configuration
    plan: dict  # The store's placement; empty without a store
    batches: int = 0  # Batches of the next epoch that all ranks together have done already
    parts: list[dict] = field(default_factory=list)  # Sums of each rank over these batches
    # The state of each rank's CUDA graph capture; empty without any
    captured: list[dict] = field(default_factory=list)

    def save(self, folder: Path, keep: int = 1, best: int | None = None) -> Path:
        """Write ``folder/epoch-NNNN.pt`` and drop what is not to be kept; return its path.

        The file gets its name only when it is complete and on disk, so that a crash or a full disk
        leaves the last good checkpoint as it was.  Kept are the last ``keep``, including this one,
        and the first with the model of epoch ``best``.  Those of later epochs, of a run that
        resumed from an earlier one, are removed.  Raises CheckpointError if it cannot be written.
        """
        path = folder / f"epoch-{self.epoch:04d}.pt"
        content = {"format": _FORMAT} | {name: getattr(self, name) for name in _FIELDS}
        # Tensors and plain containers only, for weights_only.
        for name in _JSON:
            content[name] = json.dumps(content[name])
        files: dict[SpilledState, int] = {}  # the last and the best model may share some
        for name in _STATES:
            content[name] = _replace_files(content[name], files)
        try:
            with atomic_write(path) as file:
                torch.save(content, file)
                if files:
                    _append(file, files)
            _sync_folder(folder)
            # Killed runs leave partial files.
            for other in [*self._outdated(folder, keep, best), *folder.glob("epoch-*.partial")]:
                other.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            # torch replaces the OSError of a failed write by an error of its own.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise CheckpointError(
                f"write checkpoint {path}", str(cause), "free space there, or choose another folder"
            ) from error
        return path

    def _outdated(self, folder: Path, keep: int, best: int | None) -> list[Path]:
        paths = checkpoints(folder)
        so_far = [path for path in paths if _epoch(path) <= self.epoch]
        needed = so_far[-keep:]
        if best is not None:
            needed += [path for path in so_far if _epoch(path) >= best][:1]
        return [path for path in paths if path not in needed]

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a checkpoint: a file, or the last one of a run's folder that is whole.

        Warns of one that is damaged and has one before it in the folder.  Raises CheckpointError if
        there is none, or it is truncated, corrupt or of another format, a field holds what it
        cannot, or there is no space for what it has of files.
        """
        paths = _find(Path(path))
        damages = []
        for file in paths:
            try:
                checkpoint = cls._read(file)
            except _Damaged as damage:
                damages.append(str(damage))
                continue
            for bad, why in zip(paths, damages, strict=False):
                log.warning("%s is left out, %s; %s is taken instead", bad, why, file)
            return checkpoint
        also = f", and so are the {len(paths) - 1} before it" if len(paths) > 1 else ""
        raise CheckpointError(f"resume from {paths[0]}", damages[0] + also, _RESUME_FIX)

    @classmethod
    def _read(cls, path: Path) -> Checkpoint:
        action = f"resume from {path}"
        try:
            with zipfile.ZipFile(path) as archive:
                part = damaged_part(archive)
            if part:
                raise _Damaged(f"its part {part} is damaged")
            content = torch.load(path, "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                action, "it holds something other than tensors and plain values", _RESUME_FIX
            ) from error
        except DAMAGE as error:
            raise _Damaged(f"it is damaged ({error})") from error
        # Compared as text, since another file may have a tensor there.
        if not isinstance(content, Mapping) or repr(content.get("format")) != repr(_FORMAT):
            raise CheckpointError(
                action, f"it is not a checkpoint of format {_FORMAT} of this package", _RESUME_FIX
            )
        # Checkpoints of earlier versions lack it.
        content = {"captured": "[]", **content}
        missing = [name for name in _FIELDS if name not in content]
        if missing:
            raise CheckpointError(action, f"it lacks {missing}", _RESUME_FIX)
        values = {name: content[name] for name in _FIELDS}
        try:
            for name in _JSON:
                values[name] = safe_json.loads(values[name])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                action, f"its field {name} is not JSON ({error})", _RESUME_FIX
            ) from error
        if (wrong := invalid_field(values)) is not None:
            name, problem = wrong
            raise CheckpointError(action, f"its field {name} {problem}", _RESUME_FIX)
        try:
            _restore_files(path, [values[name] for name in _STATES])
        except OSError as error:
            raise CheckpointError(
                action,
                f"its learned rows cannot be copied ({error})",
                "free space there, or set TMPDIR to a folder that has it",
            ) from error
        except DAMAGE as error:
            raise _Damaged(f"it is damaged ({error})") from error
        return cls(**values)

    def require_same_run(self, config: Mapping[str, Any]) -> None:
        """Check that ``config`` continues the run this was saved by.

        A resumed run may change how it is carried out: ranks, workers, the places of the data and
        of the store (but not feature types), the partition and exchange of a graph, the capture of
        steps, and the number of epochs. Raises CheckpointError.
        """
        _require_same_run(self.config, config)


def require_resumable(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless there is a checkpoint of the run that ``config`` continues."""
    _require_same_run(saved_config(path), config)


def saved_config(path: Path) -> dict[str, Any]:
    """The configuration that a checkpoint has; nothing of its states is read for it.

    Of a run's folder, that of the last checkpoint whose configuration is whole.  Raises
    CheckpointError if it is damaged, or not plain values of a run of this package.
    """
    damage = None
    for file in _find(path):
        action = f"resume from {file}"
        try:
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    if name.endswith("/data.pkl"):
                        archive.read(name)  # checks its CRC, which torch does not
            # Tensors stay in the file.
            content = torch.load(file, "cpu", weights_only=True, mmap=True)
            saved = safe_json.loads(content["config"])
            config_of_run(saved)
            return saved
        except ConfigError as error:
            raise CheckpointError(
                action, f"its field config does not do: {error.asked}: {error.found}", _RESUME_FIX
            ) from error
        except (pickle.UnpicklingError, *DAMAGE) as error:
            damage = damage or CheckpointError(action, f"it is damaged ({error})", _RESUME_FIX)
    assert damage is not None  # a folder without a checkpoint raised before
    raise damage


def _require_same_run(before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    saved, new = _identity(before), _identity(config)
    differing = sorted(key for key in saved.keys() | new.keys() if saved.get(key) != new.get(key))
    if differing:
        name, *further = differing
        raise CheckpointError(
            f"resume with {name}={new.get(name)}",
            f"the checkpoint was saved with {name}={saved.get(name)}"
            + (f" (and {further} differ too)" if further else ""),
            "resume with the configuration of the run, or start a new run",
        )


_FIELDS = tuple(Checkpoint.__dataclass_fields__)
_RESUME_FIX = "resume from another checkpoint, or start anew without trainer.resume"
_CHANGEABLE = re.compile(
    r"topology|store\.(?!feature_dtypes\.).*|fullgraph\..*|data\.root|sampler\.num_workers"
    r"|trainer\.(ranks|epochs|resume|max_restarts|hang_after|eval_every|checkpoint_every|keep_checkpoints"
    r"|count_accesses|profile|loggers|terminate_on_nan|shard_optimizer|cuda_graphs)"
)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    paths = (path for path in folder.glob("epoch-*.pt") if _NAME.fullmatch(path.name))
    return sorted(paths, key=_epoch)


def _epoch(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])  # type: ignore[index]


class LastCheckpoint:
    """The last checkpoint of a run that begins, in a folder that may have those of another run."""

    def __init__(self, folder: Path, resumed: str | None) -> None:
        self._folder = folder / "checkpoints"
        self._resumed = resumed
        self._before = set(self._written())

    @property
    def path(self) -> Path | None:
        """Its path; None if the run has written none yet."""
        written = [path for path, number in self._written() if (path, number) not in self._before]
        return written[-1] if written else None

    def advice(self) -> str:
        """The last checkpoint and how to resume from it, as the end of a sentence."""
        if self.path is not None:
            last = _relative_to_cwd(self.path)
            go_on = f"trainer.resume={_relative_to_cwd(self._folder.parent)} goes on from there"
            return f"; the last checkpoint is {last}: dgl-mgpu train {go_on}"
        if self._resumed is None:
            return " before the first checkpoint was written"
        again = f"dgl-mgpu train trainer.resume={self._resumed} goes on from where this run did"
        return f" before a checkpoint was written: {again}"

    def _written(self) -> list[tuple[Path, int]]:
        # By inode, since a rewritten checkpoint is another file.
        return [(path, path.stat().st_ino) for path in checkpoints(self._folder)]


def _relative_to_cwd(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def run_folder(resumed: str | os.PathLike[str]) -> Path:
    """The folder of a run, which it names itself, or that of its checkpoints, or one of them."""
    path = Path(resumed)
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == "checkpoints" else folder


def resumes_in(folder: Path, resumed: str | None) -> bool:
    """Whether a run resumes in its own folder `folder`."""
    return resumed is not None and run_folder(resumed).resolve() == folder.resolve()


def has_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, or the folder of a run that has one."""
    return bool(_candidates(path))


def _candidates(path: Path) -> list[Path]:
    """A checkpoint, or all of a folder, the last one first; or none."""
    if path.is_dir():
        return (checkpoints(path) or checkpoints(path / "checkpoints"))[::-1]
    return [path] if path.exists() else []


def _find(path: Path) -> list[Path]:
    """The candidates; raises CheckpointError if there are none."""
    if paths := _candidates(path):
        return paths
    action = f"resume from {path}"
    if path.is_dir():
        raise CheckpointError(action, "the folder holds no checkpoint", _RESUME_FIX)
    raise CheckpointError(action, "there is no such file or folder", "check trainer.resume")


def _identity(config: Mapping[str, Any]) -> dict[str, str]:
    """The options that identify a run, as JSON, as a checkpoint has them."""
    keys = flat(config).items()
    return {key: json.dumps(value) for key, value in keys if not _CHANGEABLE.fullmatch(key)}


def _replace_files(state: dict[str, Any], files: dict[SpilledState, int]) -> dict[str, Any]:
    """The state with numbers in place of its files; ``files`` gets those that it has not yet."""
    state = copy.copy(state)
    for key, value in state.items():
        if isinstance(value, SpilledState):
            state[key] = {MEMBER: files.setdefault(value, len(files))}
    return state


def _restore_files(path: Path, states: list[dict[str, Any]]) -> None:
    """Undo `_replace_files`."""
    files: dict[int, SpilledState] = {}
    with zipfile.ZipFile(path) as archive:
        for state in states:
            for key, value in state.items():
                if isinstance(value, Mapping) and MEMBER in value:
                    number = value[MEMBER]
                    if number not in files:
                        with archive.open(_member(archive, number)) as member:
                            files[number] = SpilledState.copy_of(member)
                    state[key] = files[number]


def _append(file: BinaryIO, files: Mapping[SpilledState, int]) -> None:
    """Add members to an archive."""
    with zipfile.ZipFile(file, "a") as archive:
        for state, number in files.items():
            with archive.open(_member(archive, number), "w", force_zip64=True) as member:
                state.copy_to(member)


def _member(archive: zipfile.ZipFile, number: int) -> str:
    # torch wants all members in one folder, and names it.
    folder, _, _ = archive.namelist()[0].partition("/")
    return f"{folder}/files/{number}"


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SpilledState:
    """A part of a state dict, in a file without a name, which goes with the last reference to it.

    It is for what is too large for memory.  Copies of the state dict share it.  It lies in
    ``TMPDIR``, or else in ``/var/tmp``: ``/tmp`` may be memory.  Of a job's ranks the first one has
    it: what it sends the others is empty.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file

    @classmethod
    def written_by(cls, write: Callable[[Path], None]) -> SpilledState:
        """The file that ``write`` writes to the path it is given; empty if it writes none."""
        place = os.environ.get("TMPDIR", "/var/tmp")
        with temporary_folder(Path(place)) as folder:
            path = folder / "state"
            write(path)
            return cls(open(path, "rb") if path.exists() else None)

    @classmethod
    def copy_of(cls, source: IO[bytes]) -> SpilledState:
        """A copy of the rest of a file."""

        def write(path: Path) -> None:
            with open(path, "wb") as file:
                shutil.copyfileobj(source, file, _PIECE_BYTES)

        return cls.written_by(write)

    @property
    def path(self) -> Path:
        """A path for this process, valid as long as this object."""
        return Path(os.devnull if self._file is None else f"/proc/self/fd/{self._file.fileno()}")

    def copy_to(self, target: IO[bytes]) -> None:
        """Write all of it to a file, a piece at a time."""
        with open(self.path, "rb") as source:
            shutil.copyfileobj(source, target, _PIECE_BYTES)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpilledState:
        return self


register(SpilledState, lambda state: None, lambda _: SpilledState())
