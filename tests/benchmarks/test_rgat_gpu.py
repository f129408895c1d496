"""The benchmark of R-GAT, as far as a small graph shows: every part runs, checks and is kept."""

from __future__ import annotations

import json

import dgl
import pytest
import torch

from benchmarks import rgat_gpu, rgat_training
from benchmarks.rgat_gpu import Bench
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.report.profile import read_profile

SMALL = [
    "--scale",
    "2e-5",
    "--batch",
    "8",
    "--width",
    "16",
    "--hidden",
    "8",
    "--classes",
    "6",
    "--steps",
    "2",
    "--dtype",
    "float32",
]


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(rgat_gpu, "WARM_UP", 2)
    monkeypatch.setattr(rgat_gpu, "TURNS", 1)
    monkeypatch.setattr(rgat_gpu, "PROFILED", 2)
    monkeypatch.setattr(rgat_gpu, "CHECKED", 4)
    return rgat_gpu.parser().parse_args([*SMALL, "--out", str(tmp_path / "found.json")])


def figures(options) -> dict[str, dict]:
    return {each["case"]: each for each in json.loads(options.out.read_text())["figures"]}


def test_every_part_is_measured_and_kept(options, tmp_path):
    options.profile = tmp_path / "profile"
    with tensor_backed_graphs():
        assert Bench(options).run()
    found = figures(options)
    assert list(found) == ["sample", "gather", "model", "step", "model of DGL's modules"]
    assert all(each["ours"] > 0 for each in found.values())
    step = found["step"]
    assert step["aim"] == pytest.approx(8 / 25_000 * 1e3)
    assert step["seeds_per_second"] == pytest.approx(8 / step["ours"] * 1e3)
    assert step["one_by_one_ms"] > 0 and step["last_loss"] > 0
    first = found["sample"]["blocks"][0]
    assert found["gather"]["rows"] == pytest.approx(sum(first["sources"].values()), rel=0.5)
    assert len(first["edges"]) == 7
    assert read_profile(options.profile).steps == 2


def test_mixed_precision_and_float16_features(options):
    options.dtype, options.features, options.no_reference = "bfloat16", "float16", True
    with tensor_backed_graphs():
        assert Bench(options).run()
    assert "model of DGL's modules" not in figures(options)


def spoil_sample(monkeypatch):
    def wrong(*given, **more):
        inputs, outputs, blocks = sample(*given, **more)
        blocks[0].srcnodes["paper"].data[dgl.NID] += 1
        return inputs, outputs, blocks

    sample = rgat_gpu.NeighborSampler.sample_blocks
    monkeypatch.setattr(rgat_gpu.NeighborSampler, "sample_blocks", wrong)


def spoil_rows(monkeypatch):
    def wrong(view, ids, out, *, dtype):
        gather(view, ids, out, dtype=dtype)
        out[-1:] += 1

    gather = rgat_training.gather_rows
    monkeypatch.setattr(rgat_training, "gather_rows", wrong)


def spoil_model(monkeypatch):
    layer = rgat_gpu.RGAT.forward

    def wrong(self, blocks, rows):
        # As if scores of half of the relations had been left out.
        with torch.no_grad():
            self.layers[0].attention[:3] = 0
        return layer(self, blocks, rows)

    monkeypatch.setattr(rgat_gpu.RGAT, "forward", wrong)


@pytest.mark.parametrize(
    "spoil, error",
    [
        (spoil_sample, "ValueError: ('"),
        (spoil_rows, "ValueError: wrong rows of type paper"),
        (spoil_model, "AssertionError: Tensor-likes are not close!"),
    ],
)
def test_nothing_wrong_is_timed(options, monkeypatch, spoil, error):
    spoil(monkeypatch)
    with tensor_backed_graphs():
        assert not Bench(options).run()
    found = figures(options)
    assert all("failed" in each for each in found.values())
    assert any(each["failed"].startswith(error) for each in found.values())
