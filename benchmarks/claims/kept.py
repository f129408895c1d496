"""The pages of all results that are kept, their figures as tables: made of ``kept/`` and the JSONs.

A YAML file for each page says how its results were made, what they show and which of their numbers
make a table; it holds no measured number itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, TypeVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.claims.page import WRITTEN, commit_text, machine_text, picture, row, value_text
from benchmarks.claims.pictures import Speedups, draw_speedups
from benchmarks.claims.registry import KEPT, Results, follow, papers
from dgl_mgpu.errors import DataFormatError

SOURCE = Path(__file__).parent / "kept"
#: The first page of the results that are kept, and the one of those that answer the papers' claims.
FIRST_PAGE, CLAIMS_PAGE = "README.md", "claims.md"
#: The first one's picture.
HEADLINES = "how_much_faster.png"
_INDEX = "index.yaml"

_Content = TypeVar("_Content")


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
class Page:
    """Results of one kind: a file of ``kept/``, and a page of the same name.

    Attributes
    ----------
    title : str
    text : str
        What they mean for a user.
    results : list of Kept
    """

    title: str = MISSING
    text: str = ""
    results: list[Kept] = field(default_factory=list)


@dataclass
class Headline:
    """What the first page's picture shows of a result.

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
                f"mend 'headlines' of {_INDEX}",
            )
        return Speedups(self.what, machine_text(result, self.gpus), quotients)


def _case_of(entry: Mapping[str, Any]) -> str:
    """What a figure is of, by whichever name programs give it."""
    return str(next((entry[key] for key in ("case", "name", "way") if key in entry), ""))


@dataclass
class _Index:
    """The first page's text before and after the list of pages, and what its picture shows."""

    text: str = MISSING
    notes: str = ""
    headlines: list[Headline] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)


def kept_pages(folder: Path | None = None) -> dict[str, str]:
    """The pages of the kept results or of others in a folder, in Markdown, by file name.

    Raises
    ------
    DataFormatError
        If a YAML file has other keys or values than these classes, or there is one that is no
        page; if a file is kept and not named, or a column is empty in all rows.
    """
    folder = folder or KEPT
    index, results = _read(_INDEX, _Index), Results(folder)
    pages = read_pages()
    every = [kept for page in pages.values() for kept in page.results]
    named = [name for kept in every for name in (*kept.files, *kept.awaited)]
    there = {path.name for path in folder.iterdir()} - {
        FIRST_PAGE,
        CLAIMS_PAGE,
        HEADLINES,
        *pages,
        *map(picture, papers()),
    }
    if unnamed := there - set(named):
        raise DataFormatError(
            f"describe the results in {folder.name}",
            f"{', '.join(sorted(unnamed))} on none of the pages",
            f"say in {SOURCE.name} how it was made and what it shows",
        )
    for kept in every:
        kept.files += [name for name in kept.awaited if name in there]
        kept.awaited = [name for name in kept.awaited if name not in there]
    written = {name: "\n".join(_of_page(page, results)) for name, page in pages.items()}
    return {FIRST_PAGE: "\n".join(_first(index, pages)), **written}


def read_pages() -> dict[str, Page]:
    """What is on the pages, by their file names, in their order.

    Raises
    ------
    DataFormatError
        As :func:`kept_pages` does for YAML files.
    """
    stems = _read(_INDEX, _Index).pages
    others = {path.stem for path in SOURCE.glob("*.yaml")} - {Path(_INDEX).stem, *stems}
    if others:
        raise DataFormatError(
            f"make pages of {SOURCE.name}",
            f"{', '.join(sorted(others))} not among the 'pages' of {_INDEX}",
            "name it there",
        )
    return {f"{stem}.md": _read(f"{stem}.yaml", Page) for stem in stems}


def draw_headlines(folder: Path) -> None:
    """The first page's picture, of the results in a folder."""
    results = Results(folder)
    headlines = _read(_INDEX, _Index).headlines
    shown = [each for each in headlines if (folder / each.file).is_file()]
    draw_speedups([each.speedups(results) for each in shown], folder / HEADLINES)


def _read(name: str, kind: type[_Content]) -> _Content:
    path = SOURCE / name
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.load(path))
        content: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, FileNotFoundError) as error:
        key = getattr(error, "full_key", None)
        raise DataFormatError(
            f"read {name}",
            str(error).splitlines()[0],
            f"write {key or 'it'} as benchmarks/claims/kept.py describes",
        ) from error
    return content


def _first(index: _Index, pages: Mapping[str, Page]) -> Iterator[str]:
    yield WRITTEN
    yield index.text
    for name, page in pages.items():
        yield f"## [{page.title}]({name})\n"
        yield page.text
    yield index.notes


def _of_page(page: Page, results: Results) -> Iterator[str]:
    yield WRITTEN
    yield f"# {page.title}\n"
    yield page.text
    yield f"[All results, and what the columns mean]({FIRST_PAGE})\n"
    for kept in page.results:
        yield from _of_kept(kept, results) if kept.files else _awaited(kept)


def _awaited(kept: Kept) -> Iterator[str]:
    yield f"## {kept.shows}\n"
    yield f"`{kept.command}`\n"
    yield "There is a program, and no result yet.\n"


def _of_kept(kept: Kept, results: Results) -> Iterator[str]:
    yield f"## {kept.shows}\n"
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
            f"write paths of their entries into a file of {SOURCE.name}",
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
