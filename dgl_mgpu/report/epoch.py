"""The record of one epoch, from which progress, metrics, tables and plots are made."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dgl_mgpu.errors import DataFormatError, InvalidInputError

#: Values of `EpochReport.metric_name`.
ACCURACY, AUC, ROC_AUC = "accuracy", "AUC", "ROC AUC"

#: Explanations of metrics.
MEANINGS = {
    AUC: "AUC: how often an edge scores higher than another pair of its source that is no edge",
    ROC_AUC: "ROC AUC: how often a node with a label scores higher for it than one without, "
    "on average over the labels",
}

#: A picture is not scaled by times longer than this many medians.
_FAR_LONGER = 4.0

#: Stages of `StageSeconds` that other stages include.  They are not added to these.
WITHIN_OTHERS = frozenset({"exchange", "waiting"})


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Wall-clock seconds of one epoch by stage; None where training has no such stage.

    Stages that overlap each count in full, so the parts may add up to more than `total`.  Of
    several ranks each stage is the mean, `total` the slowest rank's.
    """

    sample: float | None = None
    gather: float | None = None  # of features and labels
    #: Forward and backward where they are not timed apart, and the optimizer without `update`.
    compute: float | None = None
    forward: float | None = None  # with the exchange of rows
    backward: float | None = None  # likewise
    #: Part of forward and backward: rows are on their way between GPUs, or slower ranks are
    #: waited for.  None on CPUs, where it cannot be measured.
    exchange: float | None = None
    #: Part of forward and backward: the exchange that no computation hides.
    waiting: float | None = None
    #: Adding up all ranks' gradients, waiting for theirs included, and the optimizer.
    update: float | None = None
    evaluate: float  # on validation and test data
    total: float  # with evaluation

    def measured(self) -> dict[str, float]:
        """Seconds of the stages there are, `total` last."""
        return {name: seconds for name, seconds in asdict(self).items() if seconds is not None}


@dataclass(frozen=True)
class TierTraffic:
    """Rows of one table, such as "feat", read from one tier of the store during an epoch."""

    name: str  # "device", "peer", "replica", "host", "remote" or "disk"
    table: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class EpochReport:
    """One epoch of training, of one rank or (after `merge`) of all."""

    epoch: int  # from 1
    steps: int  # of the optimizer
    seeds: int  # nodes or edges trained on
    loss: float  # mean over the seeds; may be NaN or infinite
    train_accuracy: float  # in 0..1, of the seeds while training
    valid_accuracy: float | None  # None in epochs that were not evaluated
    test_accuracy: float | None
    seconds: StageSeconds
    tiers: tuple[TierTraffic, ...]  # at most one for each pair of tier and table
    ranks: int  # that the report stands for
    #: The metric that the accuracies are: ACCURACY, ROC_AUC where nodes may have several labels,
    #: AUC of link prediction.
    metric_name: str = ACCURACY

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
        """Rows read from each tier, of `table` or (None) of all tables."""
        return self._sum_by_tier(table, lambda tier: tier.rows)

    def tier_bytes(self, table: str | None = None) -> dict[str, int]:
        """Bytes read from each tier, of `table` or (None) of all tables."""
        return self._sum_by_tier(table, lambda tier: tier.bytes)

    def tier_shares(self, table: str | None = None) -> dict[str, float]:
        """Share of the rows served by each tier, of `table` or (None) of all tables.

        The shares add up to 1, or are all 0.0 where no row was read.
        """
        rows = self.tier_rows(table)
        total = sum(rows.values())
        return {tier: count / total if total else 0.0 for tier, count in rows.items()}

    def to_dict(self) -> dict[str, Any]:
        """Values for strict JSON: a loss or accuracy that is not finite becomes None."""
        values = asdict(self)
        values["figure"] = values.pop("metric_name")  # its name in files
        values["seconds"] = self.seconds.measured()
        values["tiers"] = list(values["tiers"])
        for name in ("loss", "train_accuracy", "valid_accuracy", "test_accuracy"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochReport:
        """Read what `to_dict` wrote; unknown keys are ignored, a loss of None becomes NaN.

        Raises DataFormatError if a key is missing or a value is of another type.
        """
        try:
            seconds = values["seconds"]
            stages = [field.name for field in fields(StageSeconds) if field.name in seconds]
            tiers = [
                TierTraffic(
                    require_str(tier["name"]), require_str(tier["table"]),
                    require_int(tier["rows"]), require_int(tier["bytes"]),
                )
                for tier in values["tiers"]
            ]  # fmt: skip
            return cls(
                **{
                    name: require_int(values[name]) for name in ("epoch", "steps", "seeds", "ranks")
                },
                loss=_number_or(values["loss"], math.nan),
                train_accuracy=_number_or(values["train_accuracy"], math.nan),
                valid_accuracy=_number_or(values["valid_accuracy"], None),
                test_accuracy=_number_or(values["test_accuracy"], None),
                seconds=StageSeconds(**{name: require_number(seconds[name]) for name in stages}),
                tiers=tuple(tiers),
                # Earlier versions knew no other metric.
                metric_name=require_str(values.get("figure", ACCURACY)),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            missing = isinstance(error, KeyError)
            raise DataFormatError(
                "read an epoch report",
                f"it lacks {error}" if missing else f"it is damaged ({error})",
                "pass what EpochReport.to_dict wrote",
            ) from error

    def _sum_by_tier(
        self, table: str | None, amount: Callable[[TierTraffic], int]
    ) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for tier in self.tiers:
            if table in (None, tier.table):
                sums[tier.name] += amount(tier)
        return dict(sums)


def merge(reports_of_ranks: Sequence[EpochReport]) -> EpochReport:
    """Combine the reports that all ranks made of the same epoch.

    Steps and the total time are maxima, seeds, rows and bytes are sums.  Times of stages are means:
    maxima, each perhaps of another rank, would add up to more than the epoch.  Loss and accuracies
    are means weighted by seeds, over the ranks that have them; a value that all ranks share stays
    exactly what it is.  Raises InvalidInputError unless there are reports, of one epoch.
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
    # Stages may differ between ranks whose tasks differ.
    stages = {
        name: _weighted_mean([seconds.get(name, 0.0) for seconds in measured], ranks)
        for name in dict.fromkeys(name for seconds in measured for name in seconds)
    }
    stages["total"] = max(seconds["total"] for seconds in measured)
    traffic: dict[tuple[str, str], list[TierTraffic]] = {}
    for tier in (tier for report in reports for tier in report.tiers):
        traffic.setdefault((tier.table, tier.name), []).append(tier)
    return EpochReport(
        epoch=epochs[0],
        steps=max(report.steps for report in reports),
        seeds=sum(seeds),
        loss=_weighted_mean([report.loss for report in reports], seeds),
        train_accuracy=_weighted_mean([report.train_accuracy for report in reports], seeds),
        valid_accuracy=_mean_of_known([report.valid_accuracy for report in reports], seeds),
        test_accuracy=_mean_of_known([report.test_accuracy for report in reports], seeds),
        seconds=StageSeconds(**stages),
        tiers=tuple(
            TierTraffic(name, table, sum(t.rows for t in tiers), sum(t.bytes for t in tiers))
            for (table, name), tiers in traffic.items()
        ),
        ranks=sum(ranks),
        metric_name=reports[0].metric_name,
    )


def best_epoch(reports: Sequence[EpochReport]) -> EpochReport | None:
    """The first epoch of the highest validation accuracy, or training accuracy if none has one.

    None if no epoch has a finite one and a finite loss.
    """

    def score(report: EpochReport) -> float:
        value = report.valid_accuracy if validated else report.train_accuracy
        return value if value is not None and math.isfinite(report.loss) else math.nan

    validated = any(report.valid_accuracy is not None for report in reports)
    finite = [report for report in reports if math.isfinite(score(report))]
    return max(finite, key=score, default=None)


def stage_names(reports: Sequence[EpochReport]) -> list[str]:
    """The stages that any of the epochs has, in order, "total" last.

    The first epochs of a resumed run may have other ones than the last.
    """
    measured = {stage for report in reports for stage in report.seconds.measured()}
    return [field.name for field in fields(StageSeconds) if field.name in measured]


def usual_longest(seconds: Sequence[float]) -> float:
    """The longest time that is not far longer than the median.

    The first epoch compiles and warms up, and may take a hundred times as long as the others.
    """
    limit = _FAR_LONGER * statistics.median(seconds)
    return max(duration for duration in seconds if duration <= limit)


def _number_or(value: Any, missing: Any) -> Any:
    return missing if value is None else require_number(value)


def require_int(value: Any) -> int:
    """Check that a value of a record is an integer of at most 64 bits."""
    if type(value) is not int or abs(value) >= 2**63:
        raise TypeError(f"{value!r:.50} is no whole number")
    return value


def require_number(value: Any) -> float:
    """Check that a value of a record is a number."""
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.50} is no number")
    return float(value)


def require_str(value: Any) -> str:
    """Check that a value of a record is a string."""
    if type(value) is not str:
        raise TypeError(f"{value!r:.50} is no text")
    return value


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Mean weighted by seeds, or ranks; plain where all weights are 0.

    A rank without seeds has a loss of NaN, so it is left out rather than weighted 0.  A value that
    all share is returned exactly.
    """
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    pairs = pairs or [(value, 1) for value in values]
    if all(value == pairs[0][0] for value, _ in pairs):
        return pairs[0][0]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total


def _mean_of_known(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    return _weighted_mean([v for v, _ in known], [w for _, w in known]) if known else None
