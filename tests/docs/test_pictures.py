"""Pictures of these pages are those that their script draws, well-formed, and shown."""

from __future__ import annotations

import runpy
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "pictures"
SCRIPT = runpy.run_path(str(FOLDER / "draw.py"))
PICTURES = SCRIPT["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_drawn(name):
    drawn = PICTURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run: python docs/pictures/draw.py"
    ElementTree.fromstring(drawn)


def test_the_placement_is_what_the_command_of_its_page_draws(tmp_path):
    SCRIPT["placement"](tmp_path / "drawn.png")
    kept, drawn = imread(FOLDER / "placement.png"), imread(tmp_path / "drawn.png")
    assert kept.shape == drawn.shape, "run: python docs/pictures/draw.py"
    # Versions of matplotlib draw letters a little differently; other bars and links are far off.
    assert np.abs(kept - drawn).mean() < 0.002, "run: python docs/pictures/draw.py"
    page = (ROOT / "docs" / "howto" / "command-line.md").read_text()
    assert f"\ndgl-mgpu {SCRIPT['PLACEMENT']}\n" in page


def test_every_picture_is_on_a_page():
    pages = {page: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    for picture in FOLDER.iterdir():
        if picture.suffix in (".svg", ".png"):
            on = [page for page, text in pages.items() if f"pictures/{picture.name})" in text]
            assert on, f"no page shows {picture.name}"
