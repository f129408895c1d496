from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import dgl_mgpu  # noqa: F401  (lets dgl import in every test module)
from dgl_mgpu.train.launch import launch
from tests.forkserver import WITHOUT_PICTURES, launchers_multiprocessing
from tests.pictures import nothing_drawn
from tests.ranks import RankProcesses
from tests.seeds import seed_everything

ROOT = Path(__file__).parent.parent

# The same examples in every run, however long one takes on a machine that has other things to do.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# Thousands of modules and tests are made before the first test runs, and none of them ends before
# the last: to look for garbage among them takes half of the time until then, and much afterwards.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave what there is now out of all later searches for garbage."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart() -> None:
    """Where a GPU is required, its tests must not be skipped without a word."""
    there = torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None
    if os.environ.get("DGL_MGPU_REQUIRE_GPU") and not there:
        pytest.exit("make test-gpu needs a GPU that torch sees, and CuPy", returncode=2)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test and its fixtures draw depends on no test before it."""
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures a GPU that other tests use meanwhile; make test-gpu runs it apart")
    seed_everything()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with small real graphs, which do not travel with the project."""
    folder = Path(os.environ.get("DGL_MGPU_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real graphs in {folder} (DGL_MGPU_TEST_DATA names another folder)")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where runs of a module's tests find their data, which is generated once."""
    return f"data.root={tmp_path_factory.mktemp('data')}"


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs draw nothing, also those whose ranks are forked."""
    monkeypatch.setenv(WITHOUT_PICTURES, "1")
    with nothing_drawn():
        yield


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that this test launches start in milliseconds, not in seconds: they are forked.

    Not where there are GPUs, which a process does not use whose parent has counted them.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(launch, "mp", launchers_multiprocessing())


@pytest.fixture(scope="session")
def _cpu_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(3)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def _gpu_ranks() -> Iterator[RankProcesses]:
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"ranks need a GPU each: two or more, and there are {gpus}")
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("no CuPy")
    processes = RankProcesses(min(gpus, 3), "cuda")
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def _gpu_machines(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    gpus = torch.cuda.device_count()
    if gpus >= 2:
        yield request.getfixturevalue("_gpu_ranks")
        return
    if gpus == 0 or importlib.util.find_spec("cupy") is None:
        pytest.skip("no GPU, or no CuPy")
    processes = RankProcesses(3, "cuda")
    yield processes
    processes.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankProcesses:
    """Ranks that run checks, see `RankProcesses.run`: three on the CPU.

    With the mark `on_gpus_too` they are then two or three on GPUs, with `machines_on_gpus_too` on
    one GPU where there are no more.
    """
    fixtures = {"cpu": "_cpu_ranks", "cuda": "_gpu_ranks", "machines": "_gpu_machines"}
    return request.getfixturevalue(fixtures[getattr(request, "param", "cpu")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests one worker of pytest-xdist runs, so that what they share is made once.

    Those with ranks, which are processes of their own. Of a file those that share a fixture, as a
    trained run; all, where they compile kernels.
    """
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif item.path.parent.name in ("kernels", "ops") or _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _shares_a_fixture(item: pytest.Item) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(each[-1].scope == "module" for each in fixtures)
