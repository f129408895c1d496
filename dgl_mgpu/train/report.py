"""The report of a run, which its first rank shows and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from dgl_mgpu.config.schema import Config, flat
from dgl_mgpu.report import EpochReport, MetricsLog, TrainProgress, best_epoch, summary_table
from dgl_mgpu.report.loggers import open_loggers
from dgl_mgpu.train.checkpoint.checkpoint import resumes_in
from dgl_mgpu.train.trainer import Progress, Trainer
from dgl_mgpu.utils.atomic_write import typed_output
from dgl_mgpu.utils.extras import is_installed


class RunReport:
    """A run's progress on the screen; metrics, curves and summary in its folder.

    Used as a context manager while epochs run.  ``restarts`` counts how often the run was started
    again.  All methods raise OutputError if the folder is full or cannot be written.
    """

    def __init__(self, config: Config, folder: Path, trainer: Trainer, restarts: int = 0) -> None:
        self._config = config
        self._restarts = restarts
        self._folder = folder
        self._plan = trainer.plan
        self._console = Console()
        # A run that resumes in its own folder, or is restarted, rewrites its epochs.
        with self._writing():
            goes_on = resumes_in(folder, config.trainer.resume) or restarts > 0
            configuration = flat(asdict(config))
            loggers = open_loggers(config.trainer.loggers, folder, configuration)
            self._log = MetricsLog(folder, loggers, resume_epoch=0 if goes_on else None)
            for earlier in trainer.reports:
                self._log.append(earlier)
        self._progress = TrainProgress(
            config.trainer.epochs,
            trainer.steps_per_epoch,
            self._console,
            first_epoch=trainer.epoch + 1,
            metric_name=trainer.criterion.metric_name,
        )
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> RunReport:
        self._shown.enter_context(self._progress)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._shown.close()
        # An error of the run is not hidden by one of a full disk.
        with self._writing() if kind is None else contextlib.suppress(OSError):
            self._log.close()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return typed_output(
            f"write metrics and curves to {self._folder}",
            "free space there, or choose another folder (hydra.run.dir); trainer.resume goes "
            "on from the last checkpoint",
        )

    def step(self, progress: Progress) -> None:
        """Show a step."""
        self._progress.update(*progress)

    def epoch(self, report: EpochReport) -> None:
        """Show and write an epoch."""
        self._progress.epoch_done(report)
        with self._writing():
            self._log.append(report)

    def stopped(self) -> None:
        """Write the page of a run that stops early."""
        self._shown.close()
        self._write_page()

    def finish(self, reports: list[EpochReport], test_accuracy: float) -> None:
        """Show and write the results of the whole run."""
        self._shown.close()  # the bars, which would stay below the table
        best = best_epoch(reports)
        summary = {
            "test_accuracy": test_accuracy,
            "best_epoch": None if best is None else best.epoch,
            "valid_accuracy": None if best is None else best.valid_accuracy,
            "restarts": self._restarts,
        }
        if is_installed("matplotlib"):
            # Imported here: it takes a second.
            from dgl_mgpu.report.plots import plot_curves

            with self._writing():
                plot_curves(reports, self._folder / "curves.png", self._title)
        self._write_page(summary)
        with self._writing():
            self._log.summary(summary)  # last: it marks the run as complete
        self._console.print(summary_table(reports, self._title, test_accuracy))
        self._console.print(
            f"report.html, metrics and checkpoint: {self._folder}", highlight=False, soft_wrap=True
        )

    @property
    def _title(self) -> str:
        return f"{self._config.model.name} on {self._config.data.name}"

    def _write_page(self, summary: Mapping[str, Any] | None = None) -> None:
        from dgl_mgpu.report.html import environment, write_report

        with self._writing():
            configuration = flat(asdict(self._config))
            write_report(
                self._folder, self._title, configuration, environment(), self._plan, summary
            )
