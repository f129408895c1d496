"""A plan is a function of its inputs: the same bits on every processor, with any number of threads.

Other processors are stood in for: OpenBLAS is told that it is on them, NumPy and the C library that
they lack what newer ones have.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = json.loads((Path(__file__).parent / "digests.json").read_text())
# That are known to find the same among equally good plans.
HIGHS = ("1.11.0", "1.12.0", "1.13.1", "1.14.0", "1.15.1")
# The digests say the same of the processors that tests run on; all of these are for make test-all.
SLOW_CORES = ("SkylakeX", "Zen", "Prescott", "Sandybridge")
CORES = ("Haswell", *(pytest.param(core, marks=pytest.mark.slow) for core in SLOW_CORES))
pytestmark = pytest.mark.xdist_group("same plans")  # its plans are made once


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def here():
    """Plans as this machine makes them."""
    run = _python("-m", "tests.placement.cases")
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("threads", ["1", pytest.param("4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("core", CORES)
def test_plans_do_not_depend_on_the_blas(here, core, threads):
    environment = {
        "OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads,
    }  # fmt: skip
    if _python("-c", "import numpy", **environment).returncode < 0:
        pytest.skip(f"this processor cannot run OpenBLAS's kernels for {core}")
    run = _python("-m", "tests.placement.cases", **environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == here


def test_plans_do_not_depend_on_vector_instructions(here):
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    dispatched = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
    run = _python(
        "-m", "tests.placement.cases",
        NPY_DISABLE_CPU_FEATURES=" ".join(dispatched),
        GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout == here


def test_plans_are_those_that_were_kept(here):
    """As on the machine that wrote them; see ``cases.py`` for how."""
    found = importlib.metadata.version("highspy")
    if found not in HIGHS:
        pytest.skip(f"kept for HiGHS {', '.join(HIGHS)}, this is {found}")
    assert json.loads(here) == KEPT
