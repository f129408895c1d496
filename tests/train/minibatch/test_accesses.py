"""A run that counts what it reads, and a run whose store is ordered by these counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dgl_mgpu.cli import main
from dgl_mgpu.data import load
from dgl_mgpu.placement import load_accesses
from dgl_mgpu.report import EpochReport, read_metrics

NODES, EPOCHS = 1000, 2
COUNT = "trainer.count_accesses=true"


def train(folder: Path, *overrides: str, num_nodes: int = NODES, epochs: int = EPOCHS) -> int:
    return main(
        [
            "train",
            f"data.root={folder.parent / 'data'}",
            f"data.options.num_nodes={num_nodes}",
            "data.options.num_edges=10000",
            "trainer.batch_size=100",
            f"trainer.epochs={epochs}",
            "model.hidden=8",
            "store.feature_ratio=0.3",
            "store.device=cpu",
            f"hydra.run.dir={folder}",
            *overrides,
        ]
    )


def counts_of(folder: Path) -> np.ndarray:
    return load_accesses(folder / "accesses.npz", {"_N": NODES})["_N"]


def feature_rows(reports: list[EpochReport]) -> dict[str, int]:
    """Rows of features read in training, by the memory they came from."""
    rows = {"device": 0, "peer": 0, "host": 0}
    for tier in (tier for report in reports for tier in report.tiers if tier.table == "feat"):
        rows[tier.name] += tier.rows
    return rows


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    """The folder of a run that counted."""
    folder = tmp_path_factory.mktemp("runs") / "counted"
    assert train(folder, COUNT) == 0
    return folder


def test_a_run_counts_what_training_reads(counted):
    counts, (reports, _) = counts_of(counted), read_metrics(counted / "metrics.jsonl")
    # As many as the epochs report, which leaves validation and test out.
    assert counts.sum() == sum(feature_rows(reports).values()) > 0
    # No mini-batch reads a node twice, and each seed is read by its own.
    assert counts.max() <= sum(report.steps for report in reports)
    seeds = load("generated", counted.parent / "data", num_nodes=NODES, num_edges=10000).train
    assert counts[np.asarray(seeds)].min() >= EPOCHS


def test_a_later_run_is_ordered_by_the_counts_and_its_ranks_and_workers_count_the_same(
    counted, capsys
):
    hotness = f"store.hotness={counted / 'accesses.npz'}"
    later = counted.with_name("later")
    assert train(later, hotness, COUNT, "trainer.ranks=2", "sampler.num_workers=1") == 0
    counts = counts_of(later)
    assert np.array_equal(counts, counts_of(counted))
    # The same batches again, so that no other 30 % of rows is read as much.
    hits = {}
    for folder in (counted, later):
        rows = feature_rows(read_metrics(folder / "metrics.jsonl")[0])
        hits[folder] = rows["device"] + rows["peer"]
    assert hits[later] == np.sort(counts)[::-1][: int(0.3 * NODES)].sum()
    assert hits[later] > hits[counted]

    assert train(counted.with_name("other"), hotness, num_nodes=900) == 1
    assert "900 nodes" in capsys.readouterr().err


def test_a_run_that_resumes_may_count(counted):
    resumed = counted.with_name("resumed")
    assert train(resumed, COUNT, f"trainer.resume={counted}", epochs=EPOCHS + 1) == 0
    last = read_metrics(resumed / "metrics.jsonl")[0][-1]
    assert counts_of(resumed).sum() == sum(feature_rows([last]).values()) > 0

    resumed = counted.with_name("silent")
    silent = "trainer.count_accesses=false"
    assert train(resumed, silent, f"trainer.resume={counted}", epochs=EPOCHS + 1) == 0
    assert not (resumed / "accesses.npz").exists()
