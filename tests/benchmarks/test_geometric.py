"""The benchmark beside torch-geometric's own loader, on small graphs."""

from __future__ import annotations

import argparse
import json
import math
import sys
import types

import pytest
import torch

from benchmarks import geometric as program
from benchmarks.geometric import (
    ALIKE,
    GRAPHS,
    SIDES,
    SettingError,
    Side,
    figure_of,
    require_alike,
    write_graph,
)
from benchmarks.peers import geometric
from benchmarks.peers.geometric import why_no_loader

needs_loader = pytest.mark.skipif(bool(why_no_loader()), reason=why_no_loader())
OPTIONS = argparse.Namespace(
    nodes=4000, edges=60_000, batch=64, batches=4, fanouts=[5, 3], workers=[0, 1], threads=[1],
    warm_up=0, seconds=math.inf,
)  # fmt: skip


@pytest.fixture(scope="module", params=GRAPHS)
def graph(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("graph") / "graph.pt"
    write_graph(file, request.param, OPTIONS)
    return file


def expected_edges(file) -> float:
    """Edges into the seeds of a batch, the mean of an epoch."""
    data = torch.load(file)
    degrees = data["indptr"].diff()[data["train"]]
    assert len(data["train"]) == 4 * 64
    return float(degrees.clamp(max=5).sum()) / 4


@pytest.mark.parametrize("name", ["binary", "without", pytest.param("peer", marks=needs_loader)])
def test_a_side_samples_learns_and_is_timed(graph, name) -> None:
    with Side(name, graph, OPTIONS) as side:
        assert side.loadings[:2] == ["0 workers, 1 threads", "1 workers, 1 threads"]
        work = side.ask("work", side.loadings[1])
        first, *_, last = side.ask("losses")
        times = [side.ask(what, each) for what in ("load", "step") for each in side.loadings]
    assert work["edges"][1] == expected_edges(graph)
    # No node is sampled twice as an input of a batch, and all its edges come from there.
    assert 64 < work["inputs"] <= 64 + sum(work["edges"])
    assert last < first and all(ms > 0 for ms in times)


@needs_loader
def test_all_layouts_of_the_peer_learn_the_same(graph) -> None:
    with Side("peer", graph, OPTIONS) as side:
        losses = [side.ask("losses", layout=each) for each in side.layouts]
    assert len(losses) == 3
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=0.1)  # other samples


@needs_loader
def test_all_sides_are_timed_in_their_best_settings(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "found.json"
    words = (
        "--nodes 4000 --edges 60000 --batch 64 --batches 4 --fanouts 5 5 --workers 0 1 "
        "--threads 1 --turns 2 --graphs communities"
    )
    monkeypatch.setattr(sys, "argv", ["program", *words.split(), "--out", str(out)])
    program.main()
    load, step = json.loads(out.read_text())["figures"]
    assert (load["case"], step["case"]) == ("load, communities", "step, communities")
    for figure in (load, step):
        for each in ("ms", "losses", *ALIKE):
            assert set(figure[each]) == set(SIDES["cpu"])
        for name, swept in figure["swept_ms"].items():
            assert swept[figure["setting"][name]] == min(swept.values())
            assert len(figure["turns"][name]) == 2
            assert not figure["failed"][name]
    assert len(load["swept_ms"]["peer"]) == 3 and len(step["swept_ms"]["peer"]) == 9
    assert "step, communities: binary" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["binary", pytest.param("peer", marks=needs_loader)])
def test_an_epoch_ends_when_it_was_timed_for_long_enough(graph, name) -> None:
    options = argparse.Namespace(**{**vars(OPTIONS), "warm_up": 1, "seconds": 0.0})
    with Side(name, graph, options) as side:
        # Another epoch begins after one that was left.
        assert all(side.ask("load", each) > 0 for each in side.loadings for _ in range(3))


def test_settings_that_fail_are_left_out() -> None:
    class Asked:
        loadings = ("slow", "broken", "fast")
        layouts = ("first", "second")

        def ask(self, what: str, loading: str, layout: str) -> float:
            if loading == "broken":
                raise SettingError("no shared memory")
            return {"slow": 9.0, "fast": 1.0}[loading] + (layout == "first")

    found = program.sweeps(Asked(), finalists=1)
    assert found["load"].ms == {("slow", "first"): 10.0, ("fast", "first"): 2.0}
    assert found["load"].failed == {("broken", "first"): "no shared memory"}
    assert found["step"].best == ("fast", "second") and len(found["step"].ms) == 2
    assert len(program.sweeps(Asked(), finalists=None)["step"].ms) == 4
    with pytest.raises(SettingError, match=r"load failed .*no shared memory"):
        program.sweep(Asked(), "load", ["broken"], ["first"])


def test_what_a_script_cannot_do_is_raised(graph) -> None:
    with Side("binary", graph, OPTIONS) as side:
        with pytest.raises(SettingError, match="KeyError: 'no such loading'"):
            side.ask("load", "no such loading")
        assert side.ask("load") > 0


def test_turns_are_compared_one_by_one() -> None:
    turns = {"binary": [2.0, 4.0, 3.0], "without": [1.0, 1.0, 8.0], "peer": [4.0, 4.0, 9.0]}
    found = figure_of(turns)
    assert found["ms"] == {"binary": 3.0, "without": 1.0, "peer": 4.0}
    assert found["peer_over"] == {"binary": 2.0, "without": 4.0}


@pytest.mark.parametrize("what", ALIKE)
def test_sides_that_do_other_work_are_refused(what) -> None:
    found = {each: {"binary": 100.0, "without": 99.5, "peer": 99.0} for each in ALIKE}
    require_alike(found)
    found[what]["peer"] = 85.0
    with pytest.raises(ValueError, match=f"{what} is not alike"):
        require_alike(found)


def test_without_the_peer_it_ends_and_says_why(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(program, "why_no_loader", lambda: "it is not installed")
    with pytest.raises(SystemExit, match="it is not installed"):
        program.main()


def test_what_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setattr(geometric.importlib.util, "find_spec", lambda _: None)
    assert why_no_loader() == "torch-geometric is not installed"
    monkeypatch.setattr(geometric.importlib.util, "find_spec", lambda _: object())
    typing = types.SimpleNamespace(WITH_PYG_LIB=False)
    monkeypatch.setitem(sys.modules, "torch_geometric", types.SimpleNamespace(typing=typing))
    monkeypatch.setitem(sys.modules, "torch_geometric.typing", typing)
    assert why_no_loader().endswith("pyg-lib, which is not there")
    typing.WITH_PYG_LIB = True
    assert why_no_loader() == ""
