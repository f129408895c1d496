"""The benchmarks as configured runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import runs
from benchmarks.datasets import NO_FILES
from benchmarks.runs import Bench, Config, Run, configured
from dgl_mgpu.errors import ConfigError

FOLDER = Path(runs.__file__).parent
#: Programs that measure no claim of a paper, the ceilings and faults (make faults); and those whose
#: ranks torchrun starts.
APART = {"ceilings", "faults", "span_bytes", "span_gpu", "span_loading"}


def _gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(runs, "gpus_here", lambda: count)


def test_every_program_is_a_run() -> None:
    programs = {p.stem for p in FOLDER.glob("[!_]*.py") if "\ndef main()" in p.read_text()}
    assert programs - APART == {run.program for run in configured(["bench.gpus=0"]).runs.values()}


@pytest.mark.parametrize("scale", ["smoke", "auto", "full"])
def test_programs_have_the_options_that_they_are_told(scale, monkeypatch) -> None:
    _gpus(monkeypatch, 8)
    shared = {name: f"from benchmarks.{name} import" for name in ("gpu", "fullgraph", "graphs")}
    for run in configured([f"bench.scale={scale}"]).runs.values():
        text = (FOLDER / f"{run.program}.py").read_text()
        for name, imports in shared.items():
            if imports in text:
                text += (FOLDER / f"{name}.py").read_text()
        known = set(re.findall(r'"--([a-z-]+)"', text))
        assert {name.replace("_", "-") for name in (*run.options, "out")} <= known, run.program


def test_scales(monkeypatch) -> None:
    _gpus(monkeypatch, 2)
    auto = configured([])
    assert (auto.bench.scale, auto.bench.gpus) == ("auto", 2)
    assert auto.runs["epoch_gpu"].options == {"ranks": 2, "scale": 0.25}
    assert auto.runs["epoch_gpu_numbers"].options["ranks"] == [1, 2]
    smoke = configured(["bench.scale=smoke"])
    assert smoke.bench.gpus == 0 and smoke.runs["convergence"].skip
    # What is said on the command line goes before the scale.
    mine = configured(["bench.scale=smoke", "runs.gather_cpu.options.table=3"])
    assert mine.runs["gather_cpu"].options == {"table": 3, "gathered": 2, "repeats": 3}
    _gpus(monkeypatch, 8)
    full = configured(["bench.scale=full"])
    assert full.runs["gcn_gpu_papers100M"].options["scale"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["bench.scale=full"], "2 GPUs that CuPy can use"),
        (["bench.gpus=3"], "2 GPUs that CuPy can use"),
        (["bench.scale=large"], "bench.scale/large"),
        (["bench.only=[gather]"], "no such run"),
        (["runs.gather_cpu.gpuss=1"], "gpuss"),
        (["runs.gather_cpu.gpus=many"], "many"),
        (["gather_cpu"], "gather_cpu"),
    ],
)
def test_what_is_not_possible_is_said_before_anything_runs(overrides, found, monkeypatch) -> None:
    _gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=found):
        configured(overrides)


def test_a_command() -> None:
    options = {"row_bytes": [128, 512], "no_peer": True, "calibrate": False, "ids": None, "gb": 0.5}
    words = Run("gather_gpu", options=options).command(Path("x.json"))
    assert words[:3] == [sys.executable, "-m", "benchmarks.gather_gpu"]
    assert words[3:] == ["--row-bytes", "128", "512", "--no-peer", "--gb", "0.5", "--out", "x.json"]


def test_runs_are_carried_out(tmp_path, monkeypatch, capsys) -> None:
    """One that fails does not keep the next from its turn, and makes the whole fail."""
    code = {
        "good": "print('fine')",
        "bad": "import sys; print('no'); sys.exit(3)",
        "absent": f"print('no x'); print('needs the files of x'); raise SystemExit({NO_FILES})",
    }
    monkeypatch.setattr(
        Run, "command", lambda self, out: [sys.executable, "-c", code[self.program]]
    )
    programs = {
        "bad": Run("bad"), "good": Run("good"), "small": Run("good", skip=True),
        "gpu": Run("good", gpus=1), "absent": Run("absent"), "other": Run("good"),
    }  # fmt: skip
    bench = Bench("smoke", 0, ["bad", "good", "small", "gpu", "absent"], str(tmp_path))
    monkeypatch.setattr(program, "configured", lambda _: Config(bench, programs))
    assert program.main([]) == 1
    outcomes = json.loads((tmp_path / "runs.json").read_text())["outcomes"]
    found = {each["run"]: (each["what"], each["why"]) for each in outcomes}
    assert found["good"] == ("ok", "")
    assert found["bad"][0] == "failed" and "status 3" in found["bad"][1]
    assert found["small"] == ("left out", "not at scale smoke")
    assert found["gpu"] == ("left out", "needs 1 GPU")
    assert found["absent"] == ("left out", "needs the files of x")
    assert "other" not in found
    assert (tmp_path / "bad.log").read_text() == "no\n"
    assert "not in this run" in (tmp_path / "claims.md").read_text()
    # What is left out makes nothing fail.
    bench = Bench("auto", 0, ["good", "absent"], str(tmp_path))
    assert program.main([]) == 0


def test_the_command_line_says_what_is_wrong(capsys) -> None:
    assert program.main(["bench.only=[nothing]"]) == 2
    assert "ConfigError: cannot run nothing: no such run" in capsys.readouterr().err
