"""Pictures of these pages are those that their script draws, well-formed, and shown."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "pictures"
SCRIPT = runpy.run_path(str(FOLDER / "draw.py"))
PICTURES = SCRIPT["PICTURES"]
DRAW = "run: python docs/pictures/draw.py"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_drawn(name):
    drawn = PICTURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, DRAW
    ElementTree.fromstring(drawn)


def output_of(file: Path) -> str:
    """What the command printed that drew a picture."""
    with Image.open(file) as picture:
        return picture.info[SCRIPT["OUTPUT"]]


def modelled_ms(output: str) -> float:
    (seconds, unit) = re.findall(r"one step's reads take ([\d.]+) (ms|us|s)\b", output)[0]
    return float(seconds) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]


@pytest.mark.parametrize("name", SCRIPT["PLACEMENTS"])
def test_a_placement_and_its_text_are_of_one_run_of_the_command_shown(name):
    """Of whichever machine: plans that are equally good differ from processor to processor."""
    output = SCRIPT["output_on"](name)
    assert output, "the page has no output below the command"
    assert output == output_of(FOLDER / f"{name}.png"), DRAW


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPT["PLACEMENTS"])
def test_the_placement_is_as_good_as_what_the_command_finds(name, tmp_path):
    SCRIPT["placement"](name, tmp_path / "drawn.png")
    kept, drawn = output_of(FOLDER / f"{name}.png"), output_of(tmp_path / "drawn.png")
    assert modelled_ms(drawn) == pytest.approx(modelled_ms(kept), rel=0.02), DRAW
    # Which rows lie where may differ, but not what there is, nor what is said of it.
    tables = [re.findall(r"^(?:topology|node/\w+)", each, re.MULTILINE) for each in (kept, drawn)]
    assert tables[0] == tables[1], DRAW
    assert kept.partition("data: ")[2] == drawn.partition("data: ")[2] != "", DRAW
    with Image.open(FOLDER / f"{name}.png") as one, Image.open(tmp_path / "drawn.png") as other:
        assert one.size == other.size, DRAW


def test_every_picture_is_on_a_page():
    pages = {page: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    for picture in FOLDER.iterdir():
        if picture.suffix in (".svg", ".png"):
            on = [page for page, text in pages.items() if f"pictures/{picture.name})" in text]
            assert on, f"no page shows {picture.name}"
