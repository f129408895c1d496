"""Claim: whatever ends or stops a process of a job, the rest ends, and the job goes on later.

Runs the tests of ``tests/faults``, each with its seed, in their long form or the short one, and
keeps what they counted.  Those on GPUs run after the others, one by one, where there are any.

    python -m benchmarks.faults --long --out faults.json
    python -m benchmarks.faults --page                      # the tables of docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.claims.page import row
from benchmarks.claims.registry import KEPT
from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
#: Results of several machines and forms, a table each.
RESULTS = "faults*.json"
#: What pytest ends with when nothing failed; the second, where no test was chosen.
_WELL = (0, 5)
#: Between these lines of the page stands the table.
_BEGIN = "<!-- made by python -m benchmarks.faults --page -->\n"
_END = "<!-- end of what is made -->"


def tried(options: argparse.Namespace) -> dict[str, Any]:
    """What the tests counted.

    Raises
    ------
    RuntimeError
        If one of them failed.
    """
    figures: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""}
    beside = ["-n", str(options.jobs), "--dist", "loadgroup"]
    for words, more in ((["-m", "not alone", *beside], without_gpus), (["-m", "alone"], {})):
        with tempfile.TemporaryDirectory() as folder:
            lines, report = Path(folder) / "lines", Path(folder) / "report.xml"
            environment = {
                **os.environ, **more, "OMP_NUM_THREADS": "1",
                "DGL_MGPU_FAULTS": "long" if options.long else "short",
                "DGL_MGPU_FAULTS_SEED": str(options.seed), "DGL_MGPU_FAULTS_OUT": str(lines),
            }  # fmt: skip
            command = [sys.executable, "-m", "pytest", "-q", "tests/faults", *words]
            command += [f"--junitxml={report}", "-k", options.only]
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            if status not in _WELL:
                raise RuntimeError(f"tests of faults failed (status {status}); nothing is kept")
            if lines.exists():
                figures += map(json.loads, lines.read_text().splitlines())
            skipped |= skips(report)
    for figure in figures:
        figure["counted"] = sum(figure["outcomes"].values())
    return {
        "machine": describe_machine(),
        "options": {"jobs": options.jobs, "only": options.only},
        "form": "long form" if options.long else "short form",
        "seed": options.seed,
        "figures": sorted(figures, key=lambda figure: figure["test"]),
        "skipped": skipped,
    }


def skips(report: Path) -> dict[str, str]:
    """Why which tests were left out, of a report of pytest's."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        reason = case.find("skipped")
        if reason is not None:
            file = case.get("classname", "").rpartition(".")[2]
            found[f"{file}.py::{case.get('name')}"] = reason.get("message", "")
    return found


def table(result: Mapping[str, Any]) -> str:
    """What was tried, and what came of it, a row for each test."""
    machine = result["machine"]
    gpus = [f"{number} × {gpu}" for gpu, number in Counter(machine["gpus"]).items()]  # noqa: RUF001
    lines = [
        f"The {result['form']}, seed {result['seed']}, on {machine['cores']} cores, "
        f"{', '.join(gpus) or 'no GPU'}, commit {machine['commit']}:",
        "",
        row("what was tried", "what came of it, and how often", "longest, s"),
        row("---", "---", "---"),
    ]
    lines += [row(*cells) for cells in _cells(result["figures"])]
    for test, reason in result.get("failed", {}).items():
        lines += ["", f"Failed there, and mended since: {_said(test)} ({reason})."]
    if left_out := sorted({_said(test) for test in result["skipped"]}):
        lines += ["", f"Left out on this machine: {'; '.join(left_out)}."]
    return "\n".join(lines) + "\n"


def _cells(figures: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """A test's cells, with the counts of all its parameters."""
    counts: dict[str, Counter[str]] = {}
    longest: dict[str, dict[str, float]] = {}
    for figure in figures:
        name = _said(figure["test"])
        counts.setdefault(name, Counter()).update(figure["outcomes"])
        worst = longest.setdefault(name, {})
        for what, seconds in figure["longest_seconds"].items():
            worst[what] = max(seconds, worst.get(what, 0.0))
    for name, found in counts.items():
        outcomes = "; ".join(f"{what}: {number:,}" for what, number in sorted(found.items()))
        times = "; ".join(f"{what}: {most:.1f}" for what, most in sorted(longest[name].items()))
        yield name, outcomes, times


def _said(test: str) -> str:
    """A test's name as the sentence it is."""
    file, _, name = test.partition("::")
    name = re.sub(r"\[.*", "", name).removeprefix("test_").replace("_", " ")
    return f"{name} (on GPUs)" if file.endswith("_gpu.py") else name


def with_tables(page: str, results: Iterable[Mapping[str, Any]]) -> str:
    """The page's text with the tables of results in place of those it has."""
    before, found, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (found and end):
        raise ValueError(f"{PAGE.name} lacks the lines between which its table stands")
    tables = "\n".join(map(table, results))
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def kept() -> list[dict[str, Any]]:
    """The results that the page shows."""
    return [json.loads(path.read_text()) for path in sorted(KEPT.glob(RESULTS))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="hundreds of faults, for an hour or so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="beside")
    parser.add_argument("--only", default="", help="which tests: an expression as pytest -k takes")
    parser.add_argument("--page", action="store_true", help="write the page's tables, run nothing")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(with_tables(PAGE.read_text(), kept()))
        return
    found = tried(options)
    print(table(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
