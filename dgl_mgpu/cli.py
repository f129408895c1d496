"""The command ``dgl-mgpu``: train, plan, topology, doctor."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dgl_mgpu.errors import ConfigError, DGLMGPUError, OutputError, nearest
from dgl_mgpu.resources import resource_folder
from dgl_mgpu.torchrun import under_torchrun

USAGE = """\
dgl-mgpu COMMAND [key=value ...]

  train      train a model:      dgl-mgpu train data=cora model=gcn trainer.ranks=2
             on the whole graph at once:     dgl-mgpu train mode=fullgraph data=cora model=gcn
  plan       where the store would put every tier, and the modelled time, also for a machine
             that is not there:  dgl-mgpu plan data=generated-twitter topology=dgx1
             Several values of a key compare plans (store.policy=auto,host); --plot draws what each
             GPU holds and how busy its links are, into placement.png or --plot=FILE (.svg, .pdf)
  topology   what this machine is (topology measure: with timed copies between its GPUs), or
             one known by name:   dgl-mgpu topology dgx1
  doctor     what works here, and how to mend what does not (doctor --coverage: which of DGL's
             C functions run on GPUs)

Keys and their values: the files in configs/ ({configs}), or
dgl-mgpu train --cfg job. To run an unmodified DGL script: python -m dgl_mgpu script.py
"""

#: The name, in Hydra's own store, of the configuration of a run that goes on.
_GOES_ON = "run_that_goes_on"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "plan": _plan,
        "topology": _topology,
        "doctor": _doctor,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(configs=resource_folder("configs")))
        return 0 if arguments else 2
    name, *rest = arguments
    if name in commands and {"-h", "--help"} & {*rest}:
        print(USAGE.format(configs=resource_folder("configs")))
        return 0
    try:
        if name not in commands:
            raise ConfigError(f"run command '{name}'", "no such command", nearest(name, commands))
        return commands[name](rest)
    except DGLMGPUError as error:
        print(f"dgl-mgpu {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dgl-mgpu {name}: interrupted", file=sys.stderr)
        return 130


def _train(arguments: list[str]) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    _check_flags(arguments)
    flags, overrides = _parted(check_overrides(arguments))
    if (before := _configuration_before(overrides)) is not None:
        flags, overrides = _going_on(before, flags, overrides)
    _check_folder(flags, overrides)
    failure: list[Exception | KeyboardInterrupt] = []

    @hydra.main(
        config_path=str(resource_folder("configs")), config_name="config", version_base="1.3"
    )
    def job(raw: Any) -> None:
        try:
            config = to_config(raw)
            if config.mode == "fullgraph":
                from dgl_mgpu.fullgraph.run import train
            else:
                from dgl_mgpu.minibatch.run import train
            train(config, Path(HydraConfig.get().runtime.output_dir))
        except (Exception, KeyboardInterrupt) as error:
            # Hydra would print a traceback; ours say what is wrong in one line.
            failure.append(error)

    # Hydra takes overrides in one place only, before its flags or after them.
    sys.argv = ["dgl-mgpu train", *overrides, *_without_folder(), *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else it prints errors of its own, and exits
    try:
        with _errors_of_hydra("train as the command line says"):
            job()
    except OSError as error:
        raise OutputError(
            "make the run's folder", str(error), "choose another folder (hydra.run.dir)"
        ) from error
    if failure:
        raise failure[0]
    return 0


@contextlib.contextmanager
def _errors_of_hydra(asked: str) -> Iterator[None]:
    """Raise what Hydra finds wrong with a configuration as ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            asked,
            str(error).splitlines()[0].rstrip("."),
            "see configs/ for what there is; several values of a key need --multirun",
        ) from error


def _check_flags(arguments: list[str]) -> None:
    """Raise for a key that is written like an option; others may be Hydra's."""
    from omegaconf import OmegaConf

    flags = [word for word in arguments if word.startswith("--")]
    for key in sorted(_keys(OmegaConf.to_container(_compose([])))) if flags else ():
        for flag in flags:
            if flag[2:].partition("=")[0].replace("-", "_") in (key, key.rpartition(".")[2]):
                raise ConfigError(
                    f"train with {flag}", "no option, but a key", f"write {key}=VALUE"
                )


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Flags of Hydra's with their values, and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, word in itertools.pairwise(["", *arguments]):
        is_value = before.startswith("-") and "=" not in before + word  # --cfg job
        (flags if word.startswith("-") or is_value else overrides).append(word)
    return flags, overrides


def _check_folder(flags: list[str], overrides: list[str]) -> None:
    """Raise for a new run in another one's folder, whose options Hydra would overwrite.

    A flag may make it something else than one run, and a run that resumes may go on in its own.
    """
    said = _by_key(overrides)
    if "hydra.run.dir" not in said or "trainer.resume" in said or flags or _without_folder():
        return
    from dgl_mgpu.report.metrics import require_no_run

    require_no_run(_compose(overrides, with_hydras=True).hydra.run.dir)


def _without_folder() -> list[str]:
    """What keeps Hydra from making a folder and a log for each rank of torchrun but the first.

    They read a command line each; the run's folder is the first one's.
    """
    if not under_torchrun() or os.environ["RANK"] == "0":
        return []
    return ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]


def _configuration_before(overrides: list[str]) -> Path | None:
    """The folder in which Hydra has kept the configuration of the run that is to be resumed."""
    resume = _by_key(overrides).get("trainer.resume")
    if resume is None:
        return None
    if resume.is_sweep_override():
        raise ConfigError(
            f"resume {resume.input_line}",
            "several runs at once",
            "resume each by a command of its own",
        )
    from dgl_mgpu.training.checkpoint import run_folder

    kept = run_folder(str(resume.value())) / ".hydra"
    return kept if (kept / "config.yaml").is_file() else None


def _going_on(before: Path, flags: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """Flags and overrides of a run that goes on: with its configuration, but for what is said anew.

    The configuration is kept whole, since the files that it was made of may be others by now.  A
    group that is chosen anew, model=gat, comes in place of the run's.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    said, groups = _by_key(overrides), _groups(flags)
    whole: Any = OmegaConf.to_container(OmegaConf.load(before / "config.yaml"))
    keys = _keys(whole)
    for group in said.keys() & groups.keys():
        whole.pop(group, None)
    base = _of_hydra(flags).config_name or "config"
    ConfigStore.instance().store(_GOES_ON, {"defaults": [base, "_self_"], **whole})
    # What was said then is said again, for the groups that are chosen now are below it.
    words = [str(word) for word in OmegaConf.load(before / "overrides.yaml")]
    again = [
        each.input_line
        for key, each in _by_key(words).items()
        if key not in {*said, "trainer.resume"}
        and (each.value() in groups[key] if key in groups else key in keys)
    ]
    return _parted(check_overrides([*flags, f"--config-name={_GOES_ON}", *again, *overrides]))


def _by_key(overrides: list[str]) -> dict[str, Any]:
    """The last override of each key or group."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(overrides)
    return {each.key_or_group: each for each in parsed}


def _of_hydra(flags: list[str]) -> Any:
    """Hydra's flags and their values."""
    from hydra.main import get_args_parser

    return get_args_parser().parse_known_args(flags)[0]


def _groups(flags: list[str]) -> dict[str, list[str]]:
    """What there is to choose from: the options of each group, also those of ``--config-dir``."""
    found: dict[str, set[str]] = {}
    for folder in (resource_folder("configs"), *_own_folder(flags)):
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in found.items()}


def _own_folder(flags: list[str]) -> list[Path]:
    """What ``--config-dir`` names, if it does."""
    folder = _of_hydra(flags).config_dir
    return [] if folder is None else [Path(folder).absolute()]


def _plan(arguments: list[str]) -> int:
    from rich.console import Console

    from dgl_mgpu.minibatch.planned import plan_for
    from dgl_mgpu.report import plan_table

    picture = picture_file(arguments)
    console = Console()
    plans, titles = [], []
    for overrides in choices(check_overrides([w for w in arguments if not w.startswith("-")])):
        config = compose(overrides)
        plan = plan_for(config)
        plans.append(plan)
        titles.append(f"{config.data.name} on {plan.topology}, policy {plan.policy}")
        console.print(plan_table(plan.summary(), titles[-1]))
        each = ", ".join(f"{seconds * 1e3:.3g}" for seconds in plan.seconds)
        console.print(
            f"modelled for the reads of a mini-batch of {config.trainer.batch_size} seeds with "
            f"fanouts {config.sampler.planned_fanouts()}: {plan.step_seconds * 1e3:.3g} ms on the "
            f"slowest GPU (each: {each} ms)",
            highlight=False,
        )
    if picture is not None:
        from dgl_mgpu.report.placement_plot import plot_placements

        try:
            plot_placements(plans, picture, titles)
        except OSError as error:
            raise OutputError(
                f"draw the placement into {picture}", str(error), "name a file that can be written"
            ) from error
        console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return 0


def picture_file(arguments: list[str]) -> Path | None:
    """Where ``--plot`` puts its picture; None without it."""
    file = None
    for word, after in itertools.pairwise([*arguments, ""]):
        if not word.startswith("-"):
            continue
        name, _, value = word.partition("=")
        if name != "--plot" or word == "--plot=":
            raise ConfigError(
                f"plan with {word}", "no such option", "say --plot, or --plot=FILE with a name"
            )
        if word == "--plot" and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(f"plan with --plot {after}", "no key=value", f"say --plot={after}")
        file = Path(value or "placement.png")
    if file is not None:
        from dgl_mgpu.report.placement_plot import picture_format

        picture_format(file)  # raises, before a plan takes its time
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

    from dgl_mgpu.report.machine import machine_tables
    from dgl_mgpu.topology import measure, preset, preset_names, probe

    if len(arguments) > 1:
        raise ConfigError("show a topology", f"{arguments}", "name one machine, or 'measure'")
    name = arguments[0] if arguments else "auto"
    ways = {"auto": probe, "measure": measure}
    topology = ways[name]() if name in ways else preset(name)
    console = Console()
    for renderable in machine_tables(topology, preset_names()):
        console.print(renderable, highlight=False)
    return 0


def _doctor(arguments: list[str]) -> int:
    if arguments == ["--coverage"]:
        from dgl_mgpu.backend.capi.coverage import coverage_report

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


def compose(overrides: list[str]) -> Any:
    """The :class:`~dgl_mgpu.training.config.Config` of a command line; flags are left out.

    Raises
    ------
    ConfigError
    """
    words = [word for word in check_overrides(overrides) if not word.startswith("-")]
    return to_config(_compose(words))


def to_config(raw: Any) -> Any:
    """Merge a composed configuration into its schema and check its values.

    Raises
    ------
    ConfigError
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from dgl_mgpu.training.config import Config

    config: Any
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), raw))
    except OmegaConfBaseException as error:
        message, fix = str(error).splitlines()[0], "give it a value of its type"
        if "is not a ListConfig" in message:
            message, fix = "a single value", "give it a list, like [10,10]"
        raise ConfigError(
            f"set {error.full_key}" if error.full_key else "read the configuration", message, fix
        ) from error
    config.check()
    return config


def check_overrides(arguments: list[str]) -> list[str]:
    """Check that every ``key=value`` names a key or group that is there; return all arguments.

    Options of a data set are those of its loader, not listed in ``configs/``: they come back
    in the form in which Hydra takes keys whether they are new or not.

    Raises
    ------
    ConfigError
        With the nearest name.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    flags, words = _parted(arguments)
    groups = _groups(flags)
    overrides = []
    for word in words:
        try:
            overrides.append(OverridesParser.create().parse_override(word))
        except HydraException as error:
            raise ConfigError(f"read '{word}'", "no key=value", "write key=value") from error
    chosen = [each for each in overrides if each.key_or_group in groups]
    for override in chosen:
        options = groups[override.key_or_group]
        if not override.is_sweep_override() and override.value() not in options:
            raise ConfigError(
                f"set {override.key_or_group}={override.value()}",
                f"no such {override.key_or_group}",
                nearest(str(override.value()), options),
            )
    known = _keys(
        OmegaConf.to_container(
            _compose(
                [str(o.input_line) for o in chosen if not o.is_sweep_override()],
                _own_folder(flags),
            )
        )
    )
    renamed: dict[str | None, str] = {}
    for override in overrides:
        key = override.key_or_group
        if key.startswith("data.options.") and not override.is_delete():
            # However often, and whether the data set's file has it or not: the last one wins.
            renamed[override.input_line] = f"++{str(override.input_line).lstrip('+')}"
        elif key not in groups.keys() | known and not key.startswith(
            ("hydra.", "hydra/", "data.options.")
        ):
            raise ConfigError(f"set {key}", "no such key", nearest(key, groups.keys() | known))
    return [renamed.get(word, word) for word in arguments]


def _keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return {prefix.rstrip(".")}
    keys = {prefix.rstrip(".")} if prefix else set()
    return keys.union(*(_keys(value, f"{prefix}{name}.") for name, value in node.items()))


def _compose(
    overrides: list[str], own_folder: Sequence[Path] = (), *, with_hydras: bool = False
) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with (
        _errors_of_hydra(f"compose the configuration with {overrides}"),
        initialize_config_dir(str(resource_folder("configs")), version_base="1.3"),
    ):
        path = [f"hydra.searchpath=['file://{folder}']" for folder in own_folder]
        return hydra_compose("config", [*overrides, *path], return_hydra_config=with_hydras)


if __name__ == "__main__":
    sys.exit(main())
