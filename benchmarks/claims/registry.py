"""What the papers state and which of our results answers it, read from YAML files in ``papers``.

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

PAPERS = Path(__file__).parent / "papers"
#: Results that are kept, one JSON file each.
KEPT = PAPERS.parents[2] / "docs" / "benchmarks"
#: In a run's folder, what became of each of its runs.
OUTCOMES = "runs.json"
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
    remote : bool
        Of rows that are dealt out over all ranks, count those that other ranks have.
    """

    at: list[Any] = MISSING
    take: str = "mean"
    over: list[Any] | None = None
    times: float = 1.0
    remote: bool = False

    def read(self, result: Any) -> float | None:
        """The number in a result's JSON; None where the result says that there is none.

        Raises
        ------
        DataFormatError
            If nothing stands there, or no number, or a share that is remote is asked of a result
            that does not say how many ranks it is of.
        """
        found = _number(result, self.at, self.take)
        below = 1.0 if self.over is None else _number(result, self.over, self.take)
        if found is None or below is None:
            return None
        return self.times * found / below * (self._remote_share(result) if self.remote else 1.0)

    def ranks(self, result: Any) -> int | None:
        """How many ranks measured the number, the most of a quotient; None if it is not said."""
        of_both = [_ranks(result, path) for path in (self.at, self.over) if path is not None]
        return max((ranks for ranks in of_both if ranks is not None), default=None)

    def _remote_share(self, result: Any) -> float:
        ranks = self.ranks(result)
        if ranks is None:
            raise _nothing_there(self.at, "no number of ranks")
        return (ranks - 1) / ranks


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
        What was missing for that, where it is not as many GPUs as `ranks`.
    ranks : int or None
        How many the number is of; results of others do not answer it.  None if it is of any.
    ours, peer, ceiling : Place or None
        In that file, and in what the run writes.
    peer_name : str or None
    """

    case: str = MISSING
    paper: int | float | str | None = None
    unit: str = ""
    run: str | None = None
    file: str | None = None
    needs: str | None = None
    ranks: int | None = None
    ours: Place | None = None
    peer: Place | None = None
    ceiling: Place | None = None
    peer_name: str | None = None

    @property
    def missing(self) -> str:
        """Why no number of ours is kept."""
        if self.run is None:
            return f"no program: needs {self.needs}" if self.needs else "no program yet"
        return f"not run: needs {self.needs or f'{self.ranks} GPUs'}"


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
    left_out : dict
        By table or figure that has results and no claim here: what it shows, and why not.
    """

    name: str = MISSING
    title: str = MISSING
    claims: list[Claim] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

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
    found = {stem: _paper(PAPERS / f"{stem}.yaml") for stem in _FILES}
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
    wrong = {
        "a file, but no place in it": figure.file is not None and figure.ours is None,
        "a place, but no run that writes there": figure.ours is not None and figure.run is None,
        "neither a file nor what was missing": (
            figure.file is None
            and figure.run is not None
            and figure.needs is None
            and figure.ranks is None
        ),
        "a peer without a name": (figure.peer is None) != (figure.peer_name is None),
    }
    for found, is_so in wrong.items():
        if is_so:
            raise DataFormatError(
                f"read the claim of {name}", found, "see benchmarks/claims/registry.py"
            )


@dataclass(frozen=True)
class Answer:
    """What a result says of a figure.

    Attributes
    ----------
    file : str
    result : Any
        Its content.
    ranks : int or None
        How many measured it, where the result says so.
    ours : float or None
        None where the result says that there is none.
    peer, ceiling : float or None
    """

    file: str
    result: Any
    ranks: int | None
    ours: float | None
    peer: float | None
    ceiling: float | None


class Results:
    """The results in a folder.

    Parameters
    ----------
    folder : Path
    by_run : bool
        Whether it is that of ``python -m benchmarks``: files are called by the run that wrote them,
        not as the kept ones, and need not have all of a kept one's cases, as a run of another size
        or number of GPUs has not.
    """

    def __init__(self, folder: Path = KEPT, by_run: bool = False) -> None:
        self._folder = folder
        self._by_run = by_run
        self._read: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """The content of a file."""
        if name not in self._read:
            self._read[name] = json.loads((self._folder / name).read_text())
        return self._read[name]

    def answer(self, figure: Figure) -> Answer | None:
        """What answers a figure; None if nothing does.

        Raises
        ------
        DataFormatError
            If a kept result lacks what the figure says to be there.
        """
        name = f"{figure.run}.json" if self._by_run else figure.file
        if figure.ours is None or name is None or not (self._folder / name).is_file():
            return None
        result = self.read(name)
        try:
            ranks = figure.ours.ranks(result)
            if figure.ranks not in (None, ranks):
                raise _nothing_there(figure.ours.at, f"a number of {ranks} ranks")
            ours = figure.ours.read(result)
        except DataFormatError:
            if self._by_run:
                return None
            raise
        beside = (self._beside(result, place) for place in (figure.peer, figure.ceiling))
        return Answer(name, result, ranks, ours, *beside)

    def missing(self, figure: Figure) -> str:
        """Why nothing answers a figure."""
        if not self._by_run or figure.ours is None:
            return figure.missing
        outcome = self._outcomes.get(figure.run, {"what": "", "why": ""})
        if outcome["what"] == "left out":
            return f"not run: {outcome['why']}"
        return "the run failed" if outcome["what"] == "failed" else "not in this run"

    def _beside(self, result: Any, place: Place | None) -> float | None:
        try:
            return None if place is None else place.read(result)
        except DataFormatError:
            if self._by_run:
                return None
            raise

    @property
    def _outcomes(self) -> dict[str, Any]:
        """What became of each run of this folder, by its name."""
        if not (self._folder / OUTCOMES).is_file():
            return {}
        return {each["run"]: each for each in self.read(OUTCOMES)["outcomes"]}


def _ranks(result: Any, path: list[Any]) -> int | None:
    """How many measured what stands at a path: as the last entry on the way says, or the run's
    options, which some programs write as text."""
    for end in range(len(path), -1, -1):
        found = follow(result, path[:end])
        if isinstance(found, Mapping):
            options = found.get("options", {})
            for said in (found.get("ranks"), found.get("gpus"), options.get("ranks")):
                if isinstance(said, int) or (isinstance(said, str) and said.isdecimal()):
                    return int(said)
    return None


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
