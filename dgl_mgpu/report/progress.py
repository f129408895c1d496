"""Progress of a training run: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import textwrap
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dgl_mgpu.report.epoch import ACCURACY, WITHIN_OTHERS, EpochReport
from dgl_mgpu.utils.units import human_bytes, human_count, human_seconds, human_share

#: Columns of a line, whatever the terminal: logs are read elsewhere.
LINE_WIDTH = 80
#: With more tables than this, the lines of an epoch show all tables together.
MAX_TABLES_SHOWN = 4
#: Without bars, a long epoch prints a line this often.
PLAIN_INTERVAL_SECONDS = 30.0
#: Bars are redrawn this often at most.
BARS_INTERVAL_SECONDS = 0.1

_STAGE_NAMES = {"compute": "forward/backward", "evaluate": "eval"}


class TrainProgress:
    """Shows a run while it trains; a context manager, to be created on rank 0 only.

    On a terminal two bars (the run and its current epoch) stay below the lines of finished epochs.
    Elsewhere only lines are printed: those of each epoch and, every 30 seconds, the position in
    it.  Epochs count from 1; `first_epoch` is larger after resuming; `metric_name` is
    `EpochReport.metric_name`.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int,
        console: Console | None = None,
        first_epoch: int = 1,
        metric_name: str = ACCURACY,
    ) -> None:
        self._console = console or Console()
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._epoch = first_epoch
        self._metric = "acc" if metric_name == ACCURACY else metric_name
        self._epoch_start = self._last_line = time.monotonic()
        self._best_valid: float | None = None
        self._bars: Progress | None = None
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
                # Not by a thread: its output would pass for progress of the rank.
                auto_refresh=False,
            )
            self._run_bar = self._bars.add_task(
                "run", total=epochs, completed=first_epoch - 1, status=""
            )
            self._epoch_bar = self._bars.add_task(
                self._epoch_name, total=steps_per_epoch, status=""
            )

    def __enter__(self) -> TrainProgress:
        if self._bars is not None:
            self._bars.start()
        self._start_epoch_clock()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, step: int, loss: float, accuracy: float | None, seeds: int) -> None:
        """Show the position in the current epoch: steps, seeds trained on so far by all ranks.

        Loss and accuracy are the last step's or the mean so far.
        """
        now = time.monotonic()
        interval = PLAIN_INTERVAL_SECONDS if self._bars is None else BARS_INTERVAL_SECONDS
        is_due = now - self._last_line >= interval
        if is_due:
            self._last_line = now
        elif self._bars is None:
            return
        rate = seeds / max(now - self._epoch_start, 1e-9)
        metrics = [f"loss {loss:.4f}"]
        if accuracy is not None:
            metrics.append(f"{self._metric} {human_share(accuracy)}")
        metrics.append(f"{human_count(rate)} seeds/s")
        status = "  ".join(metrics)
        if self._bars is not None:
            self._bars.update(self._epoch_bar, completed=step, status=status, refresh=is_due)
        else:
            self._print(f"{self._epoch_name}  step {step}/{self._steps_per_epoch}  {status}")

    def epoch_done(self, report: EpochReport) -> None:
        """Print the lines of an epoch above the bars and turn to the next one."""
        self._print("\n".join(epoch_lines(report, self._epochs)))
        self._epoch = report.epoch + 1
        if self._bars is not None:
            if report.valid_accuracy is not None:
                best = report.valid_accuracy
                if self._best_valid is not None:
                    best = max(best, self._best_valid)
                self._best_valid = best
                self._bars.update(self._run_bar, status=f"best valid {human_share(best)}")
            self._bars.update(self._run_bar, completed=report.epoch)
            if self._epoch <= self._epochs:
                self._bars.reset(self._epoch_bar, description=self._epoch_name, status="")
            else:
                self._bars.update(self._epoch_bar, completed=self._steps_per_epoch)
            self._bars.refresh()
        self._start_epoch_clock()

    @property
    def _epoch_name(self) -> str:
        return f"epoch {self._epoch}/{self._epochs}"

    def _start_epoch_clock(self) -> None:
        self._epoch_start = self._last_line = time.monotonic()

    def _print(self, text: str) -> None:
        # The lines have their own layout, and logs stay free of control characters.
        self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def epoch_lines(report: EpochReport, epochs: int) -> list[str]:
    """An epoch's accuracy, time by stage and tiers, as lines of at most 80 columns."""
    head = [f"epoch {report.epoch}/{epochs}", f"loss {report.loss:.4f}"]
    metric = "" if report.metric_name == ACCURACY else f" {report.metric_name}"
    for split in ("train", "valid", "test"):
        value = getattr(report, f"{split}_accuracy")
        if value is not None:
            head.append(f"{split}{metric} {human_share(value)}")
    head.append(f"{human_count(report.seeds_per_second)} seeds/s")
    shown = {
        stage: f"{_STAGE_NAMES.get(stage, stage)} {human_seconds(seconds)}"
        for stage, seconds in report.seconds.measured().items()
        if stage != "total" and (stage != "evaluate" or report.valid_accuracy is not None)
    }
    parts = [text for stage, text in shown.items() if stage not in WITHIN_OTHERS]
    of_ranks = f"; mean of {report.ranks} ranks" if report.ranks > 1 else ""
    time = f"{human_seconds(report.seconds.total)}{of_ranks}"
    timed = [f"{time}: {parts[0]}", *parts[1:]] if parts else [time]
    lines = _wrapped("", head, "  ") + _wrapped("  ", timed, ", ")
    within = [text for stage, text in shown.items() if stage in WITHIN_OTHERS]
    if within:
        lines += _wrapped("  of which ", within, ", ")
    tables: tuple[str | None, ...] = report.tables
    for table in tables if len(tables) <= MAX_TABLES_SHOWN else (None,):
        sizes = report.tier_bytes(table)
        tiers = [
            f"{tier} {human_share(share)} ({human_bytes(sizes[tier])})"
            for tier, share in report.tier_shares(table).items()
        ]
        lines += _wrapped(f"  {table or 'all'} rows: ", tiers, ", ")
    return lines


def _wrapped(label: str, parts: list[str], separator: str) -> list[str]:
    """Join `parts`, breaking lines only between them; further lines are indented by 4."""
    unbroken = [part.replace(" ", "\0") for part in parts]  # not white space to textwrap
    lines = textwrap.wrap(
        label + separator.join(unbroken),
        LINE_WIDTH,
        initial_indent="",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ").rstrip() for line in lines]
