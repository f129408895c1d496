"""Commands as they stand in the documentation: whether their names and keys are there."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

from dgl_mgpu import cli
from dgl_mgpu.__main__ import take_options
from dgl_mgpu.machine import measure, preset, probe
from dgl_mgpu.train.compose import check_overrides, compose, compose_data
from tests.docs.pages import ROOT

_MAKEFILE = (ROOT / "Makefile").read_text()
_MAKE_TARGETS = set(" ".join(re.findall(r"^\.PHONY: (.*)$", _MAKEFILE, re.M)).split())


def check_command(line: str, folder: Path) -> None:
    """Raise what is wrong with a line of a shell; lines about other things are none of its.

    Parameters
    ----------
    line : str
    folder : Path
        An empty one, where files that the line names are made.
    """
    words = [word for word in shlex.split(line, comments=True) if word != "…"]
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        del words[0]
    if words[:1] == ["dgl-mgpu"]:
        _check_dgl_mgpu(words[1:], folder)
    elif words[:1] == ["make"]:
        targets = [word for word in words[1:] if "=" not in word]
        assert set(targets) <= _MAKE_TARGETS, f"no target of the Makefile: {targets}"
    elif "-m" in words:
        module, *rest = words[words.index("-m") + 1 :]
        if module == "dgl_mgpu":
            _check_runner(rest, folder)
        elif module.startswith(("benchmarks", "tests")):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"no module {module}"


def _check_dgl_mgpu(words: list[str], folder: Path) -> None:
    command, *rest = words
    if command in ("train", "plan"):
        rest = [_present(word, folder) for word in rest]
        # A sweep, like trainer.lr=0.1,0.01, is composed by Hydra alone.
        if "--multirun" in rest or "-m" in rest:
            check_overrides(rest)
        elif command == "plan":
            cli.picture_file(rest)
            words = [word for word in rest if not word.startswith("-")]
            for overrides in cli.choices(check_overrides(words)):
                compose(overrides)
        else:
            compose(rest)
    elif command == "predict":
        cli.parse_predict(rest)
    elif command == "partition":
        compose_data(cli.parse_partition(rest)[0])
    elif command == "topology":
        assert not rest or rest[0] in (probe.__name__, measure.__name__) or preset(rest[0])
    elif command == "install-dgl":
        cli.wheel_file(rest)
    else:
        assert [command, *rest] in (["doctor"], ["doctor", "--coverage"], ["--help"]), words


def _check_runner(words: list[str], folder: Path) -> None:
    for name in (b for a, b in itertools.pairwise(words) if a == "--config"):
        (folder / name).touch()
    for word in words:
        _present(word, folder)
    _, rest = take_options([str(folder / w) if w.endswith(".yaml") else w for w in words])
    assert rest and (rest[0] == "-m" or not rest[0].startswith("-")), f"no script in {words}"


def _present(word: str, folder: Path) -> str:
    """A word whose file of counts, if it names one, is there."""
    key, equals, value = word.partition("=")
    if key.endswith("store.hotness") and value.endswith(".npz"):
        (folder / "counts.npz").touch()
        return f"{key}{equals}{folder / 'counts.npz'}"
    return word
