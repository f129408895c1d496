"""What one epoch did: the record that progress, metrics, tables and plots are made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dgl_mgpu.errors import DataFormatError, InvalidInputError

ACCURACY, AUC, ROC_AUC = "accuracy", "AUC", "ROC AUC"
"""What accuracies may be called, in reports of whose epochs :attr:`EpochReport.figure` says it."""

MEANINGS = {
    AUC: "AUC: how often an edge scores higher than another pair of its source that is no edge",
    ROC_AUC: "ROC AUC: how often a node with a label scores higher for it than one without, "
    "on average over the labels",
}
"""Of what does not say it by its name."""

_FAR_LONGER = 4.0
"""Times the median from which on a time is not one to scale a picture by."""

WITHIN_OTHERS = frozenset({"exchange", "waiting"})
"""Of :class:`StageSeconds`, what other stages include: not to be added to these."""


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Wall-clock seconds of one epoch by stage; None where training has no such stage.

    Stages that overlap each count in full, so the parts may add up to more than `total`.  Of
    several ranks each stage is the mean, `total` the slowest rank's.

    Attributes
    ----------
    sample, gather : float or None
        Seconds spent sampling blocks and gathering features and labels.
    compute : float or None
        Seconds of forward and backward, where they are not told apart, and of the optimizer step,
        where there is no `update`.
    forward, backward : float or None
        Seconds of each, exchanging rows with other ranks included.
    exchange : float or None
        Of forward and backward, seconds in which rows were on their way between GPUs, waiting for
        slower ranks included.  None on CPUs, where nobody sees how long that takes.
    waiting : float or None
        Of forward and backward, seconds in which nothing was computed for want of other ranks'
        rows: what of the exchange was not hidden.
    update : float or None
        Seconds of adding up all ranks' gradients, waiting for theirs included, and of the optimizer
        step.
    evaluate : float
        Seconds spent on validation and test accuracy.
    total : float
        Seconds of the whole epoch, `evaluate` included.
    """

    sample: float | None = None
    gather: float | None = None
    compute: float | None = None
    forward: float | None = None
    backward: float | None = None
    exchange: float | None = None
    waiting: float | None = None
    update: float | None = None
    evaluate: float
    total: float

    def measured(self) -> dict[str, float]:
        """Seconds of the stages there are, `total` last."""
        return {name: seconds for name, seconds in asdict(self).items() if seconds is not None}


@dataclass(frozen=True)
class TierTraffic:
    """Rows of one table read from one tier of the store during an epoch.

    Attributes
    ----------
    name : str
        The tier: ``"device"``, ``"peer"``, ``"replica"``, ``"host"``, ``"disk"``.
    table : str
        The table read, such as ``"feat"`` or ``"topology"``.
    rows, bytes : int
        How many rows were read, and how many bytes they hold.
    """

    name: str
    table: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class EpochReport:
    """One epoch of training, of one rank or (after :func:`merge`) of all.

    Attributes
    ----------
    epoch : int
        Number of the epoch, counted from 1: what is shown is what is in the files.
    steps : int
        Optimizer steps.
    seeds : int
        Seed nodes (or edges) trained on.
    loss : float
        Mean training loss over the seeds; NaN and infinity are allowed, as they happen.
    train_accuracy : float
        Share of right answers on the seeds while training, in 0..1.
    valid_accuracy, test_accuracy : float or None
        The same of the other splits; None in epochs that were not evaluated.
    seconds : StageSeconds
        Time by stage.
    tiers : tuple of TierTraffic
        Rows and bytes by table and tier, at most one entry for each pair.
    ranks : int
        How many ranks this report stands for.
    figure : str
        What accuracies are called where they are shown: "accuracy", "ROC AUC" where nodes may have
        several labels, or "AUC" of link prediction.

    Raises
    ------
    InvalidInputError
        If `epoch` is smaller than 1.
    """

    epoch: int
    steps: int
    seeds: int
    loss: float
    train_accuracy: float
    valid_accuracy: float | None
    test_accuracy: float | None
    seconds: StageSeconds
    tiers: tuple[TierTraffic, ...]
    ranks: int
    figure: str = ACCURACY

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise InvalidInputError(
                "report an epoch", f"its number is {self.epoch}", "count epochs from 1"
            )

    @property
    def seeds_per_second(self) -> float:
        """Seeds over the time of training, evaluation left out; 0.0 if no time was measured."""
        return self.seeds / self.training_seconds if self.training_seconds > 0.0 else 0.0

    @property
    def training_seconds(self) -> float:
        """Seconds of the epoch without evaluation."""
        return self.seconds.total - self.seconds.evaluate

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables read, in the order of `tiers`."""
        return tuple(dict.fromkeys(tier.table for tier in self.tiers))

    def tier_rows(self, table: str | None = None) -> dict[str, int]:
        """Rows read from each tier, of `table` or (None) of all tables together."""
        return self._sum_by_tier(table, lambda tier: tier.rows)

    def tier_bytes(self, table: str | None = None) -> dict[str, int]:
        """Bytes read from each tier, of `table` or (None) of all tables together."""
        return self._sum_by_tier(table, lambda tier: tier.bytes)

    def tier_shares(self, table: str | None = None) -> dict[str, float]:
        """Share of the rows served by each tier, of `table` or (None) of all tables.

        The shares add up to 1, or are all 0.0 where no row was read.
        """
        rows = self.tier_rows(table)
        total = sum(rows.values())
        return {tier: count / total if total else 0.0 for tier, count in rows.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for strict JSON.

        A loss or accuracy that is not finite becomes None, because JSON has no word for it.
        """
        values = asdict(self)
        values["seconds"] = self.seconds.measured()
        values["tiers"] = list(values["tiers"])
        for name in ("loss", "train_accuracy", "valid_accuracy", "test_accuracy"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochReport:
        """Read back what :meth:`to_dict` wrote; keys that it does not know are ignored.

        A loss or training accuracy of None comes back as NaN.

        Raises
        ------
        DataFormatError
            If a key is missing or a value is of another type.
        """
        try:
            return cls(
                epoch=whole(values["epoch"]),
                steps=whole(values["steps"]),
                seeds=whole(values["seeds"]),
                loss=_float_or(values["loss"], math.nan),
                train_accuracy=_float_or(values["train_accuracy"], math.nan),
                valid_accuracy=_float_or(values["valid_accuracy"], None),
                test_accuracy=_float_or(values["test_accuracy"], None),
                seconds=_stage_seconds(values["seconds"]),
                tiers=tuple(
                    TierTraffic(
                        name=text(tier["name"]),
                        table=text(tier["table"]),
                        rows=whole(tier["rows"]),
                        bytes=whole(tier["bytes"]),
                    )
                    for tier in values["tiers"]
                ),
                ranks=whole(values["ranks"]),
                figure=text(values.get("figure", ACCURACY)),  # earlier versions had no other
            )
        except KeyError as error:
            raise DataFormatError(
                "read an epoch report", f"it lacks {error}", "pass what EpochReport.to_dict wrote"
            ) from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataFormatError(
                "read an epoch report",
                f"it is damaged ({error})",
                "pass what EpochReport.to_dict wrote",
            ) from error

    def _sum_by_tier(
        self, table: str | None, amount: Callable[[TierTraffic], int]
    ) -> dict[str, int]:
        sums: dict[str, int] = {}
        for tier in self.tiers:
            if table is None or tier.table == table:
                sums[tier.name] = sums.get(tier.name, 0) + amount(tier)
        return sums


def merge(reports_of_ranks: Sequence[EpochReport]) -> EpochReport:
    """Combine the reports that all ranks made of the same epoch.

    The slowest rank sets the time of the epoch and the number of steps; seeds, rows and bytes
    add up; times of stages are means, since maxima, each of another rank maybe, would add up to
    more than the epoch; loss and accuracies are means weighted by the seeds of each rank, over
    the ranks that have the figure.  A figure that is global already (every rank holds the same
    value) stays what it is.

    Parameters
    ----------
    reports_of_ranks : sequence of EpochReport
        One a rank, all of the same epoch.

    Returns
    -------
    EpochReport

    Raises
    ------
    InvalidInputError
        If there is no report, or they are of different epochs.
    """
    reports = list(reports_of_ranks)
    epochs = sorted({report.epoch for report in reports})
    if len(epochs) != 1:
        raise InvalidInputError(
            "merge the reports of the ranks",
            f"they are of the epochs {epochs}" if reports else "there is no report",
            "pass one report for each rank, all of the same epoch",
        )
    seeds = [report.seeds for report in reports]
    measured = [report.seconds.measured() for report in reports]
    ranks = [report.ranks for report in reports]
    # One that goes on with what it was to do otherwise has other stages.
    stages = {
        name: _weighted_mean([each.get(name, 0.0) for each in measured], ranks)
        for name in dict.fromkeys(name for each in measured for name in each)
    }
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    for tier in (tier for report in reports for tier in report.tiers):
        rows, size = traffic.get((tier.table, tier.name), (0, 0))
        traffic[tier.table, tier.name] = (rows + tier.rows, size + tier.bytes)
    return EpochReport(
        epoch=epochs[0],
        steps=max(report.steps for report in reports),
        seeds=sum(seeds),
        loss=_weighted_mean([report.loss for report in reports], seeds),
        train_accuracy=_weighted_mean([report.train_accuracy for report in reports], seeds),
        valid_accuracy=_weighted_mean_or_none([r.valid_accuracy for r in reports], seeds),
        test_accuracy=_weighted_mean_or_none([r.test_accuracy for r in reports], seeds),
        seconds=StageSeconds(**stages | {"total": max(each["total"] for each in measured)}),
        tiers=tuple(
            TierTraffic(name, table, rows, size) for (table, name), (rows, size) in traffic.items()
        ),
        ranks=sum(ranks),
        figure=reports[0].figure,
    )


def best_epoch(reports: Sequence[EpochReport]) -> EpochReport | None:
    """The epoch to judge a run by: of highest validation accuracy, the first of equals.

    Where no epoch was validated the training accuracy decides.  None without any epoch of which
    that, and the loss, are finite.
    """

    def figure(report: EpochReport) -> float:
        value = report.valid_accuracy if validated else report.train_accuracy
        return value if value is not None and math.isfinite(report.loss) else math.nan

    validated = any(report.valid_accuracy is not None for report in reports)
    finite = [report for report in reports if math.isfinite(figure(report))]
    return max(finite, key=figure, default=None)


def stages_of(reports: Sequence[EpochReport]) -> list[str]:
    """The stages that any of some epochs has, in their order, ``"total"`` last.

    A run that another version began may have others in its first epochs.
    """
    there = {stage for report in reports for stage in report.seconds.measured()}
    return [field.name for field in fields(StageSeconds) if field.name in there]


def usual_longest(seconds: Sequence[float]) -> float:
    """The longest of some times, those left out that are far longer than most.

    The first epoch compiles and warms up, and may take a hundred times as long as the others.
    """
    return max(each for each in seconds if each <= _FAR_LONGER * statistics.median(seconds))


def _stage_seconds(values: Mapping[str, Any]) -> StageSeconds:
    known = (field.name for field in fields(StageSeconds))
    return StageSeconds(**{stage: number(values[stage]) for stage in known if stage in values})


def _float_or(value: Any, missing: Any) -> Any:
    return missing if value is None else number(value)


def whole(value: Any) -> int:
    """A whole number of a record, which is one already."""
    if type(value) is not int or abs(value) >= 2**63:
        raise TypeError(f"{value!r:.50} is no whole number")
    return value


def number(value: Any) -> float:
    """A number of a record."""
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.50} is no number")
    return float(value)


def text(value: Any) -> str:
    """A name of a record."""
    if type(value) is not str:
        raise TypeError(f"{value!r:.50} is no text")
    return value


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Mean weighted by seeds, or ranks; plain where no rank had any.

    A rank without seeds has no loss either (NaN), so it is left out rather than weighted 0.
    The result lies exactly on a value that all share, which keeps global figures exact.
    """
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    pairs = pairs or [(value, 1) for value in values]
    if all(value == pairs[0][0] for value, _ in pairs):
        return pairs[0][0]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total


def _weighted_mean_or_none(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    measured = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    if not measured:
        return None
    return _weighted_mean([value for value, _ in measured], [weight for _, weight in measured])
