from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.report import StageSeconds, TierTraffic
from dgl_mgpu.report.colours import STAGE_COLOURS, TIER_COLOURS
from dgl_mgpu.report.plots import plot_curves


def _pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1500, 1050)
        return np.asarray(image.convert("RGB"))


def _share_of(pixels, colour):
    """Share of the lower right panel that has exactly this colour."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    panel = pixels[550:940, 840:1480]
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


def test_panels_are_wide_whatever_the_stages(tmp_path, make_report):
    many = StageSeconds(
        sample=1.0, gather=1.0, forward=1.0, backward=1.0, update=1.0, evaluate=1.0, total=6.0
    )
    tiers = tuple(TierTraffic(name, "feat", 1, 1) for name in TIER_COLOURS)
    plot_curves([make_report(n, seconds=many, tiers=tiers) for n in (1, 2)], tmp_path / "a.png")
    pixels = _pixels(tmp_path / "a.png")
    # The bars of two epochs are 0.8 of an axis of 2.2 each.
    for columns, colour in ((slice(0, 750), STAGE_COLOURS), (slice(750, 1500), TIER_COLOURS)):
        rgb = [int(next(iter(colour.values()))[i : i + 2], 16) for i in (1, 3, 5)]
        found = (pixels[525:940, columns] == rgb).all(axis=2).any(axis=0).sum()
        assert found > 0.6 * 0.8 * 2 / 2.2 * 750


def test_an_epoch_that_compiled_leaves_the_others_to_be_seen(tmp_path, make_report):
    compiled = StageSeconds(sample=900.0, gather=2.0, compute=3.0, evaluate=4.0, total=950.0)
    reports = [make_report(1, seconds=compiled), *(make_report(n) for n in (2, 3, 4))]
    plot_curves(reports, tmp_path / "curves.png")
    shown = _pixels(tmp_path / "curves.png")[525:940, 300:740]
    rgb = [int(STAGE_COLOURS["gather"][i : i + 2], 16) for i in (1, 3, 5)]
    # 2 s of about 14 s, in three of four bars.
    assert (shown == rgb).all(axis=2).mean() > 0.04


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
