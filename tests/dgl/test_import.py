"""``import dgl_mgpu`` makes ``import dgl`` work, quietly, and touches nothing it need not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgl_mgpu.dgl.patches import backend as backend_choice

QUIET = """
import os, sys, threading
before = dict(os.environ)
class Searched:
    names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name)
import dgl_mgpu
sys.meta_path.insert(0, Searched())
heavy = {"torch", "dgl", "ogb", "numpy"} & set(sys.modules)
assert not heavy, heavy
import dgl
from dgl_mgpu.dgl import install
hooks = list(sys.meta_path)
install()
assert sys.meta_path == hooks
changed = {name for name, value in os.environ.items() if before.get(name) != value}
others_own = {"OUTDATED_IGNORE", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # ogb, scikit-learn
assert changed <= others_own and set(before) <= set(os.environ), changed
assert dgl.graph(([0, 1], [1, 2])).num_nodes() == 3
import dgl.nn, dgl.data, dgl.distributed, dgl.multiprocessing
import ogb.nodeproppred
assert threading.active_count() == 1, threading.enumerate()
assert "ogb" in Searched.names and "outdated" not in Searched.names  # asks PyPI on a thread
"""


def test_importing_is_quiet_lazy_and_leaves_no_trace(run_python, tmp_path):
    done = run_python(QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list((tmp_path / "home").iterdir()) == []


LATE = """
import sys
import torch
before = set(sys.modules)
import dgl_mgpu, dgl
import dgl.nn, dgl.data, dgl.sampling, dgl.transforms
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
late = {"pandas", "scipy", "networkx", "requests", "ogb", "sklearn", "pydantic", "matplotlib",
        "tensorboard", "numba", "highspy", "hydra", "omegaconf", "jinja2", "rich", "yaml"}
assert not packages & late, packages & late
g = dgl.graph(([0, 1, 2], [1, 2, 3]))  # which is asked whether its data are SciPy's
assert "scipy" not in sys.modules and "networkx" not in sys.modules

import networkx, scipy.sparse, torch
assert networkx.path_graph(3).number_of_nodes() == 3
assert dgl.from_networkx(networkx.DiGraph([(0, 1), (1, 2)])).num_edges() == 2
assert g.to_networkx().number_of_nodes() == 4
matrix = scipy.sparse.coo_matrix(([1, 1], ([0, 1], [1, 2])), shape=(3, 3))
assert dgl.from_scipy(matrix).num_edges() == 2
try:
    dgl.graph(matrix)
except dgl.DGLError as error:
    assert "from_scipy" in str(error), error
else:
    raise AssertionError("a SciPy matrix was taken for edges")
assert dgl.transforms.HeatKernel()(dgl.graph(([0, 1, 2], [1, 2, 0]))).num_nodes() == 3
"""


def test_packages_that_few_functions_use_are_imported_by_these(run_python):
    done = run_python(LATE)
    assert (done.returncode, done.stderr) == (0, "")


ABORTS = """
import pathlib, re
import dgl_mgpu, dgl, torch
g = dgl.rand_graph(10, 30)
g.ndata["h"] = torch.ones(10, 4)
g.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "h"))
caught = int(re.search(r"SigCgt:\\s*(\\w+)", pathlib.Path("/proc/self/status").read_text())[1], 16)
print(caught >> 5 & 1)  # SIGABRT's
"""


def test_a_process_that_aborts_is_ended_at_once(run_python):
    done = run_python(ABORTS)
    assert (done.stdout, done.stderr) == ("0\n", "")


AFTER_A_FAILURE = """
import sys
try:
    import dgl
except ImportError:
    pass
else:
    raise SystemExit("DGL imports by itself: nothing to test")
assert "dgl.backend.pytorch.sparse" in sys.modules
import dgl_mgpu, dgl
from dgl_mgpu.dgl.patches.backend.pytorch import sparse as autocast
import dgl.backend.pytorch.sparse as sparse
assert sparse._cast_if_autocast_enabled is autocast._cast_if_autocast_enabled
assert dgl.graph(([0], [1])).num_nodes() == 2
"""


def test_mends_what_a_failed_import_left_behind(run_python, tmp_path):
    (tmp_path / "home/.dgl").mkdir(parents=True)
    (tmp_path / "home/.dgl/config.json").write_text('{"backend": "pytorch"}')
    done = run_python(AFTER_A_FAILURE)
    assert (done.returncode, done.stderr) == (0, "")


def make_dgl(folder: Path, *libraries: str) -> None:
    """A stand-in for a DGL installation with the given C++ libraries and its own marks."""
    for package in ("", "backend", "graphbolt", "sparse"):
        (folder / "dgl" / package).mkdir(parents=True, exist_ok=True)
        (folder / "dgl" / package / "__init__.py").write_text(
            "get_preferred_backend = ItemSet = 'its own'\n"
        )
    (folder / "torchdata" / "datapipes").mkdir(parents=True)
    (folder / "torchdata" / "__init__.py").write_text("")
    for library in libraries:
        (folder / "dgl" / library).parent.mkdir(exist_ok=True)
        (folder / "dgl" / library).touch()


PRETEND_TORCH_2_4 = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "2.4.0" if name == "torch" else version(name)
"""
LIBRARIES = (
    "graphbolt/libgraphbolt_pytorch_2.4.0.so",
    "dgl_sparse/libdgl_sparse_pytorch_2.4.0.so",
)
ALL_ITS_OWN = """
import dgl.backend, dgl.graphbolt, dgl.sparse
assert dgl.backend.get_preferred_backend == "its own"
assert dgl.graphbolt.ItemSet == dgl.sparse.ItemSet == "its own"
"""


def test_a_dgl_with_libraries_for_this_torch_is_left_alone(run_python, tmp_path):
    make_dgl(tmp_path, *LIBRARIES)
    done = run_python(f"{PRETEND_TORCH_2_4}\nimport dgl_mgpu\n{ALL_ITS_OWN}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_dgl_that_was_imported_before_is_left_alone(run_python, tmp_path):
    make_dgl(tmp_path)
    done = run_python(f"import dgl\nimport dgl_mgpu\n{ALL_ITS_OWN}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_dgl_that_lacks_graphbolts_library_keeps_its_own_dgl_sparse(run_python, tmp_path):
    make_dgl(tmp_path, "dgl_sparse/libdgl_sparse_pytorch_2.4.0.so")
    code = f"""{PRETEND_TORCH_2_4}
import torch, dgl_mgpu, dgl.sparse, dgl.graphbolt
assert dgl.sparse.ItemSet == "its own"
assert torch.ops.dgl_sparse is not dgl_mgpu.graph.sparse
assert type(dgl.graphbolt).__name__ == "_WaitingModule"
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_dgl_that_lacks_the_library_of_dgl_sparse_gets_operators(run_python, tmp_path):
    make_dgl(tmp_path, "graphbolt/libgraphbolt_pytorch_2.4.0.so")
    module = tmp_path / "dgl" / "sparse" / "__init__.py"
    module.write_text(module.read_text() + "raise FileNotFoundError('no C++ library')\n")
    code = f"""{PRETEND_TORCH_2_4}
import torch, dgl_mgpu, dgl.sparse, dgl.graphbolt
assert dgl.graphbolt.ItemSet == dgl.sparse.ItemSet == "its own"
assert torch.ops.dgl_sparse is dgl_mgpu.graph.sparse
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_graphbolt_without_torchdatas_datapipes_gets_some(run_python, tmp_path):
    make_dgl(tmp_path, *LIBRARIES)
    (tmp_path / "torchdata" / "datapipes").rmdir()
    code = f"""{PRETEND_TORCH_2_4}
import dgl_mgpu, dgl.graphbolt
assert type(dgl.graphbolt).__name__ == "_WaitingModule"
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


PRETEND_DGL = """
from importlib import metadata
version, there = metadata.version, {there!r}
def pretended(name):
    if name == "dgl" and there is None:
        raise metadata.PackageNotFoundError(name)
    return there if name == "dgl" else version(name)
metadata.version = pretended
"""


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (None, "it is not installed; run dgl-mgpu install-dgl"),
        ("0.1.3", "dgl 0.1.3 is installed; pip uninstall dgl, then run dgl-mgpu install-dgl"),
    ],
)
def test_the_import_of_dgl_says_which_command_brings_it(run_python, there, told):
    code = f"""{PRETEND_DGL.format(there=there)}
import dgl_mgpu, dgl_mgpu.cli, dgl_mgpu.doctor
print(dgl_mgpu.doctor._versions()[2])
import dgl
"""
    done = run_python(code)
    assert done.returncode == 1
    assert done.stdout == told.partition("; ")[2] + "\n"
    assert done.stderr.splitlines()[-1].endswith(told)


def test_graphbolt_of_another_dgl_is_refused_when_it_is_used(run_python):
    code = f"""{PRETEND_DGL.format(there="2.4.0")}
import dgl_mgpu.doctor, dgl.distributed
assert dgl.graph(([0], [1])).num_nodes() == 2
from dgl_mgpu.errors import UnavailableError
try:
    dgl.graphbolt.ItemSet
except UnavailableError as error:
    print(error)
print(dgl_mgpu.doctor._graphbolt()[0])
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    said, status = done.stdout.splitlines()
    assert said.startswith("cannot use dgl.graphbolt of DGL 2.4.0: ")
    assert "this package's operators are those of dgl >=2.1,<2.2" in said
    assert status == "absent"


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither DGL's environment variable nor its file names a backend."""
    monkeypatch.delenv("DGLBACKEND", raising=False)
    monkeypatch.setenv("DGLDEFAULTDIR", str(tmp_path))
    return tmp_path


def test_backend_is_pytorch_when_nobody_chose(undecided, capfd):
    assert backend_choice.get_preferred_backend() == "pytorch"
    assert list(undecided.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_backend_is_what_the_user_chose(undecided, monkeypatch):
    (undecided / "config.json").write_text('{"backend": "TensorFlow"}')
    assert backend_choice.get_preferred_backend() == "tensorflow"
    monkeypatch.setenv("DGLBACKEND", "mxnet")
    assert backend_choice.get_preferred_backend() == "mxnet"


@pytest.mark.parametrize("content", ["", '{"backend": "py', '{"backend": "keras"}', "{}"])
def test_a_half_written_or_odd_file_reads_as_undecided(undecided, content):
    (undecided / "config.json").write_text(content)
    assert backend_choice.get_preferred_backend() == "pytorch"


@pytest.mark.parametrize("before", [None, "nonsense"])
def test_the_choice_in_the_environment_lasts_for_the_import_only(undecided, monkeypatch, before):
    import os

    if before is not None:
        monkeypatch.setenv("DGLBACKEND", before)
    with backend_choice.pytorch_by_default():
        assert os.environ["DGLBACKEND"] == "pytorch"
    assert os.environ.get("DGLBACKEND") == before
