from __future__ import annotations

import json
import math

import pytest

from dgl_mgpu.errors import DataFormatError, InvalidInputError
from dgl_mgpu.report import EpochReport, StageSeconds, TierTraffic, best_epoch, merge
from dgl_mgpu.report.epoch import usual_longest


def test_speed_leaves_evaluation_out(make_report):
    assert make_report().seeds_per_second == 1000 / (12.0 - 4.0)
    unmeasured = StageSeconds(evaluate=0.0, total=0.0)
    assert make_report(seconds=unmeasured).seeds_per_second == 0.0


def test_the_longest_but_for_what_is_far_from_usual():
    assert usual_longest([90.0, 3.0, 1.0, 2.0]) == 3.0
    assert usual_longest([1.0, 3.9, 1.0]) == 3.9
    assert usual_longest([5.0]) == 5.0
    assert usual_longest([0.0, 0.0]) == 0.0


def test_shares_of_rows_by_table_and_overall(make_report):
    report = make_report()
    assert report.tables == ("feat", "topology")
    assert report.tier_shares("feat") == {"device": 0.75, "host": 0.25}
    assert report.tier_shares("topology") == {"device": 1.0}
    assert report.tier_shares() == {"device": 0.8, "host": 0.2}
    assert report.tier_rows() == {"device": 800, "host": 200}
    assert report.tier_bytes() == {"device": 600 * 400 + 200 * 8, "host": 200 * 400}


def test_shares_where_nothing_was_read(make_report):
    assert make_report(tiers=()).tier_shares() == {}
    idle = make_report(tiers=(TierTraffic("host", "feat", 0, 0),))
    assert idle.tier_shares() == {"host": 0.0}


def test_dict_round_trip_through_json(make_report):
    report = make_report(epoch=3, valid_accuracy=None)
    assert EpochReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_stages_that_training_does_not_have_are_not_written(make_report):
    report = make_report(seconds=StageSeconds(forward=1.0, backward=2.0, evaluate=0.5, total=4.0))
    values = report.to_dict()
    assert list(values["seconds"]) == ["forward", "backward", "evaluate", "total"]
    assert EpochReport.from_dict(values) == report
    assert merge([report, report]).seconds == report.seconds


def test_a_diverged_loss_is_strict_json_and_reads_back_as_nan(make_report):
    text = json.dumps(make_report(loss=math.inf).to_dict(), allow_nan=False)
    assert math.isnan(EpochReport.from_dict(json.loads(text)).loss)


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("seeds"),
        lambda values: values["seconds"].pop("total"),
        lambda values: values.update(tiers=[{"name": "host"}]),
        lambda values: values.update(seeds="many"),
        lambda values: values.update(seconds=None),
    ],
)
def test_damaged_dict_is_a_typed_error(make_report, damage):
    values = make_report().to_dict()
    damage(values)
    with pytest.raises(DataFormatError):
        EpochReport.from_dict(values)


def test_epochs_count_from_one(make_report):
    with pytest.raises(InvalidInputError, match="count epochs from 1"):
        make_report(epoch=0, loss=1.0)


def test_merge_by_hand(make_report):
    first = make_report(
        steps=10,
        seeds=300,
        loss=1.0,
        train_accuracy=0.8,
        valid_accuracy=0.6,
        test_accuracy=None,
        seconds=StageSeconds(sample=1.0, gather=5.0, compute=2.0, evaluate=0.5, total=9.0),
        tiers=(TierTraffic("device", "feat", 10, 40), TierTraffic("host", "feat", 5, 20)),
    )
    second = make_report(
        steps=9,
        seeds=100,
        loss=3.0,
        train_accuracy=0.4,
        valid_accuracy=None,
        test_accuracy=None,
        seconds=StageSeconds(sample=2.0, gather=4.0, compute=3.0, evaluate=0.25, total=8.0),
        tiers=(TierTraffic("peer", "feat", 7, 28), TierTraffic("device", "feat", 1, 4)),
        ranks=2,
    )
    merged = merge([first, second])
    assert merged == EpochReport(
        epoch=1,
        steps=10,
        seeds=400,
        loss=(300 * 1.0 + 100 * 3.0) / 400,
        train_accuracy=pytest.approx((300 * 0.8 + 100 * 0.4) / 400),
        valid_accuracy=0.6,
        test_accuracy=None,
        seconds=StageSeconds(
            sample=(1.0 + 2 * 2.0) / 3,
            gather=(5.0 + 2 * 4.0) / 3,
            compute=(2.0 + 2 * 3.0) / 3,
            evaluate=(0.5 + 2 * 0.25) / 3,
            total=9.0,
        ),
        tiers=(
            TierTraffic("device", "feat", 11, 44),
            TierTraffic("host", "feat", 5, 20),
            TierTraffic("peer", "feat", 7, 28),
        ),
        ranks=3,
    )


def test_stages_of_ranks_that_wait_for_each_other_do_not_add_up_to_more_than_the_epoch(make_report):
    """Each rank is the slowest of another stage."""
    ranks = [
        make_report(seconds=StageSeconds(sample=6.0, backward=1.0, evaluate=1.0, total=8.0)),
        make_report(seconds=StageSeconds(sample=2.0, backward=5.0, evaluate=1.0, total=8.0)),
    ]
    *stages, total = merge(ranks).seconds.measured().values()
    assert sum(stages) == total


def test_merge_of_one_changes_nothing_and_global_figures_stay_exact(make_report):
    report = make_report(valid_accuracy=0.1, seeds=7)
    assert merge([report]) == report
    # 0.1 * 7 + 0.1 * 11 + 0.1 * 13 is not 0.1 * 31 in floating point.
    many = merge(
        [
            report,
            make_report(valid_accuracy=0.1, seeds=11),
            make_report(seeds=13, valid_accuracy=0.1),
        ]
    )
    assert many.valid_accuracy == 0.1


@pytest.mark.parametrize("swapped", [False, True])
def test_merge_of_ranks_with_other_stages(make_report, swapped):
    some = make_report(seconds=StageSeconds(compute=2.0, evaluate=0.0, total=4.0))
    other = make_report(seconds=StageSeconds(forward=1.0, update=3.0, evaluate=0.0, total=4.0))
    merged = merge([other, some] if swapped else [some, other]).seconds
    assert merged == StageSeconds(compute=1.0, forward=0.5, update=1.5, evaluate=0.0, total=4.0)


def test_merge_leaves_out_a_rank_without_seeds(make_report):
    idle = make_report(seeds=0, loss=math.nan, train_accuracy=0.0)
    merged = merge([make_report(loss=1.5, train_accuracy=0.7), idle])
    assert (merged.loss, merged.train_accuracy, merged.seeds) == (1.5, 0.7, 1000)
    assert math.isnan(merge([idle, idle]).loss)


@pytest.mark.parametrize("epochs", [(), (1, 2)])
def test_merge_refuses_none_and_mixed_epochs(make_report, epochs):
    with pytest.raises(InvalidInputError):
        merge([make_report(epoch) for epoch in epochs])


def test_best_epoch(make_report):
    def run(figures):
        return [
            make_report(number, valid_accuracy=valid, train_accuracy=train)
            for number, (valid, train) in enumerate(figures, start=1)
        ]

    assert best_epoch([]) is None
    assert best_epoch(run([(0.3, 0.9), (0.5, 0.1), (0.5, 0.9), (None, 1.0)])).epoch == 2
    assert best_epoch(run([(None, 0.2), (None, math.nan), (None, 0.4)])).epoch == 3


def test_what_accuracies_are_called_is_kept(make_report):
    report = make_report(metric_name="AUC")
    assert EpochReport.from_dict(report.to_dict()) == report
    assert merge([report, report]).metric_name == "AUC"
    earlier = make_report().to_dict()
    del earlier["figure"]
    assert EpochReport.from_dict(earlier).metric_name == "accuracy"
