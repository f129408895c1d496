"""The pictures of docs/architecture.md are those that their script draws, and well-formed."""

from __future__ import annotations

import runpy
from xml.etree import ElementTree

import pytest

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "pictures"
PICTURES = runpy.run_path(str(FOLDER / "draw.py"))["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_drawn(name):
    drawn = PICTURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run: python docs/pictures/draw.py"
    ElementTree.fromstring(drawn)


def test_every_picture_is_on_the_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert all(f"(pictures/{name}.svg)" in page for name in PICTURES)
