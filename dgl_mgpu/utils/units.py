"""Numbers as people read them: bytes, seconds, counts and shares.

Plain ASCII throughout, because the text also goes to logs of unknown encoding.
"""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")


def human_bytes(count: float) -> str:
    """Bytes in binary units and three significant digits: ``"1.50 GiB"``, ``"512 B"``."""
    return _scaled(count, 1024, _BYTE_UNITS, " ")


def human_count(count: float) -> str:
    """A count in decimal units and three significant digits: ``"12.3k"``, ``"999"``."""
    return _scaled(count, 1000, _COUNT_UNITS, "")


def human_seconds(seconds: float) -> str:
    """A duration in the unit that fits: ``"85.0 us"``, ``"1.23 s"``, ``"2 min 03 s"``."""
    if not math.isfinite(seconds):
        return str(seconds)
    magnitude = abs(seconds)
    if magnitude >= 59.95:  # what would print as "60.0 s" is a minute
        minutes, rest = divmod(round(magnitude), 60)
        hours, minutes = divmod(minutes, 60)
        sign = "-" if seconds < 0 else ""
        if hours:
            return f"{sign}{hours} h {minutes:02d} min"
        return f"{sign}{minutes} min {rest:02d} s"
    if magnitude >= 0.9995 or magnitude == 0.0:
        return f"{_three_digits(seconds)} s"
    if magnitude >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def human_share(share: float) -> str:
    """A share in 0..1 as a percentage with one decimal: ``"87.5%"``."""
    return f"{100.0 * share:.1f}%"


def _scaled(value: float, base: int, units: tuple[str, ...], space: str) -> str:
    """Divide by `base` until three digits before the point suffice."""
    if not math.isfinite(value):
        return str(value)
    power = 0
    scaled = float(value)
    # 999.5 would print as 1000: the next unit says it better.
    while abs(scaled) >= 999.5 and power + 1 < len(units):
        scaled /= base
        power += 1
    digits = f"{scaled:.0f}" if power == 0 and scaled == int(scaled) else _three_digits(scaled)
    return f"{digits}{space}{units[power]}"


def _three_digits(value: float) -> str:
    """Three significant digits without an exponent, trailing zeros kept."""
    magnitude = abs(value)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:.{decimals}f}"
