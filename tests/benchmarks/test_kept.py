"""The pages of kept results: they are those that the generator gives, and they hide nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from benchmarks.claims import kept
from benchmarks.claims.kept import CLAIMS_PAGE, FIRST_PAGE, Headline, kept_pages
from benchmarks.claims.registry import KEPT, Results
from dgl_mgpu.errors import DataFormatError

RESULT = {
    "machine": {"cores": 2, "gpus": [], "commit": "c0ffee"},
    "figures": [
        {"case": "a", "width": 16, "ours": 1.2345, "reached": True, "each": {"peer": 20}},
        {"case": "b", "width": 1000, "ours": None, "reached": False, "why": "too large"},
    ],
    "means": {"one": [1.0, 3.0], "two": [4.0, 4.0]},
}
TABLES = """
    - label: [case, width]
      columns: {"ours, ms": [ours], reached: [reached], peer: [each, peer], why: [why]}
    - {title: Means, of: [means], label: [], columns: {mean: []}}
"""


@pytest.fixture
def page_of(tmp_path: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path_factory.mktemp("claims")

    def made(tables: str = TABLES, files: str = "[r.json]", result: object = RESULT) -> str:
        (tmp_path / "r.json").write_text(json.dumps(result))
        (folder / "index.yaml").write_text("text: |\n  # Results\npages: [part]\nnotes: How.\n")
        (folder / "part.yaml").write_text(
            "title: Part\ntext: |\n  It means much.\nresults:\n"
            f"- shows: What it shows\n  command: python -m it\n  files: {files}\n"
            f"  note: |\n    A note.\n  tables:{tables}"
        )
        return kept_pages()["part.md"]

    monkeypatch.setattr(kept, "SOURCE", folder)
    monkeypatch.setattr(kept, "KEPT", tmp_path)
    return made


def test_the_kept_pages_are_what_the_generator_gives() -> None:
    there = {path.name: path.read_text() for path in KEPT.glob("*.md")}
    del there[CLAIMS_PAGE]
    assert there == kept_pages(), "run: python -m benchmarks report"


def test_the_first_page_has_what_the_others_mean(page_of) -> None:
    page_of()
    assert kept_pages()[FIRST_PAGE].splitlines()[2:] == [
        "# Results", "", "## [Part](part.md)", "", "It means much.", "", "How.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pages", "found"),
    [("[]", "part not among the 'pages'"), ("[part, other]", r"read other\.yaml.*other\.yaml")],
)
def test_a_page_that_is_not_named_or_not_there_is_an_error(page_of, pages, found) -> None:
    page_of()
    (kept.SOURCE / "index.yaml").write_text(f"text: a\npages: {pages}\n")
    with pytest.raises(DataFormatError, match=found):
        kept_pages()


def test_a_result_is_shown_with_all_its_figures(page_of) -> None:
    assert page_of().splitlines()[2:] == [
        "# Part", "", "It means much.", "",
        f"[All results, and what the columns mean]({FIRST_PAGE})", "",
        "## What it shows", "", "`python -m it`", "", "A note.", "",
        "[r.json](r.json) (2 cores, commit c0ffee)", "",
        "|  | ours, ms | reached | peer | why |", "| --- | ---: | ---: | ---: | ---: |",
        "| a, 16 | 1.23 | yes | 20 |  |", "| b, 1,000 |  | no |  | too large |", "",
        "Means:", "",
        "|  | mean |", "| --- | ---: |", "| one | 2 \N{PLUS-MINUS SIGN} 1.41 |",
        "| two | 4 \N{PLUS-MINUS SIGN} 0 |",
    ]  # fmt: skip


def test_a_column_that_a_result_lacks_is_left_out_of_its_table(page_of, tmp_path: Path) -> None:
    less = {**RESULT, "figures": RESULT["figures"][:1], "means": {"one": [1.0, 2.0]}}
    (tmp_path / "s.json").write_text(json.dumps(less))
    assert "|  | ours, ms | reached | peer |" in page_of(files="[r.json, s.json]").splitlines()


def test_the_least_and_the_most_of_the_repeats_stand_behind_their_median(page_of) -> None:
    figures = [
        {"case": "ms", "ours": 20.0, "each": [20.0, 19.0, 24.0]},
        # Seconds of two ranks, of which the second is slower, and a rate of both.
        {"case": "GB/s", "ours": 90.0, "each": [[1.0, 0.9, 1.25], [2.0, 2.0, 2.0]]},
        {"case": "once", "ours": 20.0, "each": [20.0]},
        {"case": "no repeats", "ours": 20.0},
    ]
    tables = (
        "\n    - columns: {ours: [ours]}\n      repeats: {ours: {at: [each], are_times: TIMES}}\n"
    )
    rows = {
        are_times: page_of(
            tables=tables.replace("TIMES", are_times), result={**RESULT, "figures": figures}
        ).splitlines()[-4:]
        for are_times in ("false", "true")
    }
    assert rows["false"][0] == "| ms | 20 (19 to 24) |"
    assert rows["true"][1] == "| GB/s | 90 (72 to 100) |"
    assert rows["true"][2:] == ["| once | 20 |", "| no repeats | 20 |"]
    with pytest.raises(DataFormatError, match="repeats of ours"):
        page_of(tables=tables.replace("TIMES", "true").replace("[each]", "[every]"))


def test_the_first_picture_has_all_cases_of_a_result(tmp_path: Path) -> None:
    figures = [
        {"case": "gpu, a", "ratio": 2.0, "ms": 1.0, "peer": 4.0},
        {"case": "gpu, b", "ratio": 0.5, "ms": 2.0, "peer": None},
        {"case": "half, c", "ratio": 9.0, "ms": 3.0, "peer": 3.0},
        {"case": "gpu, d", "ratio": None, "ms": 4.0, "peer": 4.0},
    ]
    content = {"machine": {"gpus": ["NVIDIA H200"] * 2}, "figures": figures}
    (tmp_path / "r.json").write_text(json.dumps(content))
    results = Results(tmp_path)
    found = Headline("it", "r.json", ["ratio"], cases="gpu,", gpus=1).speedups(results)
    # Also what is slower, and nothing of what is left out.
    assert found.quotients == [2.0, 0.5] and found.machine == "1 \N{MULTIPLICATION SIGN} H200"
    assert found.text == "0.50 to 2.00, median 1.25"
    over = Headline("it", "r.json", ["ms"], ["peer"]).speedups(results)
    assert over.quotients == [4.0, 1.0, 1.0]
    with pytest.raises(DataFormatError, match=r"no case of r\.json that matches 'cpu'"):
        Headline("it", "r.json", ["ratio"], cases="cpu").speedups(results)


def test_the_first_picture_is_drawn_without_results_to_come(tmp_path: Path) -> None:
    (tmp_path / "spmm_gpu.json").symlink_to(KEPT / "spmm_gpu.json")
    kept.draw_headlines(tmp_path)
    assert (tmp_path / kept.HEADLINES).read_bytes().startswith(b"\x89PNG")
    assert (KEPT / kept.HEADLINES).is_file()


@pytest.mark.parametrize("name", ["old.png", "notes.md", "other.json"])
def test_a_file_that_nothing_refers_to_is_found(page_of, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataFormatError, match=f"{name} on none of the pages"):
        page_of()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"files": "[]"}, "r.json on none of the pages"),
        ({"tables": "\n    - columns: {ours: [hours]}\n"}, r"\['ours'\].*nothing at their paths"),
        ({"tables": "\n    - {columns: {ours: [ours]}, colour: red}\n"}, "colour"),
        ({"tables": "\n    - {of: [numbers], columns: {ours: [ours]}}\n"}, "no 'numbers'"),
    ],
)
def test_a_page_that_would_hide_something_is_an_error(page_of, asked, found) -> None:
    with pytest.raises(DataFormatError, match=found):
        page_of(**asked)


def test_columns_of_results_to_come_may_be_empty(page_of, tmp_path: Path) -> None:
    """Until they are there."""
    tables = "\n    - columns: {ours: [ours], to come: [hours]}\n"
    awaiting = "[r.json]\n  awaited: [new.json]"
    assert "to come" not in page_of(tables, awaiting)
    (tmp_path / "new.json").write_text(json.dumps(RESULT))
    with pytest.raises(DataFormatError, match=r"\['to come'\].*nothing at their paths"):
        page_of(tables, awaiting)
    hours = [{"case": "a", "ours": 1, "hours": 2}]
    (tmp_path / "new.json").write_text(json.dumps({**RESULT, "figures": hours}))
    assert "| a | 1 | 2 |" in page_of(tables, awaiting)


def ratios(file: str, of: str, case: str = "", key: str = "ratio_to_peer") -> list[float]:
    """Of the figures of a kept file whose ``of`` begins with ``case``."""
    figures = json.loads((KEPT / file).read_text())["figures"]
    return [figure[key] for figure in figures if str(figure[of]).startswith(case)]


def test_the_readme_states_what_was_measured() -> None:
    sampling = ratios("sampling_gpu_4.json", "case", "int32, gpu,")
    of_host = ratios("sampling_gpu_2_host.json", "case")
    gathers = ratios("gather_gpu_4.json", "case", "uniform")
    skewed = ratios("gather_gpu_2_skewed.json", "case")
    cached, cached_2 = (ratios(f"gather_gpu_{gpus}_cached.json", "case") for gpus in (1, 2))
    sums = ratios("fullgraph_4.json", "width", key="times_peer")
    (seeds,) = ratios("rgat_gpu.json", "case", "step", "seeds_per_second")
    trained = ratios("train_gpu.json", "case") + ratios("train_gpu_another.json", "case")
    *graphsage, dropout, gcn, gin, gat, rgcn, links, uva = ratios(
        "unmodified_gpu.json", "name", key="ratio"
    )
    of_peer = functools.partial(ratios, "unmodified_peer.json", "case", "")
    uncompiled = functools.partial(ratios, "unmodified_peer_uncompiled.json", "case", "")
    over_cpu, over_eager = (
        [
            ratios("time_to_accuracy.json", "way", way, key)[0]
            for way in ("GPU, ours", "pinned, ours")
        ]
        for key in ("cpu_over_this", "eager_over_this")
    )
    two_gpus, two_gpus_another = (
        [1e-6 * rate for rate in reversed(ratios(file, "store", "off", "seeds_per_s"))]
        for file in ("unmodified_ddp.json", "unmodified_ddp_another.json")
    )
    readme = (KEPT.parents[1] / "README.md").read_text()
    for row in (
        f"{min(graphsage):.2f} to {max(graphsage):.2f} times as fast for GraphSAGE, {dropout:.2f} "
        f"with dropout, {gcn:.2f} for GCN, {gin:.2f} for GIN, {gat:.2f} for GAT, {rgcn:.2f} for "
        f"RGCN on a graph of several types, {links:.2f} for link prediction, {uva:.2f} for a "
        "pinned",
        "{:.1f} and {:.1f} times as fast as DGL on 16 cores".format(*over_cpu),
        "{:.2f} and {:.2f} times as with `--capture=off`".format(*over_eager),
        f"4 GPUs | {min(sampling):.1f} to {max(sampling):.1f} times as fast as pylibwholegraph",
        f"for both, on 2 GPUs | {min(of_host):.1f} to {max(of_host):.1f} times |",
        f"4 GPUs | {min(gathers):.2f} to {max(gathers):.2f} times as fast as pylibwholegraph",
        f"whichever is faster | {min(skewed):.1f} to {max(skewed):.1f} times |",
        f"{min(cached):.1f} to {max(cached):.1f} times as fast on one GPU, {min(cached_2):.1f} "
        f"to {max(cached_2):.1f} on two",
        f"4 GPUs | {min(sums):.2f} to {max(sums):.1f} times as fast as all-gather and cuSPARSE",
        f"schema | {seeds:,.0f} seeds a second on one GPU",
        "`use_uva` | {:.2f} M seeds a second captured, {:.2f} M with".format(*two_gpus),
        "; {:.2f} and {:.2f} M on a machine".format(*two_gpus_another),
        *(
            text.format(*found(key))
            for found in (of_peer, uncompiled)
            for key, text in (
                ("ratio_captured", "{:.2f}, {:.2f} and {:.2f} times as fast captured"),
                ("ratio_eager", "{:.2f}, {:.2f} and {:.2f} eager"),
            )
        ),
        f"1024 seeds | {min(trained):.1f} to {max(trained):.1f} times as fast, by the model",
    ):
        assert row in readme
