"""Every key of ``configs/``, with its default and its comment in the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import yaml

from dgl_mgpu.config.schema import Config
from dgl_mgpu.utils.resources import resource_folder

#: Hydra's own, not of a run.
_HYDRA = ("defaults", "hydra")
_PACKAGE = "# @package _global_"


class Key(NamedTuple):
    """A key of a file, its value as written there, and the comment beside, above or below it."""

    name: str
    value: str
    comment: str


def keys(path: Path, group: str = "") -> list[Key]:
    """All keys of a YAML file, in its order, by their names on the command line."""
    lines = path.read_text().splitlines()
    prefix = "" if _PACKAGE in lines or not group else f"{group}."
    top = len(_header(lines))
    return [
        Key(prefix + name, value, _comment(lines, node, top))
        for name, value, node in _leaves(yaml.compose(path.read_text()))
        if name.partition(".")[0] not in _HYDRA
    ]


def run_keys() -> list[Key]:
    """All keys of a run's configuration."""
    all_keys = keys(resource_folder("configs") / "config.yaml")
    for group, paths in files_by_group().items():
        all_keys += keys_of_group(group, paths)
    return all_keys


def files_by_group() -> dict[str, list[Path]]:
    """The files of each group of ``configs/``, in the order of its defaults, the default first."""
    folder = resource_folder("configs")
    composed = yaml.safe_load((folder / "config.yaml").read_text())["defaults"]
    chosen = {
        group: name for choice in composed if choice != "_self_" for group, name in choice.items()
    }
    return {
        group: sorted((folder / group).glob("*.yaml"), key=lambda p: (p.stem != default, p.stem))
        for group, default in chosen.items()
    }


def keys_of_group(group: str, paths: list[Path]) -> list[Key]:
    """The keys of the default file, then those that the schema has beside them."""
    by_name = {key.name: key for key in keys(paths[0], group)}
    further = [key for path in paths[1:] for key in keys(path, group)]
    comments = {key.name: key.comment for key in reversed(further)}
    for name, value in asdict(Config())[group].items():
        name = f"{group}.{name}"
        by_name.setdefault(name, Key(name, str(value), comments.get(name, "")))
    return list(by_name.values())


def header(path: Path) -> str:
    """The comment that a file begins with."""
    return _text(_header(path.read_text().splitlines()))


def _leaves(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, str, yaml.Node]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves(value, f"{name}.")
        else:
            begin, end = value.start_mark, value.end_mark
            yield name, begin.buffer[begin.pointer : end.pointer], value


def _header(lines: list[str]) -> list[str]:
    """The comment that a file begins with."""
    header = []
    for line in lines:
        if not line.startswith("#"):
            break
        header.append(line)
    return header


def _comment(lines: list[str], value: yaml.Node, top: int) -> str:
    """The comment lines above a key, the one beside it and those that go on below that."""
    row, column = value.end_mark.line, value.end_mark.column
    above = row
    while above > top and lines[above - 1].startswith("#"):
        above -= 1
    below = row + 1
    while below < len(lines) and re.match(r"\s+#", lines[below]):
        below += 1
    return _text([*lines[above:row], lines[row][column:], *lines[row + 1 : below]])


def _text(comments: list[str]) -> str:
    words = [line.strip().removeprefix("#").strip() for line in comments if line != _PACKAGE]
    return " ".join(word for word in words if word)
