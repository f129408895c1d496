"""The benchmark of reads of host memory, as far as a machine without a GPU shows."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import host_reads_gpu


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def run(monkeypatch, tmp_path) -> dict:
    out = tmp_path / "found.json"
    words = f"program --gib 1e-4 --reads 300 --repeats 2 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    host_reads_gpu.main()
    return json.loads(out.read_text())


def test_rows_of_all_sizes_are_read_in_both_orders(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path)
    assert found["pinned_copy_gb_per_s"] > 0 and len(found["pinned_copy_samples_s"]) == 2
    assert [each["row_bytes"] for each in found["figures"]] == list(host_reads_gpu.ROW_BYTES)
    for each in found["figures"]:
        # What does not fit is not read.
        assert each["reads"] == min(300, 107372 // each["row_bytes"])
        for order in ("at_random", "in_order"):
            assert len(each["samples_s"][order]) == 2
            rate = each[f"{order}_million_per_s"]
            assert each[f"{order}_gb_per_s"] == pytest.approx(rate * each["row_bytes"] / 1e3)


def test_wrong_words_are_refused(monkeypatch, tmp_path):
    def read(rows, ids, out) -> None:
        out.copy_(rows[ids] + 1)

    monkeypatch.setattr(host_reads_gpu, "on_cpu", read)
    with pytest.raises(ValueError, match="rows of 4 bytes, at_random: wrong words"):
        run(monkeypatch, tmp_path)
    assert not (tmp_path / "found.json").exists()
