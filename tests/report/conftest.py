"""Reports with round numbers, so that the tests can be followed by hand."""

from __future__ import annotations

import pytest

from dgl_mgpu.report import EpochReport, StageSeconds, TierTraffic


def report_of_epoch(epoch: int = 1, **changes) -> EpochReport:
    values = {
        "epoch": epoch,
        "steps": 10,
        "seeds": 1000,
        "loss": 2.0 / max(epoch, 1),
        "train_accuracy": 0.50,
        "valid_accuracy": 0.40,
        "test_accuracy": 0.30,
        "seconds": StageSeconds(sample=1.0, gather=2.0, compute=3.0, evaluate=4.0, total=12.0),
        "tiers": (
            TierTraffic("device", "feat", rows=600, bytes=600 * 400),
            TierTraffic("host", "feat", rows=200, bytes=200 * 400),
            TierTraffic("device", "topology", rows=200, bytes=200 * 8),
        ),
        "ranks": 1,
    }
    return EpochReport(**(values | changes))


@pytest.fixture
def make_report():
    return report_of_epoch
