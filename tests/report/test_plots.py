from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.report import TierTraffic
from dgl_mgpu.report.colours import TIER_COLOURS
from dgl_mgpu.report.plots import plot_curves


def _pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1500, 1050)
        return np.asarray(image.convert("RGB"))


def _share_of(pixels, colour):
    """Share of the lower right panel that has exactly this colour."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    panel = pixels[600:940, 900:1480]
    return (panel == rgb).all(axis=2).mean()


@pytest.mark.parametrize("epochs", [1, 10, 200])
def test_the_picture_has_its_size_and_shows_the_tiers(tmp_path, make_report, epochs):
    path = tmp_path / "curves.png"
    plot_curves([make_report(epoch) for epoch in range(1, epochs + 1)], path, "A run")
    pixels = _pixels(path)
    # Each quarter holds ink: no panel is blank.
    for rows in (slice(0, 525), slice(525, 1050)):
        for columns in (slice(0, 750), slice(750, 1500)):
            assert (pixels[rows, columns] < 128).any(axis=2).mean() > 0.002
    # device serves 80 % of the rows and host 20 %: the areas show it.
    device, host = (_share_of(pixels, TIER_COLOURS[tier]) for tier in ("device", "host"))
    assert device > 0.3
    assert device / host == pytest.approx(4.0, rel=0.1)


def test_other_figures_give_another_picture(tmp_path, make_report):
    plot_curves([make_report(1), make_report(2)], tmp_path / "a.png")
    plot_curves([make_report(1), make_report(2, valid_accuracy=0.45)], tmp_path / "b.png")
    a, b = _pixels(tmp_path / "a.png"), _pixels(tmp_path / "b.png")
    assert (a != b)[:525, 750:].any()
    assert not (a != b)[:525, :740].any()  # the loss panel is the same


def test_gaps_a_diverged_loss_and_no_tiers_are_drawn(tmp_path, make_report):
    reports = [
        make_report(1, loss=math.nan, valid_accuracy=None, test_accuracy=None, tiers=()),
        make_report(2, loss=math.inf, valid_accuracy=None, test_accuracy=None, tiers=()),
    ]
    plot_curves(reports, tmp_path / "curves.png")
    assert (_pixels(tmp_path / "curves.png") < 128).any()


def test_an_unknown_tier_is_drawn_too(tmp_path, make_report):
    tiers = (TierTraffic("remote machine", "feat", 1, 1),)
    plot_curves([make_report(1, tiers=tiers)], tmp_path / "curves.png")
    assert _share_of(_pixels(tmp_path / "curves.png"), "#999999") > 0.3


def test_no_epoch_is_an_error(tmp_path):
    with pytest.raises(InvalidInputError):
        plot_curves([], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_pyplot_and_its_global_state_are_left_alone():
    code = (
        "import sys, dgl_mgpu.report as report;"
        "early = {'matplotlib', 'torch', 'dgl'} & set(sys.modules);"
        "import dgl_mgpu.report.plots;"
        "print(sorted(early), 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
