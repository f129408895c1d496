"""``python -m dgl_mgpu``: what a script sees is what it sees when Python runs it directly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dgl_mgpu.dgl.runner_options import VARIABLE, RunnerOptions, hand_on, take_options, told
from dgl_mgpu.errors import ConfigError
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


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        ([], "no script"),
        (["-m"], "nothing follows '-m'"),
        (["--captur=off", "script.py"], "unknown option '--captur=off'; did you mean '--capture'?"),
        (["--stroe.sms=1", "x.py"], "unknown option '--stroe.sms=1'; did you mean '--store'?"),
        (
            ["-x", "script.py"],
            "unknown option '-x'; choose from --capture, --config, --partition, --store",
        ),
        (["--store.sms=1"], "no script"),
        (["--config"], "nothing follows '--config'"),
    ],
)
def test_a_wrong_command_line_shows_the_usage_and_says_what_is_wrong(run, args, wrong):
    done = run("-m", "dgl_mgpu", *args)
    assert done.returncode == 2 and done.stderr.startswith("usage: python -m dgl_mgpu")
    assert done.stderr.endswith(f"\npython -m dgl_mgpu: {wrong}\n")


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


# -- options of the runner -------------------------------------------------------------------------


def test_options_are_read_up_to_the_script(tmp_path):
    path = tmp_path / "store.yaml"
    path.write_text("store:\n  gpu-memory: 8GiB\n  policy: auto\n  disk_path: null\n")
    words = ["--store.gpu-memory=16GiB", "--config", str(path), "--store.fanouts=[15,10]"]
    rest = ["script.py", "--store.policy=mine", "--config", "own.yaml"]
    options, left = take_options([*words, *rest])
    assert left == rest
    assert options == RunnerOptions(
        {"gpu_memory": "16GiB", "policy": "auto", "disk_path": None, "fanouts": [15, 10]}
    )
    assert take_options(rest) == (None, rest)
    assert take_options([]) == (None, [])
    of_features = [f"--store.feature_dtypes.{of}=float16" for of in ("a", "b")]
    options, _ = take_options(of_features)
    assert options == RunnerOptions({"feature_dtypes": {"a": "float16", "b": "float16"}})


@pytest.mark.parametrize("before", ["null", "float16", "{feat: float16, other: bfloat16}"])
def test_what_is_said_of_a_feature_has_the_last_word_of_it_alone(tmp_path, before):
    last = "--store.feature_dtypes.feat=float8_e5m2"
    config = tmp_path / "store.yaml"
    config.write_text(f"store: {{feature-dtypes: {before}}}")
    for first in ([f"--store.feature-dtypes={before}"], ["--config", str(config)]):
        options, _ = take_options([*first, last])
        assert options is not None and options.store is not None
        others = {"other": "bfloat16"} if "other" in before else {}
        assert options.store["feature_dtypes"] == {"feat": "float8_e5m2"} | others


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--store.gpu_memory=1073741824", {"gpu_memory": 2**30}),
        ("--store.sms=8", {"sms": 8}),
        ("--store.sms=auto", {"sms": "auto"}),
        ("--store.graph-ratio=0.25", {"graph_ratio": 0.25}),
        ("--store.links=[[0,1],[1,2]]", {"links": [[0, 1], [1, 2]]}),
        ("--store.links=dgx1-6g", {"links": "dgx1-6g"}),
        ("--store.hotness=presample", {"hotness": "presample"}),
        ("--store.device=cpu", {"device": "cpu"}),
        ('--store.disk-path="/a, b"', {"disk_path": "/a, b"}),
        ("--store.batch-size=8000", {"batch_size": 8000}),
        ("--store.feature_dtypes={feat: float16}", {"feature_dtypes": {"feat": "float16"}}),
        ("--store.feature-dtypes.in-feat=bfloat16", {"feature_dtypes": {"in-feat": "bfloat16"}}),
        ("--store=on", {}),
    ],
)
def test_values_are_read_as_those_of_the_configuration(word, expected):
    assert take_options([word]) == (RunnerOptions(expected), [])


def test_paths_are_those_of_the_folder_it_was_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accesses.npz").write_bytes(b"")
    options, _ = take_options(["--store.disk-path=rest", "--store.hotness=accesses.npz"])
    assert options.store == {
        "disk_path": str(tmp_path / "rest"),
        "hotness": str(tmp_path / "accesses.npz"),
    }


def test_the_store_can_be_switched_off_and_on(tmp_path):
    (tmp_path / "off.yaml").write_text("store: off\n")
    config = f"--config={tmp_path / 'off.yaml'}"
    assert not take_options(["--store=off"])[0].uses_store
    assert not take_options([config])[0].uses_store
    assert take_options([config, "--store=on"])[0].uses_store


def test_captures_can_be_switched_on_and_off(monkeypatch):
    assert RunnerOptions().captures
    rest = ["script.py", "--capture=mine"]
    for word, expected in (("on", True), ("true", True), ("off", False), ("FALSE", False)):
        options, left = take_options([f"--capture={word}", *rest])
        assert (options, left) == (RunnerOptions(captures=expected), rest)
    assert take_options(["--capture=on", "--capture=off"])[0] == RunnerOptions(captures=False)
    for words in (["--store.sms=4", "--capture=off"], ["--capture=off", "--store.sms=4"]):
        options, _ = take_options(words)
        assert options == RunnerOptions({"sms": 4}, captures=False)
    monkeypatch.setenv(VARIABLE, "")  # so that it is taken back
    hand_on(options)
    assert not told().captures
    for word in ("maybe", "1", "[]", ""):
        wrong = f"cannot set --capture={word}: it is neither on nor off; say on or off"
        with pytest.raises(ConfigError, match=f"^{re.escape(wrong)}$"):
            take_options([f"--capture={word}", "script.py"])
    with pytest.raises(ConfigError, match="say on or off"):
        take_options(["--capture", "script.py"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--store.gpu-memry=1GiB", "did you mean 'gpu_memory'"),
        ("--store.gpu-memory=much", "not a size"),
        ("--store.host-memory=true", "not a size"),
        ("--store.gpu-memory=16", "like 16GiB"),
        ("--store.staging-memory=auto", "not a size"),
        ("--store.policy=autp", "did you mean 'auto'"),
        ("--store.policy=1", "choose from"),
        ("--store.device=gpu", "device='gpu'"),
        ("--store.sms=-1", "multiprocessors"),
        ("--store.graph-ratio=2", "a share in"),
        ("--store.feature-ratio=true", "a share in"),
        ("--store.links=dgx9", "topology 'dgx9'"),
        ("--store.links=[[0,1,2]]", "pairs of ranks"),
        ("--store.links=3", "pairs of ranks"),
        ("--store.hotness=nowhere.npz", "no such file"),
        ("--store.hotness=1", "degree"),
        ("--store.feature_dtypes=float16", "write them like {feat: float16}"),
        ("--store.feature_dtypes.feat=float12", "did you mean 'float16'"),
        ("--store.policy.name=auto", "write --store.policy=VALUE"),
        ("--store.disk-path=1", "name a folder"),
        ("--store.batch-size=many", "whole number"),
        ("--store.batch-size=0", "no mini-batch"),
        ("--store.fanouts=[]", "no mini-batch"),
        ("--store.fanouts=[1,x]", "no mini-batch"),
        ("--store.fanouts=[1", "its value cannot be read"),
        ("--store.sms=1,2", "several values"),
        ("--store.sms", "no value"),
        ("--store", "no value"),
        ("--store=maybe", "say on or off"),
        ("--store=3", "say on or off"),
        ("--store=[]", "say on or off"),
        ("--config=missing.yaml", "missing.yaml"),
    ],
)
def test_values_that_no_store_takes(word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        take_options([word, "script.py"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  ranks: 2\n", "it has a group 'trainer'"),
        ("store:\n  gpu_memry: 1\n", "did you mean 'gpu_memory'"),
        ("store: [1]\n", "say on or off"),
        ("- 1\n", "no keys"),
        ("", "say on or off"),
        ("store: {\n", "name a YAML file"),
        ("store: ${nothing}\n", "name a YAML file"),
    ],
)
def test_files_that_are_no_options(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    if not text:  # an empty file says nothing
        assert take_options([f"--config={path}"])[0] == RunnerOptions({})
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        take_options([f"--config={path}"])


def test_options_reach_who_asks(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert told() == RunnerOptions(captures=False)
    monkeypatch.setenv(VARIABLE, "")
    options = RunnerOptions({"fanouts": [1, 2], "disk_path": None, "graph_ratio": 0.5})
    hand_on(options)
    assert told() == options
    for wrong in ("[]", "{", '{"stor": {}}', "3"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=VARIABLE):
            told()


def test_wrong_options_end_it_before_the_script_begins(run, script):
    path = script("print('begun')")
    done = run("-m", "dgl_mgpu", "--store.gpu-memory=16G", "--store.polcy=auto", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m dgl_mgpu: ConfigError: cannot set --store.polcy: there is no such key; "
        "did you mean 'policy'?\n"
    )


TELL = """
import json, multiprocessing, subprocess, sys

def tell(how):
    from dgl_mgpu.dgl.runner_options import told
    print(how, sys.argv[1:], told().captures, json.dumps(told().store), flush=True)

if __name__ == "__main__":
    tell("script")
    child = multiprocessing.get_context("spawn").Process(target=tell, args=("spawn",))
    child.start()
    child.join()
    if len(sys.argv) < 3:
        subprocess.run([sys.executable, "-m", "dgl_mgpu", __file__, "again", "end"])
"""


def test_options_reach_the_script_and_all_that_it_starts(run, script):
    path = script(TELL)
    done = run("-m", "dgl_mgpu", "--store.gpu-memory=2GiB", "--store.sms=4", path, "--store.sms=1")
    assert done.returncode == 0, done.stderr
    store = json.dumps({"gpu_memory": "2GiB", "sms": 4})
    assert done.stdout.splitlines() == [
        f"{how} {arguments} True {store}"
        for arguments in (["--store.sms=1"], ["again", "end"])
        for how in ("script", "spawn")
    ]


@pytest.mark.parametrize(
    ("words", "captures"),
    [(["-m", "dgl_mgpu"], True), (["-m", "dgl_mgpu", "--capture=off"], False)],
)
def test_models_are_captured_unless_the_runner_is_told_otherwise(run, script, words, captures):
    done = run(*words, script(TELL))
    assert done.stdout.splitlines() == [
        f"{how} {arguments} {captures} null"
        for arguments in ([], ["again", "end"])
        for how in ("script", "spawn")
    ]


# Like DGL's examples for several GPUs, on CPUs.
TRAIN = """
import sys
import dgl, torch
import torch.distributed as dist
from dgl.dataloading import DataLoader, NeighborSampler

def run(rank, g, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", world_size=2, rank=rank)
    loader = DataLoader(
        g, torch.arange(400), NeighborSampler([4, 4], prefetch_node_feats=["feat"]),
        device="cpu", use_ddp=True, use_uva=True, batch_size=50, shuffle=True,
    )
    model = torch.nn.parallel.DistributedDataParallel(dgl.nn.SAGEConv(8, 3, "mean"))
    seen = 0
    for inputs, outputs, blocks in loader:
        x = blocks[0].srcdata["feat"]
        assert torch.equal(x, g.ndata["feat"][inputs])
        y = model(blocks[1], x[: blocks[1].num_src_nodes()])
        torch.nn.functional.cross_entropy(y, blocks[1].dstdata["label"]).backward()
        seen += len(outputs)
    seen = torch.tensor(seen)
    dist.all_reduce(seen)
    if rank == 0:
        plan = loader.graph._stored.store.plan
        print(type(loader.graph).__name__, int(seen), plan.num_gpus, sorted(
            {tier.memory for table in plan.tables.values() for tier in table.tiers}))
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.manual_seed(0)
    g = dgl.rand_graph(500, 5000)
    g.ndata["feat"] = torch.rand(500, 8)
    g.ndata["label"] = torch.arange(500) % 3
    g.create_formats_()
    torch.multiprocessing.spawn(run, args=(g, sys.argv[1]), nprocs=2)
"""


def test_a_script_for_several_gpus_has_its_graph_in_a_store(run, script, tmp_path):
    path = script(TRAIN)
    done = run(
        "-m", "dgl_mgpu", "--store.gpu-memory=16KiB", path, tmp_path,
        OMP_NUM_THREADS=1, CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "SharedGraph 400 2 ['gpu', 'host']\n"
