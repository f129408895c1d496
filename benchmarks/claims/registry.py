"""What the papers state and which of our results answers it: read from this folder's YAML files.

A file is a paper's, a claim one of its tables or figures, and a figure of a claim one number: the
paper's, and where ours stands in a result's JSON.  Such a place is a path of steps: a key of a
mapping, ``{key: value, ...}`` for the one entry of a list that has these values, or ``"*"`` for all
of its entries.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgl_mgpu.errors import DataFormatError

FOLDER = Path(__file__).parent
#: Results that are kept, one JSON file each.
KEPT = FOLDER.parents[1] / "docs" / "benchmarks"
#: In the order of the page.
_FILES = ("xgnn", "wholegraph", "pytorch_direct", "mg_gcn", "mgg")
_TAKE: dict[str, Callable[[list[float]], float]] = {"mean": statistics.mean, "max": max, "min": min}


@dataclass
class Place:
    """Where a number stands in a result.

    Attributes
    ----------
    at : list
        Its path.
    take : 'mean', 'max' or 'min'
        What counts of a list of numbers.
    over : list or None
        The path of what it is divided by.
    times : float
        A factor, of a unit or of what a figure counts.
    """

    at: list[Any] = MISSING
    take: str = "mean"
    over: list[Any] | None = None
    times: float = 1.0

    def read(self, result: Any) -> float | None:
        """The number in a result's JSON; None where the result says that there is none.

        Raises
        ------
        DataFormatError
            If nothing stands there, or no number.
        """
        found = _number(result, self.at, self.take)
        below = 1.0 if self.over is None else _number(result, self.over, self.take)
        return None if found is None or below is None else self.times * found / below


@dataclass
class Figure:
    """One number of a claim.

    Attributes
    ----------
    case : str
    paper : number, str or None
        What the paper states; text where it says so in words, None where it only draws it.
    unit : str
    run : str or None
        The run of ``benchmarks/conf`` that measures it; None where there is no program yet.
    file : str or None
        The kept result with our number; None where it was not run.
    needs : str or None
        What was missing for that.
    ours, peer, ceiling : Place or None
        In that file.
    peer_name : str or None
    """

    case: str = MISSING
    paper: int | float | str | None = None
    unit: str = ""
    run: str | None = None
    file: str | None = None
    needs: str | None = None
    ours: Place | None = None
    peer: Place | None = None
    ceiling: Place | None = None
    peer_name: str | None = None

    @property
    def missing(self) -> str:
        """Why there is no number of ours."""
        if self.run is None:
            return f"no program: needs {self.needs}" if self.needs else "no program yet"
        return f"not run: needs {self.needs}" if self.needs else "not in this run"


@dataclass
class Claim:
    """A table or figure of a paper.

    Attributes
    ----------
    where : str
    what : str
    machine : str
        That of the paper.
    note : str
        How ours differs from it.
    figures : list of Figure
    """

    where: str = MISSING
    what: str = MISSING
    machine: str = MISSING
    note: str = ""
    figures: list[Figure] = field(default_factory=list)


@dataclass
class Paper:
    """A paper and its claims.

    Attributes
    ----------
    name, title : str
    claims : list of Claim
    """

    name: str = MISSING
    title: str = MISSING
    claims: list[Claim] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        for claim in self.claims:
            yield from claim.figures


@cache
def papers() -> dict[str, Paper]:
    """By the names of their files.

    Raises
    ------
    DataFormatError
        If a file has other keys or values than these classes, or a figure is neither in a result
        nor says why it is not.
    """
    found = {stem: _paper(FOLDER / f"{stem}.yaml") for stem in _FILES}
    for stem, paper in found.items():
        for claim in paper.claims:
            for figure in claim.figures:
                _check(f"{stem}.yaml, {claim.where}, '{figure.case}'", figure)
    return found


def _paper(path: Path) -> Paper:
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    for claim in content.get("claims", ()):
        # What holds for all of a claim's figures is written once.
        common = claim.pop("each", {})
        claim["figures"] = [{**common, **figure} for figure in claim.get("figures", ())]
        for figure in claim["figures"]:
            for key in ("ours", "peer", "ceiling"):
                if isinstance(figure.get(key), list):
                    figure[key] = {"at": figure[key]}
    try:
        paper: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Paper), content))
    except OmegaConfBaseException as error:
        raise DataFormatError(
            f"read the claims of {path.name}",
            str(error).splitlines()[0],
            f"write {error.full_key or 'it'} as benchmarks/claims/registry.py describes",
        ) from error
    return paper


def _check(name: str, figure: Figure) -> None:
    has_result = figure.file is not None
    wrong = {
        "a file, but no place in it": has_result and figure.ours is None,
        "a place, but no file": not has_result and figure.ours is not None,
        "a file, but no run that made it": has_result and figure.run is None,
        "neither a file nor what was missing": (
            not has_result and figure.run is not None and figure.needs is None
        ),
        "a peer without a name": (figure.peer is None) != (figure.peer_name is None),
    }
    for found, is_so in wrong.items():
        if is_so:
            raise DataFormatError(
                f"read the claim of {name}", found, "see benchmarks/claims/registry.py"
            )


class Results:
    """The results in a folder.

    Parameters
    ----------
    folder : Path
    by_run : bool
        Whether files are called by the run that wrote them, as ``python -m benchmarks`` does, and
        not as the kept ones.
    """

    def __init__(self, folder: Path = KEPT, by_run: bool = False) -> None:
        self._folder = folder
        self._by_run = by_run
        self._read: dict[str, Any] = {}

    def name(self, figure: Figure) -> str | None:
        """The file that answers a figure; None without one."""
        name = f"{figure.run}.json" if self._by_run else figure.file
        if figure.ours is None or name is None or not (self._folder / name).is_file():
            return None
        return name

    def read(self, name: str) -> Any:
        """The content of a file."""
        if name not in self._read:
            self._read[name] = json.loads((self._folder / name).read_text())
        return self._read[name]

    def number(self, figure: Figure, place: Place | None) -> float | None:
        """What stands at a place in a figure's file.

        Raises
        ------
        DataFormatError
            If nothing stands there.  A run of another size or number of GPUs need not have all
            cases of the kept one, and has None then.
        """
        name = self.name(figure)
        if name is None or place is None:
            return None
        try:
            return place.read(self.read(name))
        except DataFormatError:
            if self._by_run:
                return None
            raise


def _number(result: Any, path: list[Any], take: str) -> float | None:
    found = follow(result, path)
    numbers = found if isinstance(found, list) and found else [found]
    if numbers == [None]:
        return None
    for each in numbers:
        if isinstance(each, bool) or not isinstance(each, int | float):
            raise _nothing_there(path, f"{each!r} is no number")
    return float(_TAKE[take](numbers))


def follow(result: Any, path: list[Any]) -> Any:
    """What stands in a result at the end of a path.

    Raises
    ------
    DataFormatError
        If a step leads nowhere.
    """
    return _follow(result, path, path)


def _follow(found: Any, steps: list[Any], path: list[Any]) -> Any:
    if not steps:
        return found
    step, *rest = steps
    if step == "*" and isinstance(found, list):
        return [_follow(entry, rest, path) for entry in found]
    if isinstance(step, Mapping) and isinstance(found, list):
        entries = [
            entry
            for entry in found
            if all(entry.get(key, MISSING) == value for key, value in step.items())
        ]
        if len(entries) != 1:
            raise _nothing_there(path, f"{len(entries)} entries have {dict(step)}")
        return _follow(entries[0], rest, path)
    if not isinstance(found, Mapping) or step not in found:
        raise _nothing_there(path, f"no '{step}'")
    return _follow(found[step], rest, path)


def _nothing_there(path: list[Any], found: str) -> DataFormatError:
    return DataFormatError(
        f"read the number at {path}", found, "write a path of this result's JSON"
    )
