"""One colour for each stage and each tier, wherever they are drawn."""

from __future__ import annotations

# Okabe and Ito's palette, told apart with every common kind of colour blindness.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE, YELLOW = "#0072B2", "#D55E00", "#CC79A7", "#F0E442"
GREY = "#999999"

STAGE_COLOURS = {
    "sample": ORANGE, "gather": SKY, "compute": GREEN, "forward": GREEN, "backward": BLUE,
    "update": RED, "evaluate": PURPLE,
}  # fmt: skip
TIER_COLOURS = {
    "device": GREEN, "replica": SKY, "peer": BLUE, "host": ORANGE, "remote": PURPLE, "disk": RED,
}  # fmt: skip
# By the location of a placement's rows, from near to far.
LOCATION_COLOURS = {"every": GREEN, "several": SKY, "one": BLUE, "host": ORANGE, "disk": RED}
