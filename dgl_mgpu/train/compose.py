"""The configuration of a run: ``configs/``, changed by the command line."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgl_mgpu.errors import ConfigError, nearest
from dgl_mgpu.utils.resources import resource_folder
from dgl_mgpu.utils.torchrun import under_torchrun

if TYPE_CHECKING:
    from dgl_mgpu.config.schema import DataConfig

#: Any key is valid below these.
_OPEN = ("data.options.", "store.feature_dtypes.")
#: Keys that are lists.
_LISTS = ("sampler.fanouts", "sampler.eval_fanouts")
#: The name, in Hydra's own store, of the configuration of a run that is resumed.
_RESUMED = "resumed_run"


def hydra_arguments(arguments: list[str]) -> list[str]:
    """The checked command line of a run, as Hydra takes it.

    A resumed run keeps its configuration, except for what the command line changes.
    Raises ConfigError for what is no key, group or flag; CheckpointError if the configuration of
    the resumed run cannot be read.
    """
    options = [word for word in arguments if word.startswith("--")]
    for key in sorted(_packaged_keys(())) if options else ():
        for option in options:  # others may be Hydra's
            if option[2:].partition("=")[0].replace("-", "_") in (key, key.rpartition(".")[2]):
                raise ConfigError(
                    f"train with {option}", "it is a key, not an option", f"write {key}=VALUE"
                )
    flags, overrides = _split(check_overrides(arguments))
    if (saved := _resumed_configuration(overrides)) is not None:
        flags, overrides = _override_saved(saved, flags, overrides)
    # Under torchrun only the first rank has a folder and a log.
    folder = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
    if not under_torchrun() or os.environ["RANK"] == "0":
        guard = "dgl_mgpu.train.checkpoint.run_folder.FolderGuard"
        folder = [f"++hydra.callbacks.run_folder._target_={guard}"]
    # Overrides have to stand in one place, before flags or after them.
    return [*overrides, *folder, *flags]


def compose(overrides: list[str]) -> Any:
    """The :class:`~dgl_mgpu.config.schema.Config` of a command line; flags are left out."""
    from dgl_mgpu.config.schema import to_config

    words = [word for word in check_overrides(overrides) if not word.startswith("-")]
    return to_config(_compose(words))


def compose_data(overrides: list[str]) -> DataConfig:
    """The data set of a command line, whatever takes it."""
    from dgl_mgpu.config.schema import to_data_config

    return to_data_config(_compose(check_overrides(overrides)))


def check_overrides(arguments: list[str]) -> list[str]:
    """Check that every ``key=value`` names a key or group that is there; return all arguments.

    Options of a data set are those of its loader, not listed in ``configs/``: they come back in the
    form in which Hydra takes keys whether they are new or not.  Raises ConfigError with the nearest
    name.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    flags, words = _split(arguments)
    groups = _groups(flags)
    overrides = []
    for word in words:
        try:
            overrides.append(OverridesParser.create().parse_override(word))
        except HydraException as error:
            raise ConfigError(
                f"read '{word}'", "it is not a key=value", "write key=value"
            ) from error
    _check_lists(overrides)
    # Where several values of a group are to be tried, Hydra checks them.
    chosen = [o for o in overrides if o.key_or_group in groups and not o.is_sweep_override()]
    for override in chosen:
        if override.value() not in groups[override.key_or_group]:
            raise ConfigError(
                f"set {override.key_or_group}={override.value()}",
                f"there is no {override.key_or_group} of this name",
                nearest(str(override.value()), groups[override.key_or_group]),
            )
    words_chosen = tuple(str(o.input_line) for o in chosen)
    if own_folder := _own_folder(flags):  # its files may change
        keys = _keys(OmegaConf.to_container(_compose(words_chosen, own_folder)))
    else:
        keys = _packaged_keys(words_chosen)
    known = groups.keys() | keys
    renamed: dict[str | None, str] = {}
    for override in overrides:
        key = override.key_or_group
        if f"{key}.".startswith(_OPEN) and not override.is_delete():
            # ++ sets keys whether they exist or not; the last one wins.
            renamed[override.input_line] = f"++{str(override.input_line).lstrip('+')}"
        elif key not in known and not key.startswith(("hydra.", "hydra/", *_OPEN)):
            raise ConfigError(f"set {key}", "there is no such key", _nearest_key(key, known))
    return [renamed.get(word, word) for word in arguments]


def _nearest_key(key: str, known: Collection[str]) -> str:
    """Advice for a key that is unknown: those of its name in other groups, or its own group's.

    Names are compared without their group, which would make all of a group's keys alike.
    """
    group, _, name = key.rpartition(".")
    if namesakes := [each for each in known if each.endswith(f".{name}")]:
        return nearest(name, namesakes)
    own = [each.removeprefix(f"{group}.") for each in known if each.startswith(f"{group}.")]
    return nearest(name, own, f"{group}.") if own else nearest(key, known)


def _check_lists(overrides: list[Any]) -> None:
    """Raise for a list without brackets, which Hydra takes for several values to try."""
    from hydra.core.override_parser.types import ChoiceSweep

    for override in overrides:
        value = override.value()
        if override.key_or_group not in _LISTS or not isinstance(value, ChoiceSweep):
            continue
        if not any(isinstance(choice, list) for choice in value.list):
            key, _, values = override.input_line.partition("=")
            raise ConfigError(
                f"set {override.input_line}",
                f"{key} is a list, and commas without brackets separate values to try one by one",
                f"write {key}=[{values}] (in quotes, where a shell takes brackets)",
            )


def _resumed_configuration(overrides: list[str]) -> dict[str, Any] | None:
    """The configuration of the run that is to be resumed, as its checkpoint has it.

    None if there is no checkpoint here: of a job's machines the first may be the only one that has
    it, and raises if it has none either.
    """
    resume = _by_key(overrides).get("trainer.resume")
    if resume is None or not (resume.is_sweep_override() or resume.value()):
        return None
    if resume.is_sweep_override():
        raise ConfigError(
            f"resume {resume.input_line}",
            "it names several runs at once",
            "resume each by a command of its own",
        )
    from dgl_mgpu.train.checkpoint.checkpoint import has_checkpoint, saved_config

    path = Path(str(resume.value()))
    return saved_config(path) if has_checkpoint(path) else None


def _override_saved(
    saved: dict[str, Any], flags: list[str], overrides: list[str]
) -> tuple[list[str], list[str]]:
    """Flags and overrides with which Hydra changes a saved configuration.

    The configuration is taken over whole, since the files that it was made of may be others by now.
    A group that is chosen anew, store=mine, comes in place of the run's.  Options of Hydra's, which
    may name code to call, come from this command line and the files that it names alone.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    groups = _groups(flags)
    chosen = {key: o for key, o in _by_key(overrides).items() if key in groups}
    unchanged = {key: value for key, value in saved.items() if key not in chosen}
    base = {"defaults": [_hydra_flags(flags).config_name or "config", "_self_"]}
    ConfigStore.instance().store(_RESUMED, base)
    words = [str(o.input_line) for o in chosen.values() if not o.is_sweep_override()]
    below = _keys(OmegaConf.to_container(_compose(words, _own_folder(flags), base=_RESUMED)))
    ConfigStore.instance().store(_RESUMED, {**base, **unchanged})
    # Open keys would be merged with those of the files, which the run did not have.
    dropped = [
        f"~{key}"
        for key in sorted(below - _keys(saved))
        if key.startswith(_OPEN) and key.count(".") == 2 and key.partition(".")[0] in unchanged
    ]
    return _split(check_overrides([*flags, f"--config-name={_RESUMED}", *dropped, *overrides]))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Flags of Hydra's with their values, and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, word in itertools.pairwise(["", *arguments]):
        is_value = before.startswith("-") and "=" not in before + word  # --cfg job
        (flags if word.startswith("-") or is_value else overrides).append(word)
    return flags, overrides


def _by_key(overrides: list[str]) -> dict[str, Any]:
    """The last override of each key or group."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return {o.key_or_group: o for o in OverridesParser.create().parse_overrides(overrides)}


def _hydra_flags(flags: list[str]) -> Any:
    from hydra.main import get_args_parser

    return get_args_parser().parse_known_args(flags)[0]


def _groups(flags: list[str]) -> dict[str, list[str]]:
    """The options of each group, also those of ``--config-dir``."""
    groups: dict[str, set[str]] = {}
    for folder in (resource_folder("configs"), *_own_folder(flags)):
        for path in folder.glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in groups.items()}


def _own_folder(flags: list[str]) -> list[Path]:
    """The folder that ``--config-dir`` names, if any."""
    folder = _hydra_flags(flags).config_dir
    return [] if folder is None else [Path(folder).absolute()]


def _keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return {prefix.rstrip(".")}
    keys = {prefix.rstrip(".")} if prefix else set()
    return keys.union(*(_keys(value, f"{prefix}{name}.") for name, value in node.items()))


@functools.cache
def _packaged_keys(overrides: tuple[str, ...]) -> set[str]:
    """The keys that the package's own files have, with these choices of groups."""
    from omegaconf import OmegaConf

    return _keys(OmegaConf.to_container(_compose(overrides)))


def _compose(
    overrides: Sequence[str], own_folder: Sequence[Path] = (), base: str = "config"
) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with (
        typed_hydra_errors(f"compose the configuration with {overrides}"),
        initialize_config_dir(str(resource_folder("configs")), version_base="1.3"),
    ):
        path = [f"hydra.searchpath=['file://{folder}']" for folder in own_folder]
        return hydra_compose(base, [*overrides, *path])


@contextlib.contextmanager
def typed_hydra_errors(action: str) -> Iterator[None]:
    """Raise what Hydra finds wrong with a configuration as ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            action,
            str(error).partition("\n")[0].rstrip("."),
            "see configs/ for what there is; several values of a key need --multirun",
        ) from error
