"""The page that holds every claim of the papers against our results, made from both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.claims.registry import Claim, Paper, Results, papers

#: What XGNN writes for a system that fails, and this page for a placement that is not possible.
IMPOSSIBLE = TIMES = "\N{MULTIPLICATION SIGN}"

#: Commits that kept results name and that are not in the history any more.
UNREACHABLE = frozenset({"ed9776a", "49cf21a", "529df64"})

#: First line of the pages.
WRITTEN = "<!-- Written by `python -m benchmarks report` from benchmarks/claims and results. -->\n"

_INTRODUCTION = """\
# The papers' claims and what was measured here

For the tables and figures of the five papers that have results, but for those that each paper's
part lists as left out: what the paper states and on which machine, our figure, a peer of the same
run (unless it says otherwise), a ceiling measured in it, and the result that each was read from.
The papers' GPUs are older than ours, so times do not compare systems; quotients of one run do, and
shares of a ceiling. The software and commit of each result are at the end.

**A star marks what is modelled**: the cost model's arithmetic, not a measurement. In XGNN's part it
rests on curves of reads that are fitted to one of the paper's own hit rates for each graph.

{count}
"""


def page(results: Results) -> str:
    """The page, in Markdown."""
    found = papers()
    figures = [figure for paper in found.values() for figure in paper.figures()]
    answers = [answer for figure in figures if (answer := results.answer(figure))]
    no_program = sum(figure.run is None for figure in figures)
    count = (
        f"Of {len(figures)} figures {len(answers)} have a result, for "
        f"{len(figures) - len(answers) - no_program} there is a program and no result, as their "
        f"rows say why, and {no_program} have no program."
    )
    parts = [WRITTEN, _INTRODUCTION.format(count=count)]
    for stem, paper in found.items():
        parts += _of_paper(stem, paper, results)
    parts += _of_files({answer.file: answer.result for answer in answers})
    return "\n".join(parts)


def _of_paper(stem: str, paper: Paper, results: Results) -> Iterator[str]:
    yield f"## {paper.name}\n\n{paper.title}.\n"
    yield f"![{paper.name}'s figures and ours]({picture(stem)})\n"
    for claim in paper.claims:
        yield f"### {paper.name}, {claim.where}: {claim.what}\n"
        yield f"In the paper on {claim.machine}. {claim.note}".strip() + "\n"
        if claim.figures:
            yield from _rows(claim, results)
            yield ""
    if paper.left_out:
        yield f"Left out of {paper.name}'s results:\n"
        yield from (f"- {where}: {why}" for where, why in paper.left_out.items())
        yield ""


def picture(stem: str) -> str:
    """The name of a paper's picture."""
    return f"claims_{stem}.png"


def _rows(claim: Claim, results: Results) -> Iterator[str]:
    yield "| case | paper | ours | peer | ceiling | ours on | result |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | --- |"
    for figure in claim.figures:
        stated = "" if figure.paper is None else _stated(figure.paper, figure.unit)
        answer = results.answer(figure)
        if answer is None:
            yield row(figure.case, stated, results.missing(figure), "", "", "", "")
            continue
        yield row(
            figure.case,
            stated,
            value_text(answer.ours, figure.unit) + ("*" if answer.result.get("modelled") else ""),
            _beside(answer.peer, figure.unit, f" ({figure.peer_name})"),
            _beside(answer.ceiling, figure.unit),
            machine_text(answer.result, answer.ranks),
            f"[{answer.file}]({answer.file})",
        )


def _beside(value: float | None, unit: str, whose: str = "") -> str:
    return "" if value is None else f"{value_text(value, unit)}{whose}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def value_text(value: float | None, unit: str) -> str:
    """A number with its unit; what stands for one that is not possible."""
    return IMPOSSIBLE if value is None else f"{_three_digits(value)} {unit}".strip()


def _stated(value: float | str, unit: str) -> str:
    """As the paper has it."""
    if value == IMPOSSIBLE:
        return IMPOSSIBLE
    return f"{value if isinstance(value, str) else f'{value:,g}'} {unit}".strip()


def _three_digits(value: float) -> str:
    """Three digits or all before the point, no exponent; what has fewer stays as it is."""
    if value == float(f"{value:.3g}"):
        return f"{value:,g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def machine_text(result: Any, ranks: int | None = None) -> str:
    """In a few words, what a result was made on, or so many ranks' numbers of it."""
    if result.get("modelled"):
        return "modelled"
    machine = result["machine"]
    gpus = len(machine["gpus"])
    if not gpus:
        return f"{machine['cores']} cores"
    used = gpus if ranks is None else min(ranks, gpus)
    sharing = f", {ranks} ranks" if ranks is not None and ranks > gpus else ""
    return f"{used} {TIMES} {machine['gpus'][0].removeprefix('NVIDIA ')}{sharing}"


def commit_text(commit: str) -> str:
    """A commit, and whether the result can be made again from a checkout of it."""
    if commit.partition("-")[0] in UNREACHABLE:
        return f"{commit}, which is not in the history: not reproducible from a checkout"
    changed = commit.removesuffix("-dirty")
    return commit if changed == commit else f"{changed}, with changes"


def _of_files(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## The results\n"
    yield "| result | commit | machine | versions |"
    yield "| --- | --- | --- | --- |"
    for name, result in sorted(found.items()):
        machine = result["machine"]
        versions = {"Python": machine["python"], **machine["versions"]}
        gpus = machine["gpus"]
        cores = f"{machine['cores']} cores, {machine['processor']}"
        yield row(
            f"[{name}]({name})",
            commit_text(machine["commit"]),
            f"{len(gpus)} {TIMES} {gpus[0]}; {cores}" if gpus else cores,
            ", ".join(f"{package} {version}" for package, version in versions.items()),
        )
    yield ""
