"""The papers' claims: every place in a result exists, and the page kept is the page generated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.claims import registry
from benchmarks.claims.page import IMPOSSIBLE, page, picture, value_text
from benchmarks.claims.pictures import draw, panels
from benchmarks.claims.registry import KEPT, Figure, Place, Results, papers
from benchmarks.runs import configured
from dgl_mgpu.errors import DataFormatError

RESULT = {
    "machine": {
        "cores": 2, "processor": "P", "gpus": [], "python": "3", "versions": {}, "commit": "c",
    },
    "figures": [
        {"case": "a", "ranks": 1, "ours": 4.0, "peer": None},
        {"case": "a", "ranks": 2, "ours": 10, "more": {"samples": [1.0, 2.0, 6.0]}},
    ],
}  # fmt: skip
FIGURES = [
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
    for name, figure in FIGURES:
        assert results.name(figure) == figure.file, name
        for place in (figure.peer, figure.ceiling):
            assert place is None or results.number(figure, place) is not None, name
        # A placement that is not possible has none, where the paper says the same.
        impossible = figure.file is None or figure.paper == IMPOSSIBLE
        assert impossible == (results.number(figure, figure.ours) is None), name


def test_claims_name_runs_that_there_are() -> None:
    runs = configured(["bench.gpus=0"]).runs
    assert {figure.run for _, figure in FIGURES if figure.run} <= set(runs)


def test_issue_asks_for_these_tables_and_figures() -> None:
    asked = {
        "xgnn": "Table 1, Table 4, Table 5, " + ", ".join(f"Figure {n}" for n in range(10, 15)),
        "wholegraph": "Table I, Table III, Table V, "
        "Figure 8, Figure 9, Figure 10, Figure 12, Figure 13",
        "pytorch_direct": "Figure 8, Figure 10, Figure 11, Figure 12",
        "mg_gcn": "Table 2, Table 3, Figure 6, Figure 7, Figure 8, Figure 9, Figures 10 and 11",
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
        (Place(["figures", {"ranks": 1}, "ours"], over=["figures", {"ranks": 1}, "peer"]), None),
    ],
)
def test_a_place_is_read(place: Place, number: float | None) -> None:
    assert place.read(RESULT) == number


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
        ("{case: a, ours: [x], needs: y}", "a place, but no file"),
        ("{case: a, file: x.json, ours: [x]}", "no run that made it"),
        ("{case: a, run: links, file: x.json, ours: [x], peer: [y]}", "a peer without a name"),
        ("{case: a, needs: y, out: [x]}", "out"),
        ("{case: a, needs: y, ours: {at: [x], times: much}}", "much"),
    ],
)
def test_a_claim_that_says_too_little_is_an_error(figure, found, tmp_path, monkeypatch) -> None:
    head = "name: N\ntitle: T\nclaims:\n- {where: Table 1, what: w, machine: m, figures: "
    (tmp_path / "paper.yaml").write_text(f"{head}[{figure}]}}\n")
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
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


def test_a_run_answers_by_its_name_and_says_what_it_lacks(tmp_path: Path) -> None:
    entry = {"case": "dgx1-4gc, auto against clique", "ratio_to_peer": 1.25}
    result = {**RESULT, "figures": [entry]}
    (tmp_path / "placement_gpu.json").write_text(json.dumps(result))
    found = page(Results(tmp_path, by_run=True))
    rows = [line for line in found.splitlines() if line.startswith("| measured, 4Gc")]
    link = "[placement_gpu.json](placement_gpu.json)"
    assert f"| 1.25 \N{MULTIPLICATION SIGN} |  |  | 2 cores | {link} |" in rows[0]
    assert f"| {link} |" in rows[1] and "1.25" not in rows[1]  # of another case
    solver = next(line for line in found.splitlines() if "slowest answer" in line)
    assert "| not in this run |" in solver


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
    assert (reddit.case, reddit.paper, [reddit.ours]) == ("Reddit", 6.95, ours)
    assert not reddit.modelled and reddit.peer is None
    assert all(bar.modelled for bar in panels(papers()["xgnn"], results)[0].bars)
    (tmp_path / "gather_gpu.json").write_text((KEPT / "gather_gpu_4.json").read_text())
    drawn = draw(Results(tmp_path, by_run=True), tmp_path)
    assert [path.name for path in drawn] == ["claims_xgnn.png", "claims_wholegraph.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")
