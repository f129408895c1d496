"""The page of all results that are kept, their figures as tables: made of kept.yaml and the JSONs.

The YAML says how each result was made, what it shows and which of its numbers make a table; it
holds no measured number itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.claims.page import WRITTEN, commit_text, machine_text, picture, row, value_text
from benchmarks.claims.pictures import Speedups, draw_speedups
from benchmarks.claims.registry import FOLDER, KEPT, Results, follow, papers
from dgl_mgpu.errors import DataFormatError

SOURCE = FOLDER / "kept.yaml"
#: Of all results that are kept, and of those that answer claims of the papers.
PAGE, CLAIMS_PAGE = "README.md", "claims.md"
#: The first one's first picture.
HEADLINES = "how_much_faster.png"


@dataclass
class Repeats:
    """What a column's numbers are medians of.

    Attributes
    ----------
    at : list
        Path in an entry of a list of repeats, or of one for each rank.
    are_times : bool
        Whether they are times and the column has rates: the longest is of the lowest rate.
    """

    at: list[Any] = MISSING
    are_times: bool = False


@dataclass
class Rows:
    """A table of some of a result's numbers.

    Attributes
    ----------
    title : str
        What it is of, where there are several.
    of : list
        Path of a list of entries, each of which makes a row; or of a mapping, whose values do.
    label : list of str
        Keys of an entry that say what it is; the key of a mapping's entry comes first.
    columns : dict
        Path in an entry by heading.  What an entry lacks stays empty.
    repeats : dict
        By heading, what its numbers are medians of, where a result has them: their least and most
        stand behind the median.
    """

    title: str = ""
    of: list[Any] = field(default_factory=lambda: ["figures"])
    label: list[str] = field(default_factory=lambda: ["case"])
    columns: dict[str, list[Any]] = field(default_factory=dict)
    repeats: dict[str, Repeats] = field(default_factory=dict)


@dataclass
class Kept:
    """Results that one program wrote, on machines or with options that differ.

    Attributes
    ----------
    shows : str
    command : str
        What wrote them, where it is a program of this project.
    files : list of str
        JSON files, and pictures.
    awaited : list of str
        JSON files that were not written yet, for which there is a program.  While there are such,
        columns may be empty: those of what a program has come to write.
    tables : list of Rows
        Made of each JSON file.
    note : str
        What bounds these figures, or how they came about.
    """

    shows: str = MISSING
    command: str = ""
    files: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    tables: list[Rows] = field(default_factory=list)
    note: str = ""


@dataclass
class Part:
    """Results of one kind.

    Attributes
    ----------
    title, text : str
    results : list of Kept
    """

    title: str = MISSING
    text: str = ""
    results: list[Kept] = field(default_factory=list)


@dataclass
class Headline:
    """What the page's first picture shows of a result.

    Attributes
    ----------
    what : str
        What is so many times as fast, against what.
    file : str
        Left out while there is none.
    at : list
        Path of the quotient in each figure, or of what ``over`` is divided by.
    over : list
    cases : str
        What the names of the cases match, as a regular expression; all of them, if it is empty.
    gpus : int or None
        How many measured it, where that is not all of the machine's.
    """

    what: str = MISSING
    file: str = MISSING
    at: list[Any] = MISSING
    over: list[Any] = field(default_factory=list)
    cases: str = ""
    gpus: int | None = None

    def speedups(self, results: Results) -> Speedups:
        """Of all cases that have them."""
        result = results.read(self.file)
        entries = [each for each in result["figures"] if re.match(self.cases, _case_of(each))]
        found = [follow(each, self.at) for each in entries]
        if self.over:
            pairs = zip([follow(each, self.over) for each in entries], found, strict=True)
            found = [over / at for over, at in pairs if over is not None and at is not None]
        quotients = [each for each in found if each is not None]
        if not quotients:
            raise DataFormatError(
                f"draw '{self.what}'",
                f"no case of {self.file} that matches '{self.cases}' has a quotient",
                f"mend 'headlines' of {SOURCE.name}",
            )
        return Speedups(self.what, machine_text(result, self.gpus), quotients)


def _case_of(entry: Mapping[str, Any]) -> str:
    """What a figure is of, by whichever name programs give it."""
    return str(next((entry[key] for key in ("case", "name", "way") if key in entry), ""))


@dataclass
class _Page:
    text: str = MISSING
    headlines: list[Headline] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def kept_page(folder: Path | None = None) -> str:
    """The page, in Markdown, of the kept results or of others in a folder.

    Raises
    ------
    DataFormatError
        If the YAML has other keys or values than these classes, a file is kept and not named, or
        a column is empty in all rows.
    """
    folder = folder or KEPT
    page, results = _read(), Results(folder)
    every = [kept for part in page.parts for kept in part.results]
    named = [name for kept in every for name in (*kept.files, *kept.awaited)]
    there = {path.name for path in folder.iterdir()} - {
        PAGE,
        CLAIMS_PAGE,
        HEADLINES,
        *map(picture, papers()),
    }
    if unnamed := there - set(named):
        raise DataFormatError(
            f"describe the results in {folder.name}",
            f"{', '.join(sorted(unnamed))} in none of its parts",
            f"say in {SOURCE.name} how it was made and what it shows",
        )
    lines = [WRITTEN, page.text]
    for part in page.parts:
        lines.append(f"## {part.title}\n")
        lines += [part.text] if part.text else []
        for kept in part.results:
            kept.files += [name for name in kept.awaited if name in there]
            kept.awaited = [name for name in kept.awaited if name not in there]
            lines += _of_kept(kept, results) if kept.files else _awaited(kept)
    return "\n".join(lines)


def draw_headlines(folder: Path) -> None:
    """The page's first picture, of the results in a folder."""
    results = Results(folder)
    headlines = [each for each in _read().headlines if (folder / each.file).is_file()]
    draw_speedups([each.speedups(results) for each in headlines], folder / HEADLINES)


def _read() -> _Page:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(_Page), OmegaConf.load(SOURCE))
        page: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise DataFormatError(
            f"read {SOURCE.name}",
            str(error).splitlines()[0],
            f"write {error.full_key or 'it'} as benchmarks/claims/kept.py describes",
        ) from error
    return page


def _awaited(kept: Kept) -> Iterator[str]:
    yield f"### {kept.shows}\n"
    yield f"`{kept.command}`\n"
    yield "There is a program, and no result yet.\n"


def _of_kept(kept: Kept, results: Results) -> Iterator[str]:
    yield f"### {kept.shows}\n"
    if kept.command:
        yield f"`{kept.command}`\n"
    if kept.note:
        yield kept.note
    filled: set[str] = set()
    for name in kept.files:
        if not name.endswith(".json"):
            yield f"![{kept.shows}]({name})\n"
            continue
        result = results.read(name)
        commit = result.get("machine", {}).get("commit")
        made = "without this package"
        if commit:
            made = f"{machine_text(result)}, commit {commit_text(commit)}"
        yield f"[{name}]({name}) ({made})\n"
        for table in kept.tables:
            yield from _table(table, result, filled)
            yield ""
    wanted = {heading for table in kept.tables for heading in table.columns}
    wanted |= {_repeats_of(heading) for table in kept.tables for heading in table.repeats}
    empty = wanted - filled
    if empty and not kept.awaited:
        raise DataFormatError(
            f"fill the columns {sorted(empty)}",
            f"nothing at their paths in {', '.join(kept.files)}",
            f"write paths of their entries into {SOURCE.name}",
        )


def _table(table: Rows, result: Any, filled: set[str]) -> Iterator[str]:
    """A table of the columns that this result has; they are added to those that are filled."""
    entries = follow(result, table.of)
    named = list(entries.items() if isinstance(entries, Mapping) else (("", e) for e in entries))
    columns = {}
    for heading, path in table.columns.items():
        cells = [_cell(entry, path) for _, entry in named]
        if heading in table.repeats:
            spreads = [_spread(entry, path, table.repeats[heading]) for _, entry in named]
            cells = [
                f"{cell} {spread}".strip() for cell, spread in zip(cells, spreads, strict=True)
            ]
            filled |= {_repeats_of(heading)} if any(spreads) else set()
        if any(cells):
            columns[heading] = cells
    filled |= set(columns)
    if table.title:
        yield f"{table.title}:\n"
    yield row("", *columns)
    yield row("---", *("---:" for _ in columns))
    for number, (key, entry) in enumerate(named):
        label = filter(None, [key, *(_cell(entry, [each]) for each in table.label)])
        yield row(", ".join(label), *(cells[number] for cells in columns.values()))


def _cell(entry: Any, path: list[Any]) -> str:
    try:
        found = follow(entry, path)
    except DataFormatError:
        return ""
    if found is None or isinstance(found, str):
        return found or ""
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, list):
        return f"{value_text(mean(found), '')} ± {value_text(stdev(found), '')}"
    return value_text(found, "")


def _repeats_of(heading: str) -> str:
    """What is to be filled by a column's repeats."""
    return f"repeats of {heading}"


def _spread(entry: Any, path: list[Any], repeats: Repeats) -> str:
    """The least and the most of what a number is the median of; nothing, where it is not there.

    Each rank's are compared with its own median, and the number is that of all ranks.
    """
    try:
        number, found = follow(entry, path), follow(entry, repeats.at)
    except DataFormatError:
        return ""
    several = [each for each in _lists_of_numbers(found) if len(each) > 1]
    if not several or number is None:
        return ""
    shares = [each / median(some) for some in several for each in some]
    if repeats.are_times:
        shares = [1 / share for share in shares]
    least, most = (value_text(number * share, "") for share in (min(shares), max(shares)))
    return f"({least} to {most})"


def _lists_of_numbers(found: Any) -> Iterator[list[float]]:
    if isinstance(found, list) and not any(isinstance(each, list) for each in found):
        yield found
    elif isinstance(found, list):
        for each in found:
            yield from _lists_of_numbers(each)
