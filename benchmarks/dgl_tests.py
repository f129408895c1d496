"""Outcomes of DGL's own tests with this package's graphs, by file, on the CPU and on GPUs.

On the CPU they run with DGL's binary, and as ``without_libdgl`` without it.

Tests are those of a checkout of DGL v2.1.0, below its ``tests/python``, but for the
distributed servers'.  Each file is run by a pytest of its own, with ``DGLTESTDEV`` as DGL's CI has
it.  Of the tests that pass on the CPU and that DGL runs on GPUs, the result says how many pass
there, and which tests fail.

    git clone --branch v2.1.0 https://github.com/dmlc/dgl
    python -m benchmarks.dgl_tests --dgl dgl --out dgl_own_tests.json
    python -m benchmarks.dgl_tests --dgl dgl --devices cpu --parts common/test_frame.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.datasets import NO_FILES
from benchmarks.machine import describe_machine

#: Folders of tests of what is no part of this package.
LEFT_OUT = {"distributed"}
ROOT = Path(__file__).parents[1]
PASSED, FAILED, SKIPPED, NOT_REACHED = "passed", "failed", "skipped", "not reached"

#: Where tests run, and what DGL's tests call it.
DEVICES = {"cpu": "cpu", "without_libdgl": "cpu", "gpu": "gpu"}

#: By a test's name.
Outcomes = dict[str, str]


def files_of(tests: Path, parts: list[str]) -> list[str]:
    """Files of tests in some folders, or these files, relative to ``tests``."""
    found: set[Path] = set()
    for part in parts:
        found |= {tests / part} if part.endswith(".py") else set((tests / part).rglob("test_*.py"))
    names = sorted(path.relative_to(tests) for path in found)
    return [str(name) for name in names if not LEFT_OUT & set(name.parts)]


def outcomes_of(file: str, device: str, dgl: Path, limit: float, each: float) -> Outcomes:
    """What becomes of a file's tests; of the file as a whole, if its time is over before."""
    environment = {
        **os.environ,
        "DGLBACKEND": "pytorch",
        "DGLTESTDEV": DEVICES[device],
        "DGL_MGPU_LIBDGL": "off" if device == "without_libdgl" else "auto",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(dgl / "tests"), os.environ.get("PYTHONPATH")])
        ),
    }
    if DEVICES[device] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-p", "dgl_mgpu", "-p", "no:cacheprovider", "--import-mode=importlib"]
        words += [f"--timeout={each:g}", f"--junitxml={report}", f"tests/python/{file}"]
        job = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *words],
            cwd=dgl, env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            job.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)  # with what its tests have started
            job.wait()
        if not report.is_file():  # pytest writes it at the end
            return {file: NOT_REACHED}
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    return PASSED if case.find("skipped") is None else SKIPPED


def compared(found: Mapping[str, Mapping[str, Outcomes]]) -> dict[str, Any]:
    """What the result says of outcomes by device and file."""
    every = {
        device: {name: what for of_file in by_file.values() for name, what in of_file.items()}
        for device, by_file in found.items()
    }
    files = sorted({file for by_file in found.values() for file in by_file})
    result: dict[str, Any] = {
        "totals": {device: Counter(each.values()) for device, each in every.items()},
        "files": {
            file: {device: Counter(found[device][file].values()) for device in found}
            for file in files
        },
    }
    for device, each in every.items():
        result[f"failed_on_{device}"] = [name for name, what in each.items() if what == FAILED]
    cpu = every.get("cpu", {})
    for device in {"without_libdgl", "gpu"} & every.keys() if cpu else ():
        other = every[device]
        ran = [n for n, what in cpu.items() if what == PASSED and other.get(n) in (PASSED, FAILED)]
        result[f"passed_on_cpu_and_run_on_{device}"] = len(ran)
        result[f"of_these_passed_on_{device}"] = sum(other[name] == PASSED for name in ran)
        result[f"of_these_failed_on_{device}"] = [name for name in ran if other[name] == FAILED]
        result[f"skipped_on_cpu_passed_on_{device}"] = sum(
            what == SKIPPED and other.get(name) == PASSED for name, what in cpu.items()
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dgl", type=Path, default=Path("dgl"), help="a checkout of DGL")
    parser.add_argument(
        "--parts", nargs="+", default=["common", "pytorch"], help="folders or files of its tests"
    )
    gpus = ["gpu"] if torch.cuda.is_available() else []
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=["cpu", *gpus])
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds of a file")
    parser.add_argument("--each", type=float, default=120.0, help="seconds of a test")
    parser.add_argument("--out", type=Path, help="write the outcomes here, as JSON")
    options = parser.parse_args()
    tests, dgl = options.dgl / "tests" / "python", options.dgl.resolve()
    files = files_of(tests, options.parts)
    if absent := [file for file in files or [str(tests)] if not (tests / file).exists()]:
        print(f"needs the files of DGL's tests: no {', '.join(absent)}")
        sys.exit(NO_FILES)
    found: dict[str, dict[str, Outcomes]] = {}
    with ThreadPoolExecutor(options.jobs) as threads:
        for device in options.devices:
            run = partial(
                outcomes_of, device=device, dgl=dgl, limit=options.limit, each=options.each
            )
            found[device] = dict(zip(files, threads.map(run, files), strict=True))
            for file, outcomes in found[device].items():
                counts = Counter(outcomes.values())
                print(f"{device} {file}: {', '.join(f'{n} {what}' for what, n in counts.items())}")
    result = {"machine": describe_machine(), "tests": compared(found)}
    print(json.dumps(result["tests"]["totals"]))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
