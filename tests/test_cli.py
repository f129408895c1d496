from __future__ import annotations

import contextlib
import json
import re
import signal
import tomllib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dgl_mgpu
from dgl_mgpu.cli import help_of, main, parse_partition
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.report import EpochReport, MetricsLog, StageSeconds
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.run import check_start
from dgl_mgpu.utils.interrupts import Stopped
from dgl_mgpu.utils.resources import resource_folder
from tests.docs.commands import check_command
from tests.docs.pages import ROOT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["predict"], "try dgl-mgpu predict RUN out=FILE.npz"),
        (["predict", "run"], "it takes one run's folder"),
        (["predict", "run", "out=there.npz", "to=here"], "there is no option to"),
        (["train", "data=coraa"], "did you mean 'cora'"),
        (["train", "model=grahpsage"], "graphsage"),
        (["train", "trainer.epcohs=3"], "did you mean 'trainer.epochs'"),
        (["train", "moddel=gcn"], "did you mean 'model'"),
        (["train", "epochs=3"], "did you mean 'trainer.epochs'"),
        (["train", "trainer.device=cpu"], "did you mean 'store.device'"),
        (["train", "model.layers=3"], "choose from model.aggregator, model.dropout"),
        (["train", "trainer.epochs=many"], "trainer.epochs"),
        (["train", "trainer.epochs=0"], "use 1 or more"),
        (["train", "trainer.ranks=0"], "use 1 or more"),
        (["train", "model.dropout=1.5"], "model.dropout=1.5"),
        (["train", "model=sage"], "did you mean 'graphsage' or 'pinsage'"),
        (["train", "sampler.eval_fanouts=[5]"], "eval_fanouts=null"),
        (["train", "sampler.fanouts=[]"], "or are 0"),
        (["train", "sampler.fanouts=[5,-2]"], "below -1"),
        (["train", "sampler.fanouts=[0,0]"], "a fanout is 0"),
        (["train", "model.aggregator=foo"], "lstm"),
        (["train", "model=gin", "model.aggregator=lstm"], "sum"),
        (["train", "model.name=gatt"], "gat"),
        (["train", "model=pinsage", "sampler=neighbor"], "belong together"),
        (["train", "trainer.lr=-1"], "trainer.lr=-1"),
        (["train", "trainer.lr=nan"], "trainer.lr=nan"),
        (["train", "trainer.lr=1e38"], "below 1000000"),
        (["train", "trainer.weight_decay=1e38"], "below 1000000"),
        (["train", "trainer.seed=-1"], "trainer.seed=-1"),
        (["train", "trainer.seed=99999999999999999"], "below"),
        (["train", "store.host_memory=1KiB", "store.gpu_memory=1KiB"], "store.disk_path"),
        (["train", "mode=fulgraph"], "fullgraph"),
        (["train", "mode=fullgraph", "fullgraph.by=hash"], "metis"),
        (["train", "mode=fullgraph", "fullgraph.exchange=hallo"], "halo"),
        (["train", "mode=fullgraph", "model=gat", "fullgraph.keep_every=2"], "choose model=gcn"),
        (["train", "mode=fullgraph", "fullgraph.activations=bfloat16"], "choose model=gcn"),
        (["train", "mode=fullgraph", "model=gcn", "fullgraph.keep_every=0"], "1 or more"),
        (["train", "mode=fullgraph", "model=gcn", "fullgraph.activations=int8"], "bfloat16"),
        (["train", "mode=fullgraph", "model=pinsage"], "random walks"),
        (["train", "mode=fullgraph", "trainer.count_accesses=true"], "mode=minibatch"),
        (["train", "trainer.loggers=[wand]"], "did you mean 'wandb'"),
        (["train", "mode=fullgraph", "store.feature_dtypes.feat=float16"], "without a store"),
        (["train", "store.device=cuda", "sampler.num_workers=2"], "use sampler.num_workers=0"),
        (["train", "trainer.precision=float8"], "bfloat16"),
        (
            ["train", "trainer.cuda_graphs=1"],
            "cannot use trainer.cuda_graphs=1: there is no such choice",
        ),
        (["train", "trainer.cuda_graphs=yes"], "choose auto, true or false"),
        (["train", "nonsense"], "key=value"),
        (["train", "--epochs", "3"], "write trainer.epochs=VALUE"),
        (["train", "--trainer.batch-size=3"], "write trainer.batch_size=VALUE"),
        (["train", "sampler.fanouts=10"], "like [10,10]"),
        (["train", "store.disk_path=/nope"], "no such folder"),
        (["train", "store.gpu_memory=lots"], "16GiB"),
        (["train", "store.gpu_memory=16"], "like 16GiB"),
        (["train", "store.gpu_memory=0.5"], "like 16GiB"),
        (["plan", "store.host_memory=16000"], "or 16000B"),
        (["train", "store.graph_ratio=2"], "ratio"),
        (["train", "store.feature_ratio=most"], "ratio"),
        (["train", "store.policy=cliqeu"], "clique"),
        (["train", "store.hotness=warm"], "presample"),
        (["train", "store.feature_dtypes.feat=float12"], "did you mean 'float16'"),
        (["train", "store.feature_dtypes=float16"], "store.feature_dtypes"),
        (["plan", "store.feature_dtypes.label=float16"], "its rows have dtype torch.int64"),
        (["train", "topology=dgx2"], "dgx"),
        (["train", "topology=dgx1-4gf", "trainer.ranks=5"], "5"),
        (["train", "data.options.num_nodse=5"], "num_nodes"),
        (["train", "--multirun", "trainer.resume=some,others"], "several runs at once"),
        (["train", "hydra.nothing=3"], "hydra.nothing"),
        (["train", "trainer.epochs=3,4"], "need --multirun"),
        (["train", "--config-name=nothing"], "nothing"),
        (["train", "--cfg=job", "--multirun"], "Only one of"),
        (["plan", "topology=dgx2"], "dgx"),
        (["plan", "--plott"], "--plot=FILE"),
        (["plan", "--plot="], "--plot=FILE"),
        (["plan", "--plot=plan.bmp"], ".png, .svg, .pdf"),
        (["plan", "--plot", "plan.png"], "--plot=plan.png"),
        (["plan", "plan.png"], "key=value"),
        (["plan", "mode=fullgraph"], "leave mode out"),
        (["plan", "data.options.scale=0.001", "--plot=/no/folder/plan.png"], "/no/folder"),
        (["plan", "sampler.fanouts=10,10"], "write sampler.fanouts=[10,10]"),
        (["train", "sampler.fanouts=10,10"], "write sampler.fanouts=[10,10]"),
        (["train", "sampler.eval_fanouts=5,5"], "write sampler.eval_fanouts=[5,5]"),
        (["topology", "dgx2"], "dgx"),
        (["topology", "nope"], "choose from cpu, dgx-a100"),
        (["partition", "parts=2"], "add out="),
        (["partition", "parts=two", "out=parts"], "not a whole number"),
        (["partition", "parts=0", "out=parts"], "use 1, 2, …"),
        (["partition", "parts=2", "out=parts", "seed=-1"], "use 0, 1, …"),
        (["partition", "parts=2", "out=parts", "part=3"], "did you mean 'parts'"),
        (["partition", "parts=2", "out=parts", "by=nothing.npy"], "nothing.npy"),
        (["install-dgl", "--force"], "it takes nothing, or one file"),
        (["install-dgl", "a.whl", "b.whl"], "it takes nothing, or one file"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys, tmp_path):
    options = [f"hydra.run.dir={tmp_path}", f"data.root={tmp_path}"]
    assert main([*arguments, *(options if arguments[0] == "train" else [])]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


COMMANDS = ("train", "predict", "plan", "partition", "topology", "doctor", "install-dgl")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_what_there_is(capsys, command):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    examples = re.findall(r"^  (dgl-mgpu .*)$", shown, re.MULTILINE)
    assert len(examples) == 3 and all(each.startswith(f"dgl-mgpu {command}") for each in examples)
    if command in ("train", "plan"):
        words = shown.split()
        for group in (path.name for path in resource_folder("configs").iterdir() if path.is_dir()):
            files = [path.stem for path in (resource_folder("configs") / group).iterdir()]
            assert len(files) == 1 or {f"{group}="} <= {*words}
            assert len(files) == 1 or all(re.search(rf"\b{each}\b", shown) for each in files)
        for key in leaves(asdict(compose([]))):
            assert f" {key}=" in shown
    elif command == "partition":
        assert all(f"{each}=" in shown for each in parse_partition(["out=a", "parts=1"])[1])
    elif command == "predict":
        assert all(each in shown for each in ("out=", "device=", "ranks="))


def leaves(node: dict, prefix: str = "") -> list[str]:
    """Keys as a command line has them."""
    return [
        key
        for name, value in node.items()
        for key in (
            leaves(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else [f"{prefix}{name}"]
        )
    ]


def test_the_examples_of_the_help_are_commands_that_there_are(tmp_path):
    for command in COMMANDS:
        for line in re.findall(r"^  (dgl-mgpu .*)$", help_of(command), re.MULTILINE):
            check_command(line.partition(" > ")[0], tmp_path)


def test_the_version_is_one(capsys):
    assert main(["--version"]) == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    file = ROOT / project["tool"]["hatch"]["version"]["path"]
    (version,) = re.findall(r'^__version__ = "(.*)"$', file.read_text(), re.MULTILINE)
    assert capsys.readouterr().out == f"dgl-mgpu {version}\n"
    assert dgl_mgpu.__version__ == version and "version" in project["project"]["dynamic"]


EARLY = [
    (["store.gpu_memory=16"], "16GiB"),
    (["store.host_memory=2"], "16GiB"),
    (["store.policy=foo"], "'foo'"),
    (["store.graph_ratio=2"], "graph_ratio"),
    (["store.hotness=warm"], "presample"),
    (["data.options.num_nodes=abc"], "data.options.num_nodes"),
    (["data.options.num_nodes=-5"], "data.options.num_nodes"),
    (["trainer.ranks=100000"], "100000 ranks"),
    (["mode=fullgraph", "trainer.ranks=100000"], "torchrun --nproc-per-node=100000"),
]


@pytest.mark.parametrize(("words", "message"), EARLY)
def test_mistakes_are_told_before_ranks_and_data(words, message, monkeypatch, capsys, tmp_path):
    def refuse(*args, **options):
        raise AssertionError("it has begun")

    for name in ("run.launch", "minibatch.planned.load", "minibatch.planned.outline"):
        monkeypatch.setattr(f"dgl_mgpu.train.{name}", refuse)
    folder = tmp_path / "run"
    assert main(["train", "trainer.ranks=2", *words, f"hydra.run.dir={folder}"]) == 1
    assert message in capsys.readouterr().err
    assert not folder.exists()
    if "mode=fullgraph" not in words:
        assert main(["plan", *words]) == 1
        assert message in capsys.readouterr().err


def test_every_plan_that_is_compared_is_checked_before_the_first_is_made(capsys):
    assert main(["plan", "store.policy=auto,foo", "topology=dgx1"]) == 1
    shown = capsys.readouterr()
    assert "'foo'" in shown.err and not shown.out
    assert shown.err.count("clique_opt") == 1  # what there is, once


@pytest.mark.parametrize("file", ["nodir/x.png", "x.png"])
def test_a_picture_that_cannot_be_written_is_told_before_planning(
    file, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.png").mkdir()
    assert main(["plan", f"--plot={file}"]) == 1
    shown = capsys.readouterr()
    assert "OutputError" in shown.err and not shown.out


def test_of_a_run_that_predicts_ranks_are_counted_too(capsys):
    assert main(["predict", "run", "out=x.npz", "ranks=100000"]) == 1
    told = capsys.readouterr().err
    assert "100000 ranks" in told and "dgl_mgpu.cli predict" in told


def test_ranks_that_were_stopped_are_told_of(monkeypatch, capsys, tmp_path):
    def stopped(*arguments, **options) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr("dgl_mgpu.train.launch.launch.launch", stopped)
    with pytest.raises(Stopped) as end:
        main(["predict", str(tmp_path), "out=file.npz", "ranks=2"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "dgl-mgpu predict: stopped by SIGINT\n"


def test_torchruns_ranks_are_its_own_to_count(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "100000")
    check_start(compose(["trainer.ranks=100000"]))


def test_a_changed_key_is_told_before_ranks_go_on(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "run"
    small = ["data.options.num_nodes=100", "data.options.num_edges=300", "trainer.epochs=1"]
    words = [*small, "store.device=cpu", f"data.root={tmp_path}"]
    assert main(["train", *words, f"hydra.run.dir={folder}"]) == 0
    capsys.readouterr()

    def refuse(*args, **options):
        raise AssertionError("it has begun")

    monkeypatch.setattr("dgl_mgpu.train.run.launch", refuse)
    for key, value in (("trainer.lr", "0.5"), ("model.hidden", "7")):
        assert main(["train", f"trainer.resume={folder}", f"{key}={value}"]) == 1
        assert f"resume with {key}={value}" in capsys.readouterr().err
    assert main(["train", f"trainer.resume={tmp_path / 'nothing'}"]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="it has begun"):
        main(["train", f"trainer.resume={folder}", "trainer.epochs=2"])


def test_compose_gives_the_schema():
    config = compose(["data=cora", "model=gcn", "trainer.lr=0.5"])
    assert (config.data.name, config.model.hidden, config.trainer.lr) == ("cora", 16, 0.5)
    assert config.sampler.fanouts == [-1, -1]
    assert compose(["model=pinsage"]).sampler.name == "random_walk"
    assert compose(["sampler.fanouts=[15,10,5]"]).sampler.evaluated_fanouts() == [-1, -1, -1]
    with pytest.raises(ConfigError):
        compose(["data=cora", "model.name=nothing", "trainer.seed=x"])


@pytest.mark.parametrize("first", ["", "+", "++"])
@pytest.mark.parametrize("last", ["", "+", "++"])
@pytest.mark.parametrize("data", ["generated", "generated-twitter"])
def test_of_an_option_said_twice_the_last_one_counts(first, last, data):
    words = [f"{first}data.options.scale=0.5", f"{last}data.options.scale=0.25"]
    assert compose([f"data={data}", *words]).data.options["scale"] == 0.25


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_keys_of_ones_own_can_be_said_together(sign):
    words = [
        sign + "store.feature_dtypes={feat: float16, x: bfloat16}",
        "store.feature_dtypes.x=float8_e5m2",
    ]
    assert compose(words).store.feature_dtypes == {"feat": "float16", "x": "float8_e5m2"}
    assert compose([sign + "data.options={num_nodes: 5}"]).data.options == {"num_nodes": 5}


@pytest.mark.parametrize("word", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_run_folder_that_cannot_be_made(word, tmp_path, capsys):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        flag = ["--multirun"] if word == "hydra.sweep.dir" else []
        assert main(["train", *flag, f"{word}={folder}"]) == 1
        error = capsys.readouterr().err
        assert "OutputError" in error and "(hydra.run.dir)" in error and str(folder) in error
        assert len(error.splitlines()) == 1


def test_what_a_run_raises_comes_out_as_it_is(tmp_path, monkeypatch):
    def fail(config, folder):
        raise ValueError("of the run")

    monkeypatch.setattr("dgl_mgpu.train.run.train", fail)
    with pytest.raises(ValueError, match=r"^of the run$"):
        main(["train", f"hydra.run.dir={tmp_path}"])


def test_every_model_goes_with_every_data_set():
    for data in ("cora", "ogbn-products", "facebook", "generated-twitter"):
        for model in ("graphsage", "gcn", "gat", "gin", "rgcn", "pinsage"):
            config = compose([f"data={data}", f"model={model}"])
            assert (config.data.name, config.model.name) == (data, model)


def test_plan_of_a_machine_that_is_not_there(capsys):
    arguments = ["data=generated-twitter", "data.options.scale=0.01", "store.gpu_memory=64MiB"]
    assert main(["plan", *arguments, "topology=dgx1"]) == 0
    shown = capsys.readouterr().out
    for word in ("topology", "node/feat", "GPU", "host", "dgx1", "on the slowest GPU", "modelled"):
        assert word in shown


def test_plans_side_by_side_and_their_picture(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["data=generated-twitter", "data.options.scale=0.001", "store.gpu_memory=4MiB"]
    assert main(["plan", *arguments, "topology=quad-v100", "store.policy=auto,host", "--plot"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("policy auto") < shown.index("policy host")
    assert shown.count("on the slowest GPU") == 2
    assert "placement.png" in shown
    with Image.open(tmp_path / "placement.png") as picture:
        assert picture.size == (3000, 1320)


def test_plans_of_several_machines_that_are_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["data=generated-twitter", "data.options.scale=0.001", "store.gpu_memory=4MiB"]
    spans = "store.span=machine,job"
    assert main(["plan", *arguments, "topology=8x-quad-v100", spans, "--plot"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("on 8 x quad-v100, policy auto") == 2
    assert shown.count("each of 8 machines has a copy of all") == 1
    assert shown.count("8 machines: each has") == shown.count("over the network: ") == 1
    with Image.open(tmp_path / "placement.png") as picture:
        assert picture.size == (3000, 1320)


def test_topologies_of_several_machines_and_of_racks(capsys):
    assert main(["topology", "4x-dgx-h100"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 x dgx-h100" in shown and "each GPU receives 50 GB/s from other machines" in shown
    assert main(["topology", "gb200-nvl72"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"72 GPUs from 0 on │ 3500 │ +71 x 792 │ +747 │ +370 │", shown)
    assert "other machines" not in shown


def test_walks_read_as_many_nodes_as_they_leave(capsys):
    arguments = ["model=pinsage", "sampler.num_neighbors=7", "data.options.scale=0.001"]
    assert main(["plan", *arguments, "data=generated-twitter", "topology=dgx1"]) == 0
    assert "fanouts [7, 7, 7]" in " ".join(capsys.readouterr().out.split())


def test_plan_that_does_not_fit_says_by_how_much(capsys):
    arguments = ["data=generated", "store.gpu_memory=1KiB", "store.host_memory=1KiB"]
    assert main(["plan", *arguments, "topology=dgx1"]) == 1
    assert "PlanDoesNotFitError" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command in shown
    assert main([]) == 2


def test_a_new_run_leaves_another_ones_folder_as_it_is(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr("dgl_mgpu.train.run.train", lambda *of_run: ran.append(of_run))
    folder = tmp_path / "graphsage"
    first = ["train", f"hydra.run.dir={tmp_path}/${{model.name}}", "trainer.ranks=2"]
    assert main(first) == 0
    seconds = StageSeconds(evaluate=0.0, total=1.0)
    with MetricsLog(folder) as log:
        log.append(EpochReport(1, 1, 1, 1.0, 1.0, None, None, seconds, (), 1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["train", f"hydra.run.dir={folder}", "trainer.lr=0.5"]) == 1
    assert (
        "with 1 epochs of another run; it ended before its first checkpoint"
        in capsys.readouterr().err
    )
    own = tmp_path / "conf"
    own.mkdir()
    (own / "mine.yaml").write_text("defaults: [config, _self_]\ntrainer: {lr: 0.25}\n")
    for more in (
        ["--config-dir", str(own)],
        ["--config-dir", str(own), "--config-name=mine"],
        ["trainer.resume=null"],
    ):
        assert main(["train", f"hydra.run.dir={folder}", *more]) == 1
        assert "it ended before its first checkpoint" in capsys.readouterr().err
    assert main(["train", f"hydra.run.dir={folder}", "--cfg=job"]) == 0
    assert main(["train", "hydra.run.dir=${oc.env:NO_SUCH_VARIABLE}/x"]) == 1
    assert "ConfigError: cannot name the run's folder" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(first) == 1  # the same by another name
    assert main(["train", f"hydra.run.dir={folder}", f"trainer.resume={folder}"]) == 0
    assert len(ran) == 2


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_new_runs_leave_the_folder_of_others_as_it_is(tmp_path, monkeypatch, capsys):
    seconds = StageSeconds(evaluate=0.0, total=1.0)

    def train(config, folder):
        with MetricsLog(folder) as log:
            log.append(EpochReport(1, 1, 1, 1.0, 1.0, None, None, seconds, (), 1))

    monkeypatch.setattr("dgl_mgpu.train.run.train", train)
    several = ["train", "--multirun", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main([*several, "trainer.lr=0.1,0.2"]) == 0
    before = files_of(tmp_path)
    assert len([path for path in before if path.name == "metrics.jsonl"]) == 2
    for overrides in (["trainer.lr=0.3,0.4"], ["trainer.lr=0.3,0.4", "model=gcn"]):
        assert main([*several, *overrides]) == 1
        assert (
            "with 1 epochs of another run; it ended before its first checkpoint"
            in capsys.readouterr().err
        )
    assert files_of(tmp_path) == before
    assert main([*several[:2], f"hydra.sweep.dir={tmp_path / 'other'}", "trainer.lr=0.3,0.4"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main([*several[:2], "hydra.sweep.dir=2024", "trainer.lr=0.3,0.4"]) == 0
    for wrong in ("null", "a,b", "[a]"):
        assert main([*several[:2], f"hydra.sweep.dir={wrong}", "trainer.lr=0.3,0.4"]) == 1
        assert f"hydra.sweep.dir={wrong}" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("sweep", [False, True])
def test_a_run_that_has_written_nothing_leaves_no_folder(tmp_path, monkeypatch, error, sweep):
    def fail(config, folder):
        if config.trainer.epochs == 3:
            (folder / "metrics.jsonl").touch()
        raise error("of the run")

    monkeypatch.setattr("dgl_mgpu.train.run.train", fail)
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ValueError):  # our own errors and Ctrl-C are told in a line
        main(["train", *(["--multirun", "hydra.sweep.dir=outputs/all"] if sweep else [])])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        "multirun.yaml"
    ] * sweep
    assert len(list(tmp_path.glob("outputs/*"))) == sweep
    (tmp_path / "outputs").mkdir(exist_ok=True)
    (tmp_path / "outputs" / "mine").touch()
    for where in ([], ["hydra.run.dir=."]):
        with contextlib.suppress(ValueError):
            main(["train", *where])
    assert (tmp_path / "outputs" / "mine").exists()
    with contextlib.suppress(ValueError):
        main(["train", "trainer.epochs=3", "hydra.run.dir=kept"])
    assert (tmp_path / "kept" / ".hydra" / "config.yaml").exists()


@pytest.mark.parametrize("mine", [".hydra/notes", "cli.log", "notes"])
def test_a_run_that_has_written_nothing_leaves_what_was_in_its_folder(tmp_path, monkeypatch, mine):
    def fail(config, folder):
        raise ValueError("of the run")

    monkeypatch.setattr("dgl_mgpu.train.run.train", fail)
    file = tmp_path / "run" / mine
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for _ in range(2):
        with pytest.raises(ValueError, match="of the run"):
            main(["train", f"hydra.run.dir={tmp_path / 'run'}"])
        assert file.read_text() == "mine"


@pytest.mark.parametrize("given", [[], ["hydra.run.dir=outputs/mine", "hydra/job_logging=none"]])
def test_of_torchruns_ranks_the_first_makes_a_folder(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    runs = []
    monkeypatch.setattr("dgl_mgpu.train.run.train", lambda *of_run: runs.append(of_run))
    arguments = ["train", "trainer.epochs=7", *given]
    monkeypatch.setenv("RANK", "1")
    assert main(arguments) == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    assert main(arguments) == 0
    (other, _), (first, folder) = runs
    assert other == first and first.trainer.epochs == 7
    assert (folder / ".hydra").is_dir() and folder.is_relative_to(tmp_path / "outputs")


def test_no_run_to_resume_is_none(tmp_path, monkeypatch):
    """Also where the current folder is a run's."""
    ran = []
    monkeypatch.setattr("dgl_mgpu.train.run.train", lambda *of_run: ran.append(of_run))
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"hydra.run.dir={tmp_path}", "trainer.lr=0.125"]) == 0
    assert main(["train", f"hydra.run.dir={tmp_path}/other", "trainer.resume=null"]) == 0
    assert [config.trainer.lr for config, _ in ran] == [0.125, 0.003]


def test_options_of_ones_own_groups_are_known(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "tiny.yaml").write_text("{name: gcn, hidden: 4}")
    assert main(["train", "--config-dir", "conf", "model=tinny"]) == 1
    assert "did you mean 'tiny'" in capsys.readouterr().err


def test_a_data_set_is_cut_into_parts(capsys, tmp_path):
    words = [f"data.root={tmp_path}", "data.options.num_nodes=500", "data.options.num_edges=4000"]
    parts = np.arange(500) % 2
    np.save(tmp_path / "by.npy", parts)
    out = tmp_path / "parts"
    assert main(["partition", *words, "parts=2", f"out={out}", f"by={tmp_path / 'by.npy'}"]) == 0
    (path,) = out.glob("*.json")
    assert str(path) in capsys.readouterr().out
    metadata = json.loads(path.read_text())
    assert metadata["num_parts"] == 2
    assert metadata["node_map"] == {"_N": [[0, 250], [250, 500]]}
