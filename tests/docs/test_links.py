"""Links from page to page: files that are there, and headings that they have."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import PAGES, ROOT, headings, links


def dead_links(page: Path) -> list[str]:
    """Links of a page that lead to no file of the project, or to no heading of it."""
    dead = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        outside = not target.is_relative_to(ROOT)
        if outside or not target.exists() or (parts.fragment and not _has(target, parts.fragment)):
            dead.append(link)
    return dead


def _has(target: Path, fragment: str) -> bool:
    return target.suffix == ".md" and fragment in headings(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.test_links.ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A `b`, c\n\n## A\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[1](there.md) [2](there.md#a-b-c) [3](https://a.b/c) [4](#top)\n\n# Top\n\n"
        "[5](gone.md) [6](there.md#b) [7](#bottom) ![8](gone.svg) [9](/etc/passwd)\n"
    )
    assert dead_links(page) == ["gone.md", "there.md#b", "#bottom", "gone.svg", "/etc/passwd"]


def test_headings_that_are_linked_have_anchors_of_their_own():
    """Of two headings of a name, links lead to the first, whichever was meant."""
    linked = {urlsplit(link).fragment for page in PAGES for link in links(page)}
    repeated = {
        str(page.relative_to(ROOT)): name
        for page in PAGES
        for name, count in headings(page).items()
        if count > 1 and name in linked
    }
    assert repeated == {}
