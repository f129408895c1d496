"""The project's Markdown pages: their blocks of code, headings and links."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
#: Has files of the project and changes to them; see test_extending.py.
EXTENDING = ROOT / "docs" / "extending.md"
#: Every page, of the site or not.
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for p in ROOT.glob("docs/**/*.md") if "_build" not in p.parts)]
)

_REASONS = ("<!-- not run: ", "<!-- needs ")


class Block(NamedTuple):
    """A fenced block of code.

    ``line`` is that of its first line of code, counted from 0; ``not_run`` the reason that a
    comment ``<!-- not run: … -->`` or ``<!-- needs … -->`` right before it gives, or "".
    """

    language: str
    code: str
    line: int
    not_run: str

    @property
    def package(self) -> str | None:
        """The package without which the block is not run: ``<!-- needs PACKAGE -->``."""
        match = re.fullmatch(r"needs (\w+)", self.not_run)
        return match[1] if match else None

    @property
    def file(self) -> str | None:
        """The name in the first line's comment, of the file that the block is to be saved as."""
        match = re.match(r"(?:#|//) ([\w/]+\.\w+)\n", self.code)
        return match[1] if match else None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, reason = [], ""
    for token in _tokens(page):
        if token.type == "fence" and token.map is not None:
            language = (token.info.split() or [""])[0]
            found.append(Block(language, token.content, token.map[0] + 1, reason))
        comment = token.content.strip() if token.type == "html_block" else ""
        reason = comment[4:-3].strip() if comment.startswith(_REASONS) else ""
    return found


def links(page: Path) -> Iterator[str]:
    """Where a page's links and pictures lead."""
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                yield str(target)


def headings(page: Path) -> Counter[str]:
    """The anchors that GitHub and the site give to a page's headings, and how often."""
    tokens = _tokens(page)
    return Counter(
        _slug("".join(child.content for child in following.children or ()))
        for token, following in itertools.pairwise(tokens)
        if token.type == "heading_open"
    )


def _slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


@functools.cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())
