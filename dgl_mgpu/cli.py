"""The command ``dgl-mgpu``: train, predict, plan, partition, topology, doctor, install-dgl."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dgl_mgpu.errors import ConfigError, DGLMGPUError, LimitError, OutputError, nearest
from dgl_mgpu.train.compose import (
    check_overrides,
    compose,
    compose_data,
    hydra_arguments,
    typed_hydra_errors,
)
from dgl_mgpu.utils.atomic_write import typed_output
from dgl_mgpu.utils.interrupts import STATUS, Interrupts, Stopped
from dgl_mgpu.utils.resources import resource_folder
from dgl_mgpu.utils.standard_output import drop, is_of_stdout, lasting_stdout, open_standard_files
from dgl_mgpu.utils.torchrun import may_restart, under_torchrun

USAGE = """\
dgl-mgpu COMMAND [key=value ...]

  train      train a model:      dgl-mgpu train data=cora model=gcn trainer.ranks=2
             on the whole graph at once:     dgl-mgpu train mode=fullgraph data=cora model=gcn
  predict    classes (or labels) and logits of all nodes, or embeddings, by a run's best model:
             dgl-mgpu predict outputs/DAY/RUN out=predictions.npz (device=cuda: on a GPU; ranks=4)
  plan       where the store would put every tier, and the modelled time, also for a machine
             that is not there:  dgl-mgpu plan data=generated-twitter topology=dgx1
             or for several:     dgl-mgpu plan data=generated-twitter topology=8x-hgx-h200
             Several values of a key compare plans (store.policy=auto,host); --plot draws what each
             GPU holds and how busy its links are, into placement.png or --plot=FILE (.svg, .pdf)
  partition  cut a data set into parts, one for each of several machines, without holding it in
             memory:  dgl-mgpu partition data=ogbn-products parts=2 out=parts
  topology   what this machine is (topology measure: with timed copies between its GPUs), or
             one or several known by name:   dgl-mgpu topology 8x-hgx-h200
  doctor     what works here, and how to fix what fails (doctor --coverage: which of DGL's
             C functions run on GPUs)
  install-dgl    DGL for a Python that PyPI has no wheel of it for, from PyPI or a file

dgl-mgpu COMMAND --help: all that a command takes. dgl-mgpu --version: this package's version.
Keys and their values: the files in configs/ ({configs}), or
dgl-mgpu train --cfg job. To run an unmodified DGL script: python -m dgl_mgpu script.py
"""

_PICTURE_FIX = "name a file that can be written"

#: What each command takes, and three examples.
HELP = {
    "train": """\
dgl-mgpu train [key=value ...] [options of Hydra's]

  Train a model on a data set: checkpoints, metrics and a report go to outputs/DAY/RUN.
  A list is one word: sampler.fanouts=[10,10] (in quotes, where a shell takes brackets).

examples:
  dgl-mgpu train data=cora model=gcn
  dgl-mgpu train data=ogbn-products trainer.ranks=4 store.gpu_memory=16GiB
  dgl-mgpu train trainer.resume=outputs/DAY/RUN trainer.epochs=20

options of Hydra's: --cfg job (show the configuration, run nothing), --multirun (a run for each of
several values: model=gcn,gat), --config-dir FOLDER and --config-name NAME (configurations of
your own)
""",
    "predict": """\
dgl-mgpu predict RUN out=FILE.npz [device=cpu|cuda] [ranks=N]

  Write what a run's best model says of all nodes: classes (or labels) and logits, or embeddings.

  RUN             folder of a run, or one of its checkpoints
  out=FILE.npz    where to write; a file of that name is replaced
  device=cpu      or cuda: where to compute
  ranks=1         processes that share the work

examples:
  dgl-mgpu predict outputs/DAY/RUN out=predictions.npz
  dgl-mgpu predict outputs/DAY/RUN out=predictions.npz device=cuda
  dgl-mgpu predict outputs/DAY/RUN out=predictions.npz ranks=4
""",
    "plan": """\
dgl-mgpu plan [key=value ...] [--plot | --plot=FILE]

  Show where a store would keep each row, and how long its reads would take, on this machine or
  one that is not there. Nothing is downloaded or generated for it: of data that are not here
  the published sizes count. Several values of a key compare plans.

  topology=dgx1   a machine by name; 8x-hgx-h200: eight of them, as store.span says; gb200-nvl72:
                  a rack whose GPUs are all linked
  --plot          draw the placement into placement.png, or into FILE (.png, .svg, .pdf)

examples:
  dgl-mgpu plan data=generated-twitter topology=dgx1 store.gpu_memory=14GiB
  dgl-mgpu plan data=ogbn-products topology=quad-v100 store.policy=auto,host --plot
  dgl-mgpu plan data=ogbn-mag model=rgcn topology=8x-hgx-h200 store.span=machine,job
""",
    "partition": """\
dgl-mgpu partition [data=NAME] parts=N out=FOLDER [by=WAY] [memory=1GiB] [seed=0]

  Cut a data set into parts in DGL's format, one for each of several machines, which share them as
  one store (GlobalStore.from_partition). It is read and written a piece at a time.

  data=generated  the data set, and data.root, data.options.KEY, as for dgl-mgpu train
  parts=N         how many parts
  out=FOLDER      where they go; NAME.json there names them. Parts of the same data set that are
                  there are replaced, and those of another are refused
  by=random       which part a node is in; order: as they come; metis: few edges between parts,
                  for which all edges are in memory; FILE.npy: the part of each node
  memory=1GiB     what it may take
  seed=0          for by=random

examples:
  dgl-mgpu partition data=ogbn-products parts=2 out=parts
  dgl-mgpu partition data=generated-twitter parts=4 out=parts by=order memory=4GiB
  dgl-mgpu partition data=ogbn-mag parts=2 out=parts seed=1
""",
    "topology": """\
dgl-mgpu topology [NAME | measure]

  Show this machine's GPUs and the bandwidth between them, or those of a machine known by name.

  NAME            several of one machine, as 8x-hgx-h200, or one:
                  {machines}
  measure         this machine, with timed copies between its GPUs

examples:
  dgl-mgpu topology
  dgl-mgpu topology measure
  dgl-mgpu topology dgx1
""",
    "doctor": """\
dgl-mgpu doctor [--coverage]

  Say what works in this environment, and how to fix what fails.

  --coverage      which of DGL's C functions run on GPUs, in place of that

examples:
  dgl-mgpu doctor
  dgl-mgpu doctor --coverage
  dgl-mgpu doctor > report.txt
""",
    "install-dgl": """\
dgl-mgpu install-dgl [FILE]

  Install DGL 2.1.0 by pip, where PyPI has no wheel of it for this Python or system: what these
  can use of the nearest wheel, whose SHA-256 is checked. A supported DGL that is there stays.

  FILE            a wheel of DGL 2.1.0 that is here, in place of one that pip fetches

examples:
  dgl-mgpu install-dgl
  dgl-mgpu install-dgl dgl-2.1.0-cp312-cp312-manylinux1_x86_64.whl
  dgl-mgpu install-dgl dgl-2.1.0-cp312-cp312-manylinux2014_aarch64.whl
""",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    open_standard_files()
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "predict": _predict,
        "plan": _plan,
        "partition": _partition,
        "topology": _topology,
        "doctor": _doctor,
        "install-dgl": _install_dgl,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(configs=resource_folder("configs")))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from dgl_mgpu.version import __version__

        print(f"dgl-mgpu {__version__}")
        return 0
    name, *rest = arguments
    if name in commands and {"-h", "--help"} & {*rest}:
        print(help_of(name))
        return 0
    with contextlib.ExitStack() as ending:
        try:
            interrupts = ending.enter_context(Interrupts(partial(_final_message, name)))
        except RuntimeError as error:  # of a thread that cannot be started
            from dgl_mgpu.train.launch.typed_errors import processes_limit

            problem = f"{error}; {processes_limit()}"
            limit = LimitError(f"run the command '{name}'", problem, "raise it (ulimit -u)")
            print(f"dgl-mgpu {name}: {type(limit).__name__}: {limit}", file=sys.stderr)
            return 1
        try:
            if name not in commands:
                raise ConfigError(
                    f"run the command '{name}'",
                    "there is none of this name",
                    nearest(name, commands),
                )
            with lasting_stdout() if name == "train" else contextlib.nullcontext():
                status = commands[name](rest)
                sys.stdout.flush()
            return status
        except KeyboardInterrupt:
            pass
        except Stopped as stopped:
            if name != "train":  # which has reported it
                print(f"dgl-mgpu {name}: stopped by {stopped.by}", file=sys.stderr)
            raise
        except Exception as error:
            # What interrupts an import, or a callback of a library, may come out as another error.
            if not interrupts.heard:
                if not isinstance(error, DGLMGPUError):
                    if not is_of_stdout(error):
                        raise
                    drop(sys.stdout)
                    error = OutputError("write to stdout", str(error), "free space there")
                print(f"dgl-mgpu {name}: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
        # Python would end this process by SIGINT, at its end, if the interrupt came within code of
        # a string, which an import of dataclasses runs; unless more of such code is run.
        exec("")
        print(_final_message(name, signal.SIGINT), file=sys.stderr)
        return STATUS


# Advice on the run in progress, for the last line.
_run_advice: Callable[[], str] | None = None


def _final_message(command: str, signum: int) -> str:
    how = "interrupted" if signum == signal.SIGINT else f"ended by {signal.Signals(signum).name}"
    return f"dgl-mgpu {command}: {how}{_run_advice() if _run_advice else ''}"


def help_of(command: str) -> str:
    """What a command takes: its keys with their defaults and choices, and examples."""
    shown = HELP[command]
    if command == "topology":
        from dgl_mgpu.machine import preset_names

        names = textwrap.fill(
            ", ".join(preset_names()), 80, subsequent_indent=" " * 18, break_on_hyphens=False
        )
        shown = shown.format(machines=names)
    if command not in ("train", "plan"):
        return shown.rstrip()
    from dgl_mgpu.config.keys import files_by_group, run_keys

    lines = [shown, "files to choose, which set several keys:"]
    for group, paths in files_by_group().items():
        if len(paths) > 1:
            lines += _entry(f"{group}=", ", ".join(path.stem for path in paths))
    lines.append("\nkeys, with their defaults:")
    for key in run_keys():
        lines += _entry(f"{key.name}={key.value}", key.comment)
    return "\n".join(lines)


def _entry(name: str, text: str) -> list[str]:
    """A name and its description, beside or below it, for a terminal of 80 columns."""
    lines = textwrap.wrap(text, 50, break_on_hyphens=False)
    first = f"  {name:26}{lines[0]}" if lines and len(name) < 26 else f"  {name}"
    below = lines[1:] if len(name) < 26 else lines
    return [first, *(f"{'':28}{line}" for line in below)]


def _after_restart() -> list[str]:
    """Arguments by which a run goes on, if torchrun has started its first rank again."""
    if not may_restart():
        return []
    from dgl_mgpu.train.launch.torchrun_store import folder_before

    folder = folder_before()
    if folder is None:
        return []
    quoted = str(folder).replace("'", r"\'")
    return [f"trainer.resume='{quoted}'", f"hydra.run.dir='{quoted}'"]


def _train(arguments: list[str]) -> int:
    global _run_advice
    _run_advice = None
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from dgl_mgpu.train.checkpoint.run_folder import (
        is_as_hydra_made_it,
        locked_folders,
        remove_unused,
    )

    words = hydra_arguments([*arguments, *_after_restart()])
    failures: list[Exception] = []

    @hydra.main(
        config_path=str(resource_folder("configs")), config_name="config", version_base="1.3"
    )
    def job(raw: Any) -> None:
        global _run_advice
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        log = folder / f"{hydra_config.job.name}.log"
        # The folder may be the user's, with other things in it, which stay whatever happens: a log
        # that is not empty yet is of another run.
        is_new = is_as_hydra_made_it(folder, log) and not (log.exists() and log.stat().st_size)
        try:
            from dgl_mgpu.config.schema import to_config

            config = to_config(raw)
            from dgl_mgpu.train.checkpoint.checkpoint import LastCheckpoint
            from dgl_mgpu.train.run import train

            # Only the first rank's folder is the run's.
            if not (under_torchrun() and int(os.environ["RANK"])):
                _run_advice = LastCheckpoint(folder, config.trainer.resume).advice
            train(config, folder)
        except BaseException as error:
            if isinstance(error, Stopped) and _run_advice:
                # Also into the run's log: a terminal may be gone.
                logging.getLogger(__name__).warning("stopped by %s%s", error.by, _run_advice())
            if is_new:
                remove_unused(folder, log)
            if not isinstance(error, Exception):
                raise
            # Hydra would print a traceback; typed errors need one line.
            failures.append(error)

    sys.argv = ["dgl-mgpu train", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else it prints errors of its own, and exits
    with (
        typed_output("make the run's folder", "choose another folder (hydra.run.dir)"),
        locked_folders(),
        typed_hydra_errors("train as the command line says"),
    ):
        job()
    for failure in failures[:-1]:  # of several runs
        print(f"dgl-mgpu train: {type(failure).__name__}: {failure}", file=sys.stderr)
    if failures:
        raise failures[-1]
    return 0


def _predict(arguments: list[str]) -> int:
    folder, out, device, ranks, hang_after = parse_predict(arguments)
    from dgl_mgpu.train.launch.launch import launch
    from dgl_mgpu.train.run import require_room
    from dgl_mgpu.utils.torchrun import under_torchrun

    if not under_torchrun():
        require_room(ranks, "predict")
    launch(_predict_on_rank, ranks, folder, out, device, hang_after=hang_after)
    return 0


def _predict_on_rank(folder: str, out: Path, device: str) -> None:
    from dgl_mgpu.comm.communicator import Communicator
    from dgl_mgpu.train.launch.typed_errors import typed_memory
    from dgl_mgpu.train.trained_run import write_predictions

    with typed_memory(f"predict by {folder}", "use more ranks, or device=cpu"):
        written = write_predictions(folder, out, device)
    if Communicator.of_all_machines().rank == 0:
        print(f"{written}: {out}", flush=True)


def parse_predict(arguments: list[str]) -> tuple[str, Path, str, int, float | None]:
    """Of which run predictions are asked for, where to write them, where to compute them, on how
    many ranks, and after how many seconds without an advance to end.
    """
    from dgl_mgpu.config.schema import TrainerConfig

    # A run's folder may have a «=» in its name, as lr=0.1.
    folders = [word for word in arguments if "=" not in word or Path(word).exists()]
    options = dict(word.split("=", 1) for word in arguments if word not in folders)
    unknown = sorted(options.keys() - {"out", "device", "ranks", "hang_after"})
    if len(folders) != 1 or unknown or not options.get("out"):
        raise ConfigError(
            f"predict from {' '.join(arguments)}" if arguments else "predict",
            f"there is no option {unknown[0]}"
            if unknown
            else "it takes one run's folder, and one file to write",
            "try dgl-mgpu predict RUN out=FILE.npz (device=cuda: on a GPU; ranks=4: on four ranks)",
        )
    ranks = options.get("ranks", "1")
    if not (ranks.isdecimal() and int(ranks)):
        raise ConfigError(
            f"predict with ranks={ranks}", "it is not a whole number", "use 1 or more"
        )
    limit = options.get("hang_after", str(TrainerConfig.hang_after))
    hang_after = None if limit == "null" else _seconds(limit)
    return folders[0], Path(options["out"]), options.get("device", "cpu"), int(ranks), hang_after


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= float(text) < math.inf:
            return float(text)
    raise ConfigError(
        f"predict with hang_after={text}", "it is not a number of seconds", "use 1 or more, or null"
    )


def _plan(arguments: list[str]) -> int:
    from rich.console import Console

    from dgl_mgpu.report.placement import placement_tables
    from dgl_mgpu.train.minibatch.planned import plan_for
    from dgl_mgpu.train.run import check_start

    picture = picture_file(arguments)
    console = Console()
    plans, titles = [], []
    words = [word for word in arguments if not word.startswith("-")]
    configs = [compose(overrides) for overrides in choices(check_overrides(words))]
    for config in configs:
        check_start(config)
    for config in configs:
        with _shown_on_terminal(f"planning {config.data.name}, policy {config.store.policy} …"):
            plan, origin, num_machines, span = plan_for(config)
        plans.append(plan)
        machines = f"{num_machines} x " if num_machines > 1 else ""
        titles.append(f"{config.data.name} on {machines}{plan.topology}, policy {plan.policy}")
        fanouts = config.sampler.planned_fanouts()
        for part in placement_tables(plan, titles[-1], config.planned_seeds(), fanouts):
            console.print(part, highlight=False)
        if span:
            console.print(span, highlight=False)
        console.print(f"data: {origin}", highlight=False)
    if picture is not None:
        from dgl_mgpu.report.placement_plot import plot_placements

        with typed_output(f"draw the placement into {picture}", _PICTURE_FIX):
            plot_placements(plans, picture, titles)
        console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return 0


def _shown_on_terminal(task: str) -> contextlib.AbstractContextManager[Any]:
    """Say on a terminal what takes long, as long as it does."""
    from rich.console import Console

    return Console(stderr=True).status(task)


def _partition(arguments: list[str]) -> int:
    import numpy as np

    from dgl_mgpu.data import HETEROGENEOUS, load, load_hetero
    from dgl_mgpu.store.part_writer import write_partition

    words, options = parse_partition(arguments)
    data = compose_data(words)
    by: Any = options["by"]
    if by.endswith(".npy"):
        try:
            by = np.load(by, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"partition by {by}", str(error), "name a .npy file with the part of each node"
            ) from error
    loader = load_hetero if data.name in HETEROGENEOUS else load
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # downloads take long
    dataset = loader(data.name, data.root, **data.options)
    with _shown_on_terminal(f"writing parts of {data.name} …"):
        path = write_partition(
            dataset,
            options["out"],
            int(options["parts"]),
            by=by,
            seed=int(options["seed"]),
            memory=options["memory"],
        )
    print(f"{options['parts']} parts: {path}")
    return 0


def parse_partition(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words that name the data, and the options of a partition with their values."""
    options = {"out": "", "parts": "", "by": "random", "memory": "1GiB", "seed": "0"}
    words = []
    for word in arguments:
        key, is_pair, value = word.partition("=")
        if is_pair and key in options:
            options[key] = value
        elif is_pair and key.partition(".")[0] == "data":
            words.append(word)
        else:
            raise ConfigError(
                f"partition with {word}",
                "there is no such option",
                nearest(key, ["data", *options]),
            )
    for key in "out", "parts":
        if not options[key]:
            raise ConfigError("partition a data set", f"there is no {key}=", f"add {key}=…")
    for key, least in ("parts", 1), ("seed", 0):
        if not (options[key].isdecimal() and int(options[key]) >= least):
            raise ConfigError(
                f"partition with {key}={options[key]}",
                f"it is not a whole number from {least} on",
                f"use {least}, {least + 1}, …",
            )
    return words, options


def picture_file(arguments: list[str]) -> Path | None:
    """Where ``--plot`` puts its picture; None without it."""
    file = None
    for word, after in itertools.pairwise([*arguments, ""]):
        if not word.startswith("-"):
            continue
        name, _, value = word.partition("=")
        if name != "--plot" or word == "--plot=":
            raise ConfigError(
                f"plan with {word}",
                "there is no such option",
                "try --plot, or --plot=FILE with a name",
            )
        if word == "--plot" and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(
                f"plan with --plot {after}",
                f"{after} is a word of its own, and not a key=value",
                f"write --plot={after}",
            )
        file = Path(value or "placement.png")
    if file is not None:
        from dgl_mgpu.report.placement_plot import picture_format

        picture_format(file)  # raises, before a plan takes its time
        problem = ""
        if not file.parent.is_dir():
            problem = f"there is no folder {file.parent}"
        elif file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            problem = "it cannot be written"
        if problem:
            raise OutputError(f"draw the placement into {file}", problem, _PICTURE_FIX)
    return file


def choices(overrides: list[str]) -> list[list[str]]:
    """Every choice of one value for each key that several were given for: ``key=one,other``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = []
    for word in overrides:
        override = OverridesParser.create().parse_override(word)
        if override.is_sweep_override():
            values.append([
                f"{override.get_key_element()}={value}"
                for value in override.sweep_string_iterator()
            ])  # fmt: skip
        else:
            values.append([word])
    return [list(chosen) for chosen in itertools.product(*values)]


def _topology(arguments: list[str]) -> int:
    from rich.console import Console

    from dgl_mgpu.machine import Cluster, cluster, measure, preset_names, probe
    from dgl_mgpu.report.tables import machine_tables

    if len(arguments) > 1:
        raise ConfigError(
            f"show the topology {' '.join(arguments)}",
            "it takes one name",
            "name one machine, or say measure",
        )
    name = arguments[0] if arguments else "auto"
    ways = {"auto": probe, "measure": measure}
    machines = Cluster(ways[name]()) if name in ways else cluster(name)
    console = Console()
    for renderable in machine_tables(machines, preset_names()):
        console.print(renderable, highlight=False)
    return 0


def _doctor(arguments: list[str]) -> int:
    if arguments == ["--coverage"]:
        from dgl_mgpu.dgl.capi.table import coverage_report

        print(coverage_report())
        return 0
    if arguments:
        raise ConfigError(
            f"run doctor with {' '.join(arguments)}",
            "it takes nothing, or --coverage",
            "say dgl-mgpu doctor, or dgl-mgpu doctor --coverage",
        )
    from dgl_mgpu.doctor import main as doctor

    return doctor()


def _install_dgl(arguments: list[str]) -> int:
    from dgl_mgpu.dgl.wheel import install_dgl

    print(install_dgl(wheel_file(arguments)))
    return 0


def wheel_file(arguments: list[str]) -> Path | None:
    """The wheel of DGL that is named; None where pip is to fetch one."""
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        raise ConfigError(
            f"run install-dgl with {' '.join(arguments)}",
            "it takes nothing, or one file",
            "say dgl-mgpu install-dgl, or dgl-mgpu install-dgl FILE.whl",
        )
    return Path(arguments[0]) if arguments else None


if __name__ == "__main__":
    sys.exit(main())
