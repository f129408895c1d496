"""DGL's examples as a benchmark: what is run, what is read of it, and how modes are compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import dgl_examples
from benchmarks.datasets import NO_FILES
from benchmarks.dgl_examples import CASES, FINISHED, LEFT_OUT, OFF, ON, TOO_LONG, Bench, Case
from benchmarks.dgl_examples_data import WRITERS

#: What each script prints at its end, by the case that stands for it.
PRINTED = {
    "sage_mixed": ("Epoch 00009 | Loss 0.9 | Accuracy 0.7000 \nTest Accuracy 0.8123\n", 0.8123),
    "sampling_sage_gpu": ("Testing...\nTest accuracy 0.8123\n", 0.8123),
    "multi_gpu_links_mixed": (
        "Epoch 00004 | Eval F1-score 0.5 | Test F1-Score 0.6\n"
        "Epoch 00009 | Eval F1-score 0.7000 | Test F1-Score 0.7100\n",
        0.71,
    ),
    "link_mixed": ("Validation MRR 0.2000, Test MRR 0.3000\n", 0.3),
    "rgcn_sampled": ("Epoch 00049 | Val. Accuracy 0.96 \nTest accuracy 0.9500\n", 0.95),
    "rgcn_hetero": ("Epoch 5 | Valid Acc: {val_acc:.4f}\n\nTest Acc: 0.9400\n", 0.94),
    "rgat": ("Epoch 00009 | Loss 1 | Validation Acc. 0.5 | Test Acc. 0.6000\n", 0.6),
    "mag_rgcn": ("Final Test: 44.00\nAll runs:\nFinal Test: 45.12 \N{PLUS-MINUS SIGN} 1\n", 45.12),
    "core_rgcn": ("Epoch: 03, Test: 40.00%, Time 1\nTesting...\nTest accuracy 45.1234\n", 45.1234),
    "products_sage": (
        "Best Eval Acc 0.7 Test Acc 0.71\nAverage test accuracy: 0.72 \N{PLUS-MINUS SIGN} 0.01\n",
        0.72,
    ),
    "labor_labor": ("Validation accuracy: 0.7\nTest accuracy: 0.8123456\n", 0.8123456),
    "vrgcn": ("Eval Acc 0.6\nEval Acc 0.7000\nAvg epoch time: 0.5\n", 0.7),
    "caregnn": ("Test Recall: 0.8 | Test AUC: 0.9000 | Test loss: 1.2\n", 0.9),
    "gas": ("Test R@P: 0.9 | Test F1: 0.8 | Test AUC: 0.9100 | Test loss: 0.1\n", 0.91),
    "pinsage": ("0.05\n0.21666666666666667\n", 0.21666666666666667),
    "gb_nodes_pinned": ("Epoch 00009 | Accuracy 0.7000 | Time 1\nTest accuracy 0.8123\n", 0.8123),
    "gb_links_gpu": ("Validation MRR 0.2000, Test MRR 0.3000\n", 0.3),
    "gb_quickstart_nodes": ("Epoch 009 | Loss 0.1 | Val Acc 0.8 | Test Acc 0.856\n", 0.856),
    "gb_quickstart_links": ("Testing...\nAUC: 0.928\n", 0.928),
    "gb_lightning": ("Epoch 0: val_acc=0.100\rEpoch 9: num_edges/2=9, val_acc=0.700]\n", 0.7),
    "gb_rgcn_mag": ("Epoch: 02, Valid accuracy: 98.00%\nTest accuracy 98.1042\n", 98.1042),
    "gb_pyg": ("Epoch 3, Valid Accuracy: 0.8690\nTest Accuracy: 0.8551\n", 0.8551),
    "gb_multi_gpu_two_gpu": ("Testing...\nTest Accuracy 0.7000\n", 0.7),
    "gb_notebook_nodes": ("Epoch 9 Validation Accuracy 0.5426666\n", 0.5426666),
    "gb_notebook_heterograph": (
        "Loaded graph: FusedCSCSamplingGraph(\n"
        "total_num_nodes=2000, num_edges={'user:follow:user': 10, 'user:like:item': 20},\n",
        20,
    ),
    "gatne": ("valid auc: 0.5\nOverall ROC-AUC: 0.7\nOverall PR-AUC 0.6\n", 0.7),
}  # fmt: skip

#: A script that prints how it was run.
SCRIPT = """
import os, random, sys, warnings
import numpy, torch

print("seeded", (random.random(), float(numpy.random.rand()), float(torch.rand(()))))
print("capture", os.environ["_DGL_MGPU_RUNNER_OPTIONS"])
print("here", sorted(os.listdir(".")))
warnings.warn("SAGE runs kernel" " by kernel, not as a CUDA graph: it has hooks", stacklevel=1)
print("Test Accuracy 0.25")
print("Test Accuracy 0.5")
if "fail" in sys.argv:
    raise ValueError("no luck")
if "wait" in sys.argv:
    import time
    time.sleep(100)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    examples = tmp_path / "dgl" / "examples"
    examples.mkdir(parents=True)
    (examples / "script.py").write_text(SCRIPT)
    made = Bench(examples, tmp_path / "work", limit=100.0, has_gpu=False)
    made.prepare([])
    return made


def case(*args: str, name: str = "it") -> Case:
    return Case(name, "script.py", (), "aifb", on_cpu=args, requires=())


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_script_prints_is_read(name: str) -> None:
    output, value = PRINTED[name]
    (found,) = (each for each in CASES if each.name == name)
    assert found.value(output) == value
    assert found.value("Loading data\n") is None


def test_every_case_has_its_data_and_is_not_left_out() -> None:
    names = [each.name for each in CASES]
    assert len(names) == len(set(names))
    assert {each.data for each in CASES} - {None} == set(WRITERS)
    assert not {each.script for each in CASES} & set(LEFT_OUT)


def test_a_run_is_seeded_and_read(bench: Bench) -> None:
    first, again, other = (bench.run(case(), ON, seed) for seed in (0, 0, 1))
    assert first["ended"] == FINISHED and first["value"] == 0.5 and first["replays"] == 0
    assert first["warnings"] == ["SAGE runs kernel by kernel, not as a CUDA graph: it has hooks"]
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    printed = [
        (bench.work / "runs" / f"it-on-{seed}" / "stdout").read_text().splitlines()
        for seed in (0, 1)
    ]
    assert printed[0][0] != printed[1][0]
    assert '"captures": true' in printed[0][1]
    assert "'dataset'" in printed[0][2]
    assert other["seed"] == 1


def test_a_script_that_fails_or_takes_too_long(bench: Bench) -> None:
    found = bench.run(case("fail"), OFF, 0)
    assert (found["ended"], found["error"]) == ("status 1", "ValueError: no luck")
    assert found["value"] == 0.5
    short = Bench(bench.examples, bench.work, limit=20.0, has_gpu=False)
    assert short.run(case("wait"), OFF, 0)["ended"] == TOO_LONG


def _runs(*values: float | None) -> list[dict[str, object]]:
    return [{"value": value, "ended": FINISHED, "replays": 3} for value in values]


def test_a_notebook_is_run_as_a_script(bench: Bench) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Nothing\n", "to run"]},
        {
            "cell_type": "code",
            "source": ["if True:\n", "    !pip install dgl\n", "    found = 0.5"],
        },
        {"cell_type": "code", "source": ["%matplotlib inline\n", "print('Test Accuracy', found)"]},
    ]
    (bench.examples / "book.ipynb").write_text(json.dumps({"cells": cells}))
    book = Case("book", "book.ipynb", (), None, on_cpu=(), requires=())
    assert bench.run(book, OFF, 0)["value"] == 0.5


def test_modes_agree_within_the_spread_over_seeds() -> None:
    alike = dgl_examples.compared({OFF: _runs(0.80, 0.82, 0.84), ON: _runs(0.81, 0.83, 0.85)})
    assert alike[ON]["agrees"] and alike[ON]["captured"] == 3
    assert alike[OFF]["mean"] == pytest.approx(0.82)
    assert alike[OFF]["deviation"] == pytest.approx(0.02)
    worse = dgl_examples.compared({OFF: _runs(0.80, 0.82, 0.84), ON: _runs(0.60, 0.62, 0.64)})
    assert not worse[ON]["agrees"]
    none = dgl_examples.compared({OFF: _runs(0.8, 0.8), ON: _runs(None, None)})
    assert none[ON]["mean"] is None and "agrees" not in none[ON]
    # The same value with each seed: a difference of less than can be told is none.
    assert dgl_examples.standard_errors([0.8, 0.8], [0.801, 0.801]) < 1
    assert dgl_examples.standard_errors([80.0, 80.0], [80.1, 80.1]) < 1


def test_the_program(bench: Bench, tmp_path: Path, monkeypatch, capsys) -> None:
    needy = Case("needy", "script.py", (), "aifb", on_cpu=(), requires=("no-such-package>=2",))
    on_gpu = Case("on_gpu", "script.py", (), "aifb")
    monkeypatch.setattr(dgl_examples, "CASES", (case(), needy, on_gpu))
    monkeypatch.setattr(Bench, "prepare", lambda self, cases: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "found.json"
    words = ["--dgl", str(tmp_path / "dgl"), "--work", str(bench.work), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["program", *words, "--seeds", "1", "--jobs", "2"])
    dgl_examples.main()
    kept = json.loads(out.read_text())
    (row,) = kept["figures"]
    assert row["case"] == "it" and row["modes"][ON]["agrees"]
    assert kept["left_out"]["needy"] == "needs no-such-package>=2"
    assert kept["left_out"]["on_gpu"] == "needs a GPU"
    assert "it has hooks" in capsys.readouterr().out


def test_cases_of_more_gpus_than_there_are(bench: Bench, tmp_path, monkeypatch, capsys) -> None:
    two = Case("two", "script.py", (), "aifb", num_gpus=2, requires=())
    monkeypatch.setattr(dgl_examples, "CASES", (two,))
    monkeypatch.setattr(Bench, "prepare", lambda self, cases: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    words = ["--dgl", str(tmp_path / "dgl"), "--work", str(bench.work)]
    monkeypatch.setattr(sys, "argv", ["program", *words])
    dgl_examples.main()
    assert "left out: two: needs 2 GPUs" in capsys.readouterr().out


def test_without_a_checkout_it_says_what_it_needs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--dgl", str(tmp_path)])
    with pytest.raises(SystemExit, match=str(NO_FILES)):
        dgl_examples.main()
    assert capsys.readouterr().out.startswith("needs the files of DGL's examples: no ")


def test_data_are_written_once(tmp_path: Path) -> None:
    from benchmarks.dgl_examples_data import write_all

    write_all(["multiplex", "pol"], tmp_path)
    path = tmp_path / "dataset" / "multiplex" / "train.txt"
    kind, src, dst = path.read_text().splitlines()[0].split()
    assert kind == "1" and 0 <= int(src) < 400 and 0 <= int(dst) < 400
    assert [*(tmp_path / "dgl").glob("pol_*/pol_dgl_graph.bin")]
    path.write_text("mine\n")
    write_all(["multiplex"], tmp_path)
    assert path.read_text() == "mine\n"


def test_data_of_graphbolt_have_what_its_examples_read(tmp_path: Path) -> None:
    import dgl.graphbolt as gb

    from benchmarks.dgl_examples_data import write_all

    write_all(["gb-cora", "gb-ogbn-mag"], tmp_path)
    cora = gb.BuiltinDataset("cora", str(tmp_path / "datasets")).load()
    nodes, links = cora.tasks
    assert nodes.metadata["num_classes"] == 7 and nodes.train_set.names == ("seed_nodes", "labels")
    assert links.test_set.names == ("node_pairs", "negative_dsts")
    assert cora.feature.size("node", None, "feat") == (200,)
    mag = gb.BuiltinDataset("ogbn-mag", str(tmp_path / "datasets")).load()
    reverse = "field_of_study:rev_has_topic:paper"
    assert mag.graph.num_edges[reverse] == mag.graph.num_edges["paper:has_topic:field_of_study"]
    assert [*mag.tasks[0].train_set._itemsets] == ["paper"]
