"""Metrics of a run: JSON Lines on disk, and what loggers make of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dgl_mgpu.errors import DataFormatError, InvalidInputError
from dgl_mgpu.report.epoch import EpochReport
from dgl_mgpu.report.loggers import Logger
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.atomic_write import atomic_write
from dgl_mgpu.utils.checksums import with_sum, without_sum

METRICS_FILE = "metrics.jsonl"

_RESTORE = "restore the file, or move it away to start it anew"


class MetricsLog:
    """Appends each epoch's report to ``metrics.jsonl`` in a folder, and gives it to loggers.

    Every line is on disk before the call that wrote it returns, so a killed run loses at most the
    line it was writing.  Use it as a context manager, on one rank only, which closes the loggers
    as well.  With ``resume_epoch`` it continues the run in the folder after this epoch (0: from
    its start): later epochs and the summary are dropped from the file.

    Raises InvalidInputError if a new run would start in a folder with epochs of another one, and
    DataFormatError if the file to continue is damaged anywhere but in its last line.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loggers: Sequence[Logger] = (),
        resume_epoch: int | None = None,
    ) -> None:
        self.path = Path(folder) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.history: list[EpochReport] = []  #: The epochs in the file.
        if resume_epoch is None:
            require_no_run(self.path.parent)
        if self.path.exists():
            earlier, _ = read_metrics(self.path)
            self.history = [r for r in earlier if r.epoch <= (resume_epoch or 0)]
            with atomic_write(self.path) as file:
                file.writelines(_epoch_line(report).encode() for report in self.history)
        self._file = self.path.open("a", encoding="utf-8")
        self._loggers = loggers
        for report in self.history:
            self._tell_loggers(report)

    def append(self, report: EpochReport) -> None:
        """Write one epoch, merged over the ranks; InvalidInputError if it is not the next one."""
        if self.history and report.epoch <= self.history[-1].epoch:
            raise InvalidInputError(
                f"log epoch {report.epoch}",
                f"epoch {self.history[-1].epoch} is in {self.path} already",
                "log each epoch once, or reopen with resume_epoch",
            )
        self._write(_epoch_line(report))
        self.history.append(report)
        self._tell_loggers(report)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the line that closes a run, with any values of the whole of it."""
        self._write(_line({"kind": "summary", **_finite(dict(values))}))

    def close(self) -> None:
        """Close the file and the loggers; may be called again."""
        self._file.close()
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tell_loggers(self, report: EpochReport) -> None:
        for logger in self._loggers:
            logger.log(scalars(report), report.epoch)

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())


def require_no_run(folder: str | os.PathLike[str], resumed: str | None = None) -> None:
    """Check that a run may start in a folder, which need not exist.

    ``resumed`` names what the run continues from, if that is in another folder.  Raises
    InvalidInputError if the folder holds epochs or checkpoints of another run, and DataFormatError
    if ``metrics.jsonl`` there is damaged.
    """
    path = Path(folder) / METRICS_FILE
    earlier = read_metrics(path)[0] if path.exists() else []
    has_checkpoint = any(path.parent.glob("checkpoints/epoch-*.pt"))
    if earlier or has_checkpoint:
        held = f"{METRICS_FILE} with {len(earlier)} epochs" if earlier else "checkpoints"
        raise InvalidInputError(
            f"start a new run in {path.parent}"
            if resumed is None
            else f"resume {resumed} in {path.parent}",
            f"it holds {held} of another run",
            f"go on with that run (trainer.resume={path.parent}), or choose another folder"
            if has_checkpoint
            else "it ended before its first checkpoint: choose another folder, or remove this one",
        )


def read_metrics(
    path: str | os.PathLike[str],
) -> tuple[list[EpochReport], dict[str, Any] | None]:
    """Read a ``metrics.jsonl``: its epochs in order, and the summary if the run was closed.

    A last line without its newline is an unfinished write of a killed run; it is dropped.  Raises
    DataFormatError if a complete line is damaged, or neither an epoch nor a summary.
    """
    content = Path(path).read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    reports: list[EpochReport] = []
    summary: dict[str, Any] | None = None
    for number, line in enumerate(complete.splitlines(), start=1):
        action = f"read line {number} of {path}"
        try:
            values = without_sum(safe_json.loads(line))
            kind = values.pop("kind")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataFormatError(
                action,
                f"it is not an object with a 'kind', or damaged ({type(error).__name__}: {error})",
                _RESTORE,
            ) from error
        if kind == "epoch":
            try:
                report = EpochReport.from_dict(values)
            except DataFormatError as error:
                raise DataFormatError(action, error.found, _RESTORE) from error
            if reports and report.epoch <= reports[-1].epoch:
                order = f"epoch {report.epoch} comes after epoch {reports[-1].epoch}"
                raise DataFormatError(action, order, _RESTORE)
            reports.append(report)
        elif kind == "summary":
            summary = values
        else:
            raise DataFormatError(
                action, f"its kind is {kind!r}", "use the version of dgl_mgpu that wrote the file"
            )
    return reports, summary


def _epoch_line(report: EpochReport) -> str:
    """One epoch as a line, with derived values."""
    derived = {"seeds_per_second": report.seeds_per_second, "tier_shares": report.tier_shares()}
    return _line({"kind": "epoch", **report.to_dict(), **derived})


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(with_sum(values), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None, for strict JSON."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(report: EpochReport) -> dict[str, float]:
    """What loggers get of an epoch; the part before the slash groups charts."""
    values = {"loss/train": report.loss, f"{report.metric_name}/train": report.train_accuracy}
    if report.valid_accuracy is not None:
        values[f"{report.metric_name}/valid"] = report.valid_accuracy
    if report.test_accuracy is not None:
        values[f"{report.metric_name}/test"] = report.test_accuracy
    values |= {f"time/{name}_seconds": value for name, value in report.seconds.measured().items()}
    values["time/seeds_per_second"] = report.seeds_per_second
    for table in report.tables:
        for tier, share in report.tier_shares(table).items():
            values[f"tiers/{table}_{tier}_share"] = share
        for tier, size in report.tier_bytes(table).items():
            values[f"tiers/{table}_{tier}_bytes"] = size
    return values
