"""``python -m dgl_mgpu``: what a script sees is what it sees when Python runs it directly."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment import search_path

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PROBE = '''"""A docstring."""
import json, sys
import __main__
names = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
print(json.dumps([
    sys.argv,
    sys.path[0],
    {name: globals()[name] for name in names},
    __spec__ and __spec__.name,
    type(__loader__).__name__,
    __main__.names == names,
    sorted(k for k in globals() if k not in ("json", "sys", "__main__", "__annotations__")),
]))
'''

# Started by the ways there are; each says what it is and that DGL works in it.
CHILDREN = """
import multiprocessing, subprocess, sys
import dgl, torch

def work(rank, how="mp.spawn"):
    import dgl.nn
    assert dgl.nn.GraphConv(2, 2)(dgl.graph(([0, 1], [1, 0])), torch.ones(2, 2)).shape == (2, 2)
    sys.stdout.write(how + "\\n")
    sys.stdout.flush()

class Graphs(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return dgl.graph(([0, 1], [1, 0]))

if __name__ == "__main__":
    torch.multiprocessing.spawn(work)
    for method in ("fork", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=work, args=(0, method))
        child.start()
        child.join()
        assert child.exitcode == 0
    loader = torch.utils.data.DataLoader(
        Graphs(), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    assert [g.num_edges() for g in loader] == [2, 2]
    subprocess.run([sys.executable, "-c", "import dgl; print('subprocess', dgl.__version__)"])
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python in a folder of its own, with the checkout as the only search path."""

    def start(*args: object, **variables: object) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("DGL", "_DGL"))}
        environment |= {"PYTHONPATH": search_path(), "HOME": str(tmp_path)}
        environment |= {k: str(v) for k, v in variables.items()}
        return subprocess.run(
            [sys.executable, *map(str, args)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=200,
        )

    return start


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(code: str, name: str = "folder/script.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return path

    return write


def test_a_script_sees_what_it_sees_without_the_runner(run, script, tmp_path):
    script(PROBE)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(tmp_path / "folder" / "script.py")
    for path in ("folder/script.py", "elsewhere/link.py"):
        plain = run(path, "-x", "--flag=1", "-m")
        mended = run("-m", "dgl_mgpu", path, "-x", "--flag=1", "-m")
        assert plain.stdout and (mended.stdout, mended.stderr) == (plain.stdout, "")


def test_a_module_sees_what_it_sees_without_the_runner(run, script):
    script("", "package/__init__.py")
    script(PROBE, "package/module.py")
    script(PROBE, "package/__main__.py")
    for name in ("package.module", "package"):
        plain = run("-m", name, "-a", "b")
        mended = run("-m", "dgl_mgpu", "-m", name, "-a", "b")
        assert plain.stdout and (mended.stdout, mended.stderr) == (plain.stdout, "")


def test_folders_and_zip_files_run_too(run, script, tmp_path):
    script(PROBE, "app/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "app" / "__main__.py", "__main__.py")
    for flag, path in (("-s", "app"), ("-s", "app.zip"), ("-P", "app")):
        plain, mended = run(flag, path, "a"), run(flag, "-m", "dgl_mgpu", path, "a")
        assert plain.stdout and (mended.stdout, mended.stderr) == (plain.stdout, "")


def test_safe_path_is_respected(run, script):
    script(PROBE)
    plain, mended = run("-P", "folder/script.py"), run("-P", "-m", "dgl_mgpu", "folder/script.py")
    assert plain.stdout and mended.stdout == plain.stdout


@pytest.mark.parametrize(
    "statement",
    ["raise SystemExit(7)", "raise SystemExit('message')", "pass", "import os; os._exit(3)",
     "import signal; signal.raise_signal(signal.SIGINT)"],
)  # fmt: skip
def test_exit_codes_pass_through(run, script, statement):
    path = script(statement)
    assert run("-m", "dgl_mgpu", path).returncode == run(path).returncode


def test_a_traceback_ends_with_the_scripts_own_lines(run, script):
    path = script("def fails():\n    1 / 0\n\nfails()\n")
    plain, mended = run(path), run("-m", "dgl_mgpu", path)
    assert mended.returncode == plain.returncode == 1
    own = plain.stderr.removeprefix("Traceback (most recent call last):\n")
    assert own and mended.stderr.endswith(own)


def test_functions_left_to_atexit_and_threads_still_find_the_script(run, script):
    path = script(
        "import atexit, pickle, threading, time\n"
        "class Thing: pass\n"
        "def late(): time.sleep(0.2); print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)\n"
        "atexit.register(late)\n"
        "threading.Thread(target=late).start()\n"
    )
    assert run("-m", "dgl_mgpu", path).stdout == "True\nTrue\n"


@pytest.mark.parametrize("args", [["missing.py"], ["-m", "no_such_module"], ["-m", "no.such"]])
def test_what_is_missing_is_said_as_python_says_it(run, args):
    plain, mended = run(*args), run("-m", "dgl_mgpu", *args)
    assert mended.returncode == plain.returncode != 0
    assert mended.stderr == plain.stderr


@pytest.mark.parametrize("args", [[], ["-m"], ["-x", "script.py"], ["--unknown"]])
def test_a_wrong_command_line_shows_the_usage(run, args):
    done = run("-m", "dgl_mgpu", *args)
    assert done.returncode == 2 and done.stderr.startswith("usage: python -m dgl_mgpu")


def test_help_shows_the_usage(run):
    done = run("-m", "dgl_mgpu", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m dgl_mgpu")


def test_dgl_works_in_the_script_and_in_all_processes_it_starts(run, script):
    path = script(CHILDREN)
    done = run("-W", "error::FutureWarning", "-m", "dgl_mgpu", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == sorted(
        ["", "mp.spawn", "fork", "forkserver", "subprocess 2.1.0"]
    )


def test_a_module_that_spawns_is_found_again_by_its_children(run, script):
    script("", "package/__init__.py")
    script(CHILDREN.partition("    for method")[0], "package/spawns.py")
    done = run("-m", "dgl_mgpu", "-m", "package.spawns")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mp.spawn"]


def test_ranks_of_torchrun(run, script):
    path = script(
        "import os, sys, dgl\nsys.stdout.write(os.environ['RANK'] + ' of ' + sys.argv[1] + '\\n')\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    done = run("-m", "dgl_mgpu", *torchrun, path, "two", OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 of two", "1 of two"]


def test_a_script_that_imports_dgl_mgpu_itself_spawns_without_the_runner(run, script):
    path = script("import dgl_mgpu" + CHILDREN.partition("    for method")[0])
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mp.spawn"]


CHILD_SEARCH_PATH = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", "import sys; print('mine' in sys.modules,"
    " 'dgl_mgpu' in sys.modules, any('BeforeDGL' in repr(f) for f in sys.meta_path))"],
    env={**os.environ, **dict(a.split("=", 1) for a in sys.argv[1:])})
"""


def test_children_run_the_environments_own_sitecustomize(run, script, tmp_path):
    script("import mine\n", "own/sitecustomize.py")
    script("", "own/mine.py")
    path = script(CHILD_SEARCH_PATH)
    search = search_path(tmp_path / "own")
    done = run("-m", "dgl_mgpu", path, PYTHONPATH=search)
    assert (done.stdout, done.stderr) == ("True False True\n", "")  # and import nothing early


def test_children_of_another_python_are_left_alone(run, script):
    path = script(CHILD_SEARCH_PATH)
    done = run("-m", "dgl_mgpu", path, "_DGL_MGPU_RUNNER_PREFIX=/elsewhere")
    assert (done.stdout, done.stderr) == ("False False False\n", "")
