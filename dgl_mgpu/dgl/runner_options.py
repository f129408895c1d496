"""What ``python -m dgl_mgpu`` was told on its command line, for the script and what it starts.

The runner reads the options and checks them; `hand_on` puts them into the environment, which
processes inherit however they are started; `told` reads them where they matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgl_mgpu.errors import ConfigError

#: Carries the options to child processes.
VARIABLE = "_DGL_MGPU_RUNNER_OPTIONS"

#: What the runner itself understands.
OPTIONS = _STORE, _CONFIG, _CAPTURE, _PARTITION = "--store", "--config", "--capture", "--partition"
#: Has keys of one's own below it.
_BY_NAME = "feature_dtypes"
_SWITCH = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True)
class RunnerOptions:
    """Options of the runner.

    Attributes
    ----------
    store : dict, optional
        What was said of the store, by the names of
        :class:`~dgl_mgpu.store.planning.StoreOptions`; None if nothing was said, not even ``on``.
    uses_store : bool
        False for ``off``: every process pins its graphs, as DGL does.
    captures : bool
        Whether models run as CUDA graphs (:func:`dgl_mgpu.capture_models`).
    partition : str, optional
        How ranks share graphs that a script for one process moves to its device, by the names of
        :func:`dgl_mgpu.partition_graph`; None if each has the whole graph.
    """

    store: Mapping[str, Any] | None = None
    uses_store: bool = True
    captures: bool = True
    partition: str | None = None


def take_options(arguments: Sequence[str]) -> tuple[RunnerOptions | None, list[str]]:
    """Read the options at the head of a command line, and a file that they name.

    ``--store.KEY=VALUE``, ``--store=on``, ``--store=off`` and ``--config FILE``, which has the same
    keys in its group ``store``; the command line has the last word.  Values are written as those of
    ``dgl-mgpu train``.  ``--capture=on`` and ``--capture=off``.  ``--partition`` and
    ``--partition=BY``.

    Parameters
    ----------
    arguments : sequence of str
        As after ``python -m dgl_mgpu``.

    Returns
    -------
    options : RunnerOptions or None
        None if there are none: then those of a process that started this one hold.
    rest : list of str
        From the first word on that is no option of these.

    Raises
    ------
    ConfigError
        If a key is unknown, a value none that a store takes, or the file cannot be read.
    """
    rest = list(arguments)
    said: dict[str, Any] = {}
    written: dict[str, Any] = {}
    captures, partition = RunnerOptions.captures, RunnerOptions.partition
    while rest:
        if rest[0].partition("=")[0] == _CAPTURE:
            captures = _switched(_CAPTURE, rest.pop(0).partition("=")[2])
            continue
        if rest[0].partition("=")[0] == _PARTITION:
            partition = _partitioned_by(rest.pop(0))
            continue
        if rest[0] == _STORE or rest[0].startswith((f"{_STORE}.", f"{_STORE}=")):
            key, value = _parsed(rest.pop(0))
            said = _after(said, {key: value})
        elif rest[0] == _CONFIG and len(rest) > 1:
            written = _after(written, _from_file(rest[1]))
            del rest[:2]
        elif rest[0].startswith(f"{_CONFIG}="):
            written = _after(written, _from_file(rest.pop(0).partition("=")[2]))
        else:
            break
    if len(rest) == len(arguments):
        return None, rest
    if not said and not written and not _names_store(arguments[: len(arguments) - len(rest)]):
        return RunnerOptions(captures=captures, partition=partition), rest
    values = _after(written, said)
    uses_store = _switched(_STORE, str(values.pop("", "on")))
    from dgl_mgpu.config.store_options import options_as_written

    store = options_as_written(values, _STORE)
    return RunnerOptions(store, uses_store, captures, partition), rest


def _names_store(words: Sequence[str]) -> bool:
    return any(word.startswith((_STORE, _CONFIG)) for word in words)


def _switched(option: str, value: str) -> bool:
    if value.lower() not in _SWITCH:
        raise ConfigError(f"set {option}={value}", "it is neither on nor off", "say on or off")
    return _SWITCH[value.lower()]


def _partitioned_by(word: str) -> str:
    from dgl_mgpu.config.schema import PARTITIONS

    _, equals, by = word.partition("=")
    if equals and by not in PARTITIONS:
        raise ConfigError(f"set {word}", "there is no such way", f"use {', '.join(PARTITIONS)}")
    return by or PARTITIONS[0]


def hand_on(options: RunnerOptions) -> None:
    """Let this process and all that it starts from now on know the options."""
    os.environ[VARIABLE] = json.dumps(vars(options))


def was_told() -> bool:
    """Whether there are options at all."""
    return VARIABLE in os.environ


def told() -> RunnerOptions:
    """The options that this process, or one that started it, was run with.

    Without the runner there are none, and models are not captured.

    Raises
    ------
    ConfigError
        If the environment has something else in their place.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return RunnerOptions(captures=False)
    try:
        return RunnerOptions(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"read {VARIABLE}={text}", str(error), "unset it: python -m dgl_mgpu sets it itself"
        ) from error


def _after(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Options, and others that have the last word: of keys of one's own, each by itself."""
    first, then = before.get(_BY_NAME), said.get(_BY_NAME)
    both = before | said
    if isinstance(first, dict) and isinstance(then, dict):
        both[_BY_NAME] = first | then
    return both


def _parsed(word: str) -> tuple[str, Any]:
    """A word of the command line as a key, which is empty for the group itself, and its value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.removeprefix(_STORE).partition("=")
    key, dot, name = key.removeprefix(".").partition(".")
    key = key.replace("-", "_")
    action = f"read '{word}'"
    if dot and key != _BY_NAME:
        raise ConfigError(
            action, f"there are no keys below {_STORE}.{key}", f"write {_STORE}.{key}=VALUE"
        )
    if not equals:
        raise ConfigError(action, "it has no value", f"write {word}=VALUE")
    try:
        override = OverridesParser.create().parse_override(f"{key or 'store'}={value}")
    except HydraException as error:
        raise ConfigError(
            action, "its value cannot be read", f"quote it: '{_STORE}.{key}=\"…\"'"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(action, "it has several values", "give one")
    return key, {name: override.value()} if dot else override.value()


def _from_file(path: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    action = f"read {_CONFIG} {path}"
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(action, " ".join(str(error).split()), "name a YAML file") from error
    if not isinstance(found, dict):
        raise ConfigError(action, "it holds no keys", "write them below 'store:'")
    for group in map(str, found):
        if group != "store":
            raise ConfigError(
                action, f"it has a group '{group}'", "write a group 'store', and no other"
            )
    settings = {} if found.get("store") is None else found["store"]
    if not isinstance(settings, dict):
        return {"": settings}
    return {str(key).replace("-", "_"): value for key, value in settings.items()}
