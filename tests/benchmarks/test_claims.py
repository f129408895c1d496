"""The papers' claims: every place in a result exists, and the page kept is the page generated."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Canvas

from benchmarks.claims import registry
from benchmarks.claims.page import IMPOSSIBLE, commit_text, page, picture, value_text
from benchmarks.claims.pictures import (
    _RANGE_OPACITY,
    Bar,
    Panel,
    _draw_panel,
    between,
    draw,
    panels,
)
from benchmarks.claims.registry import KEPT, OUTCOMES, Figure, Place, Results, papers
from benchmarks.convergence import RUNS
from benchmarks.gcn_cases import CASES
from benchmarks.loader_gpu import FANOUTS
from benchmarks.mgg_gpu import PEERS
from benchmarks.placement_gpu import LINKS, PEER
from benchmarks.runs import configured
from benchmarks.sampling_accuracy import SHARED
from benchmarks.timed_training import SETTINGS
from dgl_mgpu.errors import DataFormatError
from dgl_mgpu.placement.policies import POLICIES

RESULT = {
    "machine": {
        "cores": 2, "processor": "P", "gpus": [], "python": "3", "versions": {}, "commit": "c",
    },
    "figures": [
        {"case": "a", "ranks": 1, "ours": 4.0, "peer": None},
        {"case": "a", "ranks": 2, "ours": 10, "more": {"samples": [1.0, 2.0, 6.0]}},
    ],
}  # fmt: skip
#: To read all claims takes seconds: one worker does, when it comes to these tests.
pytestmark = pytest.mark.xdist_group("claims")


@functools.cache
def figures() -> list[tuple[str, Figure]]:
    """All figures of all claims, and what each is called."""
    return [
        (f"{stem}, {claim.where}, {figure.case}", figure)
        for stem, paper in papers().items()
        for claim in paper.claims
        for figure in claim.figures
    ]


def test_the_kept_page_is_what_the_generator_gives() -> None:
    assert (KEPT / "claims.md").read_text() == page(Results()), "run: python -m benchmarks report"
    for stem in papers():
        assert (KEPT / picture(stem)).read_bytes().startswith(b"\x89PNG")


def test_every_place_has_a_number() -> None:
    results = Results()
    for name, figure in figures():
        answer = results.answer(figure)
        assert (answer and answer.file) == figure.file, name
        if answer is not None:
            # A placement that is not possible has none, where the paper says the same.
            assert (answer.ours is None) == (figure.paper == IMPOSSIBLE), name
            assert (answer.peer is None, answer.ceiling is None) == (
                figure.peer is None, figure.ceiling is None
            ), name  # fmt: skip


def test_claims_name_runs_that_there_are() -> None:
    runs = configured(["bench.gpus=0"]).runs
    assert {figure.run for _, figure in figures() if figure.run} <= set(runs)


def test_what_was_never_run_stands_where_programs_write_it() -> None:
    """No kept file shows that these places are there."""
    rows = {f"{part}, {size} B" for part in ("uniform", "host") for size in _row_bytes()}
    steps = {
        f"{shape} {network.model}"
        for setting in SETTINGS.values()
        for shape in setting.graphs
        for network in setting.networks.values()
    }
    of_layouts = ("epoch_gpu_layouts", "epoch_gpu_one", "epoch_gpu_numbers")
    of_epochs = (
        "epoch_gpu",
        "epoch_gpu_wholegraph",
        "epoch_gpu_products",
        "epoch_gpu_twitter",
        *of_layouts,
    )
    placements = {f"{links}, auto against {each}" for links in LINKS for each in (*POLICIES, PEER)}
    ways = ("torch-geometric", "torch-geometric, captured")
    written = {
        **dict.fromkeys(of_epochs, steps),
        **dict.fromkeys(("gather_gpu", "gather_gpu_host"), rows),
        **dict.fromkeys(("placement_gpu_6g", "placement_gpu_linked"), placements),
        **dict.fromkeys(
            (f"sampling_accuracy_{which}" for which in ("reddit", "ogb", "proteins")), SHARED.keys()
        ),
        "loader_gpu_xgnn": {
            f"{way}, 6000 at {','.join(map(str, fanouts))}" for way in ways for fanouts in FANOUTS
        },
        "mgg_gpu": PEERS.keys(),
        "gcn_gpu": CASES.keys(),
        "convergence_ogb": RUNS.keys(),
    }
    places = [
        (name, written[figure.run], figure.ours.at[1])
        for name, figure in figures()
        if figure.ours and figure.file is None and figure.run in written
    ]
    assert len(places) > 60
    runs = configured(["bench.gpus=0"]).runs
    for name, figure in figures():
        if figure.ours and figure.run in of_layouts:
            asked = [at[1]["layout"] for at in (figure.ours.at, figure.ours.over) if at]
            assert set(asked) <= set(runs[figure.run].options["layouts"]), name
    for name, names, entry in places:
        said = entry if isinstance(entry, str) else entry.get("case", entry.get("shape"))
        assert said in names, name


def _row_bytes() -> set[int]:
    runs = configured(["bench.gpus=0"]).runs
    return {
        size for run in ("gather_gpu", "gather_gpu_host") for size in runs[run].options["row_bytes"]
    }


def test_issue_asks_for_these_tables_and_figures() -> None:
    asked = {
        "xgnn": "Table 1, Table 4, Table 5, Figure 10, Figure 11, Figure 12, Figure 13, Figure 14, "
        "Figure 15a, Figure 15b",
        "wholegraph": "Table I, Table III, Table V, "
        "Figure 8, Figure 9, Figure 10, Figure 12, Figure 13",
        "pytorch_direct": "Figure 8, Figure 10, Figure 11, Figure 12",
        "mg_gcn": "Table 2, Table 3, Figure 6, Figure 7, Figure 8, Figure 9, Figures 10 and 11, "
        "Figures 12 and 13",
        "mgg": "Table 1, Table 4, Table 5, Figure 8, Figure 9, Figure 10",
    }  # fmt: skip
    for stem, wanted in asked.items():
        there = {claim.where.split(",")[0] for claim in papers()[stem].claims}
        assert set(wanted.split(", ")) <= there


@pytest.mark.parametrize(
    ("place", "number"),
    [
        (Place(["figures", {"case": "a", "ranks": 2}, "ours"]), 10.0),
        (Place(["figures", {"ranks": 2}, "more", "samples"]), 3.0),
        (Place(["figures", {"ranks": 2}, "more", "samples"], take="max"), 6.0),
        (Place(["figures", "*", "ours"], take="min", times=0.5), 2.0),
        (Place(["figures", {"ranks": 2}, "ours"], over=["figures", {"ranks": 1}, "ours"]), 2.5),
        (Place(["figures", {"ranks": 1}, "peer"]), None),
        (
            Place(["figures", {"ranks": 1}, "ours"], over=["figures", {"ranks": 1}, "peer"]),
            None,
        ),
        (Place(["figures", {"ranks": 1}, "ours"], remote=True), 0.0),
        (Place(["figures", {"ranks": 2}, "ours"], remote=True, times=3.0), 15.0),
    ],
)
def test_a_place_is_read(place: Place, number: float | None) -> None:
    assert place.read(RESULT) == number


@pytest.mark.parametrize(
    ("options", "place", "ranks"),
    [
        ({}, Place(["figures", {"case": "b"}, "ours"]), None),
        ({"ranks": 4}, Place(["figures", {"case": "b"}, "ours"]), 4),
        ({"ranks": "4"}, Place(["figures", {"case": "b"}, "ours"]), 4),
        ({"ranks": "[1, 2]"}, Place(["figures", {"case": "b"}, "ours"]), None),
        ({"ranks": 4}, Place(["figures", {"ranks": 1}, "ours"]), 1),
        (
            {"ranks": "[1, 2]"},
            Place(["figures", {"ranks": 1}, "ours"], over=["figures", {"ranks": 2}, "ours"]),
            2,
        ),
    ],
)
def test_a_number_is_of_as_many_ranks_as_its_entry_says_or_the_run(options, place, ranks) -> None:
    entries = [*RESULT["figures"], {"case": "b", "ours": 3.0}]
    assert place.ranks({**RESULT, "options": options, "figures": entries}) == ranks


def test_a_remote_share_of_nobody_knows_how_many_ranks_is_an_error() -> None:
    with pytest.raises(DataFormatError, match="no number of ranks"):
        Place(["ours"], remote=True).read({"ours": 1.0})


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (["figure"], "no 'figure'"),
        (["figures", {"case": "a"}, "ours"], "2 entries"),
        (["figures", {"ranks": 3}, "ours"], "0 entries"),
        (["figures", {"ranks": 1}, "case"], "'a' is no number"),
        (["figures", {"ranks": 1}], "is no number"),
        (["figures", {"ranks": 1}, "ours", "more"], "no 'more'"),
    ],
)
def test_a_place_that_is_not_there_is_an_error(path: list, found: str) -> None:
    with pytest.raises(DataFormatError, match=re.escape(found)):
        Place(path).read(RESULT)


@pytest.mark.parametrize(
    ("figure", "found"),
    [
        ("{case: a, run: links}", "neither a file nor what was missing"),
        ("{case: a, run: links, file: x.json}", "no place in it"),
        ("{case: a, ours: [x], needs: y}", "a place, but no run that writes there"),
        ("{case: a, file: x.json, ours: [x]}", "a place, but no run that writes there"),
        ("{case: a, run: links, file: x.json, ours: [x], peer: [y]}", "a peer without a name"),
        ("{case: a, needs: y, out: [x]}", "out"),
        ("{case: a, needs: y, ours: {at: [x], times: much}}", "much"),
    ],
)
def test_a_claim_that_says_too_little_is_an_error(figure, found, tmp_path, monkeypatch) -> None:
    head = "name: N\ntitle: T\nclaims:\n- {where: Table 1, what: w, machine: m, figures: "
    (tmp_path / "paper.yaml").write_text(f"{head}[{figure}]}}\n")
    monkeypatch.setattr(registry, "PAPERS", tmp_path)
    monkeypatch.setattr(registry, "_FILES", ("paper",))
    with pytest.raises(DataFormatError, match=found):
        papers.__wrapped__()


def test_what_holds_for_all_figures_is_written_once(tmp_path) -> None:
    (tmp_path / "paper.yaml").write_text(
        "name: N\ntitle: T\nclaims:\n- where: Table 1\n  what: w\n  machine: m\n"
        "  each: {unit: s, run: links, file: x.json}\n"
        "  figures:\n  - {case: a, ours: [x]}\n  - {case: b, unit: ms, ours: {at: [y], times: 2}}\n"
    )
    first, second = registry._paper(tmp_path / "paper.yaml").figures()
    assert first == Figure("a", None, "s", "links", "x.json", ours=Place(["x"]))
    assert second == Figure("b", None, "ms", "links", "x.json", ours=Place(["y"], times=2.0))


def rows_of(folder: Path, case: str) -> list[list[str]]:
    """The cells of a run's page in rows of a case, or of one that begins so."""
    lines = page(Results(folder, by_run=True)).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {case}")]
    return [[cell.strip() for cell in row] for row in cells]


def write_run(folder: Path, run: str, gpus: int, figures: list, **more: object) -> None:
    machine = {**RESULT["machine"], "gpus": ["NVIDIA H1"] * gpus}
    result = {"machine": machine, "options": {"ranks": gpus}, "figures": figures, **more}
    (folder / f"{run}.json").write_text(json.dumps(result))


def test_a_run_answers_by_its_name_and_says_what_it_lacks(tmp_path: Path) -> None:
    entry = {"case": "dgx1-4gc, auto against clique", "ratio_to_peer": 1.25}
    result = {**RESULT, "figures": [entry]}
    (tmp_path / "placement_gpu.json").write_text(json.dumps(result))
    auto, of_another_case = rows_of(tmp_path, "measured, 4Gc")
    link = "[placement_gpu.json](placement_gpu.json)"
    assert auto[2:] == ["1.25 \N{MULTIPLICATION SIGN}", "", "", "2 cores", link]
    assert of_another_case[2:] == ["not in this run"]
    assert rows_of(tmp_path, "the slowest answer of")[0][2] == "not in this run"
    found = page(Results(tmp_path, by_run=True))
    no_program = sum(figure.run is None for _, figure in figures())
    missing = len(figures()) - 1 - no_program
    assert f"Of {len(figures())} figures 1 have a result, for {missing} there is a program" in found


@pytest.mark.parametrize(("gpus", "rate"), [(2, "300 GB/s"), (4, "450 GB/s"), (8, "525 GB/s")])
def test_a_run_answers_the_rows_of_its_number_of_gpus(tmp_path: Path, gpus, rate) -> None:
    """What other GPUs serve follows from how many there are."""
    entry = {"case": "uniform, 512 B", "ours": 600.0, "peer": None}
    write_run(tmp_path, "gather_gpu", gpus, [entry], ceilings={"ring_copy": 700.0})
    for others in (2, 4, 8):
        (row,) = rows_of(tmp_path, f"512 B, {others} GPUs")
        if others == gpus:
            assert row[2:6] == [rate, "", "700 GB/s", f"{gpus} \N{MULTIPLICATION SIGN} H1"]
        else:
            assert row[2:] == ["not in this run"]


def test_a_run_on_eight_gpus_answers_what_was_never_run(tmp_path: Path) -> None:
    epochs = [{"ranks": 8, "case": "papers100M gcn", "epoch_s": 6.25, "busy_share": 0.5}]
    write_run(tmp_path, "epoch_gpu_wholegraph", 8, epochs)
    write_run(tmp_path, "epoch_gpu", 8, epochs)
    write_run(tmp_path, "mgg_gpu", 8, [{"shape": "reddit", "what": "layer", "ours_ms": 1.5}])
    table_v = rows_of(tmp_path, "GCN, ogbn-papers100M")[1]
    assert table_v[1:3] == ["5.7 s", "6.25 s"]
    assert rows_of(tmp_path, "GCN, 8 GPUs")[0][2] == "50 %"
    assert rows_of(tmp_path, "Reddit, 8 GPUs")[-1][2] == "1.5 ms"


def test_a_row_says_how_many_gpus_its_number_is_of(tmp_path: Path) -> None:
    of = [{"ranks": n, "case": "amazon, 578 features", "ratio": float(n)} for n in (1, 2)]
    write_run(tmp_path, "host_features_gpu", 2, of)
    entry = {"case": "dgx1-6g, auto against clique", "ratio_to_peer": 2.0}
    write_run(tmp_path, "placement_gpu_6g", 2, [entry], options={"ranks": 6})
    times = "\N{MULTIPLICATION SIGN}"
    found = {row[0]: row[5] for row in rows_of(tmp_path, "") if len(row) == 7}
    assert found["Amazon, 1 GPU"] == f"1 {times} H1"
    assert found["Amazon, 2 GPUs"] == f"2 {times} H1"
    assert found["measured, 6G, cliques ÷ auto"] == f"2 {times} H1, 6 ranks"


def test_a_run_that_was_left_out_or_failed_says_so_on_the_page(tmp_path: Path) -> None:
    outcomes = [
        {"run": "convergence", "what": "left out", "why": "needs the files of cora"},
        {"run": "placement_solver", "what": "failed", "why": "(status 1)"},
    ]
    (tmp_path / OUTCOMES).write_text(json.dumps({"outcomes": outcomes}))
    (cora,) = rows_of(tmp_path, "GCN, Cora, whole batches")
    assert cora[2] == "not run: needs the files of cora"
    assert rows_of(tmp_path, "the slowest answer of")[0][2] == "the run failed"


def test_a_kept_result_of_other_ranks_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, "r", 2, [{"case": "a", "ours": 1.0}])
    figure = Figure("a", run="links", file="r.json", ranks=4, ours=Place(["figures", {}, "ours"]))
    with pytest.raises(DataFormatError, match="a number of 2 ranks"):
        Results(tmp_path).answer(figure)


def test_numbers_have_three_digits() -> None:
    texts = {1234567.0: "1,234,567", 1040.2: "1,040", 12.345: "12.3", 0.012345: "0.0123", 0.0: "0"}
    assert {number: value_text(number, "") for number in texts} == texts
    assert value_text(2.5, "ms") == "2.5 ms"


def test_what_is_drawn_is_what_the_page_says(tmp_path: Path) -> None:
    results = Results()
    found = panels(papers()["mgg"], results)
    layer = next(panel for panel in found if panel.title.startswith("Table 4, GCN"))
    reddit = layer.bars[0]
    kept = json.loads((KEPT / "mgg_4.json").read_text())["figures"]
    ours = [e["ours_ms"] for e in kept if (e["shape"], e["what"]) == ("reddit", "layer")]
    assert (reddit.case, reddit.paper, [reddit.ours]) == ("Reddit", (6.95, 6.95), ours)
    assert not reddit.modelled and reddit.peer is None
    # Epochs that were measured, in seconds and as quotients, and reads that are modelled.
    *measured, modelled = panels(papers()["xgnn"], results)[:3]
    assert not any(bar.modelled for panel in measured for bar in panel.bars)
    assert all(bar.modelled for bar in modelled.bars)
    for run in ("gather_gpu", "gather_gpu_skewed"):
        (tmp_path / f"{run}.json").write_text((KEPT / "gather_gpu_4.json").read_text())
    drawn = draw(Results(tmp_path, by_run=True), tmp_path)
    assert [path.name for path in drawn] == ["claims_xgnn.png", "claims_wholegraph.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("paper", "numbers"),
    [
        (None, None),
        (2, (2, 2)),
        (IMPOSSIBLE, None),
        ("1.16 to 1.44", (1.16, 1.44)),
        ("up to 1.8", (0.0, 1.8)),
        ("more than 2", (2.0, math.inf)),
        ("on average 3.47", (3.47, 3.47)),
    ],
)
def test_what_papers_say_in_words_is_between_two_numbers(paper, numbers) -> None:
    assert between(paper) == numbers


def test_every_number_that_a_paper_states_can_be_drawn() -> None:
    for name, figure in figures():
        assert (between(figure.paper) is None) == (figure.paper in (None, IMPOSSIBLE)), name


def test_a_range_is_a_pale_band_up_to_the_end_of_the_axis() -> None:
    axes = Canvas().subplots()
    bars = [
        Bar("a", (1.0, 2.0), 4.0, None, None, False),
        Bar("b", (3.0, math.inf), 1.0, None, None, False),
        Bar("c", (5.0, 5.0), 1.0, None, None, False),
    ]
    _draw_panel(axes, Panel("", bars))
    bands = [(p.get_x(), p.get_x() + p.get_width(), p.get_alpha()) for p in axes.patches[::2]]
    assert bands == [(1.0, 2.0, _RANGE_OPACITY), (3.0, 5.5, _RANGE_OPACITY), (0.0, 5.0, None)]
    assert axes.get_xlim() == (0.0, 5.5)


def test_what_is_modelled_has_a_star() -> None:
    lines = page(Results(registry.KEPT)).splitlines()
    modelled = [line for line in lines if "| modelled |" in line]
    assert modelled and all(line.split(" | ")[2].endswith("*") for line in modelled)
    starred = [line for line in lines if line.startswith("|") and "* |" in line]
    assert starred == modelled


def test_what_a_paper_has_and_this_page_has_not_is_listed() -> None:
    text = page(Results(registry.KEPT))
    for stem, where in (("xgnn", "Figure 16"), ("wholegraph", "Table IV"), ("mg_gcn", "Figure 5")):
        assert f"- {where}: {registry.papers()[stem].left_out[where]}" in text


def test_a_commit_that_is_gone_is_told() -> None:
    assert commit_text("ed9776a") == (
        "ed9776a, which is not in the history: not reproducible from a checkout"
    )
    assert commit_text("c0ffee-dirty") == "c0ffee, with changes"
    assert commit_text("c0ffee") == "c0ffee"
