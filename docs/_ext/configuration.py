"""Every key of configs/, with its default and what is said about it there, as Markdown."""

from __future__ import annotations

from pathlib import Path

from dgl_mgpu.config.keys import Key, files_by_group, header, keys, keys_of_group
from dgl_mgpu.utils.resources import resource_folder


def tables() -> str:
    """A section for the run and for each group of ``configs/``, in the order of its defaults."""
    parts = ["## The run\n", _key_table(keys(resource_folder("configs") / "config.yaml"))]
    for group, paths in files_by_group().items():
        parts += [f"## {group}\n", _key_table(keys_of_group(group, paths))]
        if len(paths) > 1:
            parts.append(_choices(group, paths))
    return "\n".join(parts)


def _key_table(found: list[Key]) -> str:
    rows = [f"| `{key.name}` | `{key.value}` | {_cell(key.comment)} |" for key in found]
    return "\n".join(["| key | default | |", "| --- | --- | --- |", *rows, ""])


def _choices(group: str, paths: list[Path]) -> str:
    """What each other file of a group sets otherwise than the default one, and says of it."""
    default = {key.name: key.value for key in keys(paths[0], group)}
    rows = [f"| `{group}={paths[0].stem}` | as above | {_of_file(paths[0])} |"]
    for path in paths[1:]:
        others = [key for key in keys(path, group) if default.get(key.name) != key.value]
        sets = " ".join(f"`{k.name}={k.value}`" for k in others if k.name != f"{group}.name")
        said = " ".join(f"`{k.name}`: {k.comment}." for k in others if k.comment)
        rows.append(f"| `{group}={path.stem}` | {sets} | {_of_file(path)} {_cell(said)} |")
    return "\n".join(["| choice | sets | |", "| --- | --- | --- |", *rows, ""])


def _of_file(path: Path) -> str:
    return _cell(header(path))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
