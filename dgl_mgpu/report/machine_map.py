"""A machine as a map: GPUs in a row with their contents, links above, host and disk below, and
below these the machines that it shares the rows with."""

from __future__ import annotations

import math

import numpy as np

from dgl_mgpu.placement import Load, MachineShare, Plan
from dgl_mgpu.report.colours import LOCATION_COLOURS
from dgl_mgpu.report.placement import (
    LinkUtilisation,
    bytes_by_location,
    contents,
    device_noun,
    is_on_cpu,
    is_shared,
)
from dgl_mgpu.utils.extras import required
from dgl_mgpu.utils.units import human_bytes

with required("draw a picture"):
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap, to_hex
    from matplotlib.patches import Arc, Patch, Rectangle

#: From an idle link to one that is always busy, by lightness alone, for every kind of eyesight.
BUSY = LinearSegmentedColormap.from_list("busy", ["#d9d9d9", "#c994c7", "#ce1256", "#3f0021"])

_LOCATION_LABELS = {
    "every": "on every one (replicated)",
    "several": "dealt out, several copies",
    "one": "dealt out, one copy",
    "host": "host memory",
    "disk": "disk",
}
_UNUSED = "#bbbbbb"
_MAX_NAMES = 8
#: GPUs of which each has room for its numbers; of more, so many have.
_MAX_NUMBERS, _NUMBERS_OF_MORE = 16, 9
_HALF = 0.40  # of a GPU's box, whose middle is at its number
# Heights, GPUs' boxes being from 0 to 1.
_HUB, _WAY, _GROUP = 1.7, -0.42, -0.98
_BOX = 0.42  # of host memory and disk
_SLIVER = 0.04  # contents of a memory are drawn at least as long as this, to be seen


class MachineMap:
    """Draws the map of a plan on axes."""

    def __init__(self, axes: Axes, plan: Plan, busy: LinkUtilisation) -> None:
        self._axes = axes
        self._plan = plan
        self._busy = busy
        self._contents = contents(plan)
        self._gpus = range(plan.num_gpus)
        self._with_numbers = set(with_numbers(plan.num_gpus))
        self._small = 9 if plan.num_gpus <= _MAX_NAMES else 8
        self._left, self._right = -_HALF, plan.num_gpus - 1 + _HALF
        self._middle = (self._left + self._right) / 2
        # From the middle of a line to a text beside it.
        self._beside = 0.08 * max(1.0, plan.num_gpus / _MAX_NAMES)
        # The bandwidth of shared memory is not measured.
        self._assumed = " (assumed)" if is_on_cpu(plan) else ""

    def draw(self) -> None:
        plan, n = self._plan, self._plan.num_gpus
        for gpu in self._gpus:
            self._memory(gpu - _HALF, 0.0, 2 * _HALF, 1.0, gpu, plan.gpu_budget[gpu])
            if gpu not in self._with_numbers:
                continue
            self._write(gpu, 0.5, gpu_name(plan, gpu), weight="bold", size=11, boxed=True)
            held, most = human_bytes(plan.gpu_bytes[gpu]), human_bytes(plan.gpu_budget[gpu])
            self._write(gpu, -0.2, f"{held}\nof {most}", size=self._small)
        top = self._peers()
        low = self._host()
        if plan.disk_budget:
            low = self._disk(low)
        if plan.share is not None:
            low = self._machines(low, plan.share)
        self._legend()
        self._axes.set_xlim(
            min(self._left - 0.03, n / 2 - 2.2), max(self._right + 0.03, n / 2 + 1.2)
        )
        self._axes.set_ylim(low - 0.1, top)
        self._axes.set_axis_off()

    def _peers(self) -> float:
        """The links between GPUs; the height of what was drawn."""
        links = [
            load for load in self._plan.loads
            if load.kind == "peer" and len(load.readers) == len(load.holders) == 1
        ]  # fmt: skip
        ports = [
            load.bandwidth
            for load in self._plan.loads
            if load.kind == "peer" and len(load.holders) > 1
        ]
        if not links:
            return self._hub([], ports) if ports else 1.1
        n = self._plan.num_gpus
        widths = {load.bandwidth for load in links}
        are_all_equal = len(widths) == 1 and len({_ends(x) for x in links}) == n * (n - 1) // 2
        if are_all_equal and (n > 4 or not np.isnan(self._busy.taken).all()):
            return self._hub([f"{min(widths):g} GB/s from one"], ports)
        return self._arcs(links, max(widths))

    def _hub(self, speeds: list[str], ports: list[float]) -> float:
        """One bar in place of a link for every two GPUs."""
        if ports:
            speeds = [*speeds, f"{min(ports):g} GB/s from all others together"]
        for gpu in self._gpus:
            share = self._busy.peer_share(gpu)
            self._line((gpu, gpu), (1.0, _HUB), _colour(share), 5)
            if gpu in self._with_numbers:
                self._write(gpu + 0.06, (1 + _HUB) / 2, percent(share), size=9, align="left")
        self._line((self._left, self._right), (_HUB, _HUB), "0.25", 7)
        name = device_noun(self._plan)
        text = f"every {name} reads every other's memory: {', '.join(speeds)}"
        self._write(self._middle, _HUB + 0.22, text + self._assumed, size=10)
        return _HUB + 0.4

    def _arcs(self, links: list[Load], widest: float) -> float:
        """A link as an arc, as thick as it is fast; the busier of its two directions counts."""
        slots = _slots(links)
        top = 1.0
        for one, other in sorted({_ends(load) for load in links}):
            share = np.nanmax([self._busy.links[one, other], self._busy.links[other, one]])
            bandwidth = max(load.bandwidth for load in links if _ends(load) == (one, other))
            left, right = one + slots[one, other], other + slots[other, one]
            middle, height = (left + right) / 2, 0.42 * (other - one) ** 0.75
            self._axes.add_patch(
                Arc(
                    (middle, 1.0), right - left, 2 * height, theta1=0, theta2=180,
                    color=_colour(share), linewidth=1.5 + 3.5 * bandwidth / widest,
                )
            )  # fmt: skip
            self._write(middle, 1 + height, percent(share), size=self._small, boxed=True)
            top = max(top, 1 + height)
        speeds = [f"{speed:g}" for speed in sorted({load.bandwidth for load in links})]
        text = f"links between {device_noun(self._plan)}s: {' or '.join(speeds)} GB/s each way"
        text += ", thicker is faster" if len(speeds) > 1 else ""
        self._write(self._left, top + 0.25, text + self._assumed, size=10, align="left")
        return top + 0.4

    def _host(self) -> float:
        plan = self._plan
        ways = [load for load in plan.loads if load.kind == "host"]
        groups = [load for load in ways if is_shared(load)]
        top = _GROUP - 0.45 if groups else _GROUP
        for load in ways:
            if is_shared(load):
                continue
            gpu = load.readers[0]
            end = _GROUP if any(gpu in group.readers for group in groups) else top
            share = float(self._busy.host[gpu])
            self._line((gpu, gpu), (_WAY, end), _colour(share), 4)
            if gpu in self._with_numbers:
                text = f"{percent(share)}\n{load.bandwidth:g} GB/s"
                self._write(gpu + 0.06, _WAY - 0.22, text, size=self._small, align="left")
        for number, group in enumerate(groups):
            share = self._busy.shared[group.readers]
            left, right = min(group.readers), max(group.readers)
            middle = (left + right) / 2
            self._line((left - 0.2, right + 0.2), (_GROUP, _GROUP), _colour(share), 7)
            self._line((middle, middle), (_GROUP, top), _colour(share), 6)
            if number == 0 or plan.num_gpus <= _MAX_NUMBERS:
                text = f"{percent(share)}, {group.bandwidth:g} GB/s shared"
                self._write(
                    middle + self._beside, (_GROUP + top) / 2, text, size=self._small, align="left"
                )
        return self._wide_memory(
            top, plan.num_gpus, plan.host_bytes, plan.host_budget, "host memory"
        )

    def _disk(self, host: float) -> float:
        plan, busy = self._plan, self._busy.disk
        if not math.isnan(busy):
            self._line((self._middle, self._middle), (host, host - 0.5), _colour(busy), 6)
            speed = next(load.bandwidth for load in plan.loads if load.kind == "disk")
            text = f"{percent(busy)}, {speed:g} GB/s"
            self._write(
                self._middle + self._beside, host - 0.25, text, size=self._small, align="left"
            )
        index = plan.num_gpus + 1
        return self._wide_memory(host - 0.5, index, plan.disk_bytes, plan.disk_budget, "disk")

    def _machines(self, above: float, share: MachineShare) -> float:
        """All machines, as boxes of what each has: what all have below what it has alone."""
        load = next(load for load in self._plan.loads if load.kind == "network")
        busy = float(np.nanmax(self._busy.network))
        bar, top = above - 0.5, above - 0.72
        self._line((self._middle, self._middle), (above, bar), _colour(busy), 6)
        self._line((self._left, self._right), (bar, bar), _colour(busy), 7)
        text = (
            f"network: {percent(busy)}, {load.bandwidth:.3g} GB/s a {device_noun(self._plan)}, "
            f"{human_bytes(load.nbytes)} a step"
        )
        self._write(self._middle + self._beside, above - 0.25, text, size=self._small, align="left")
        step = (self._right - self._left) / share.num_machines
        width, low = 0.8 * step, top - _BOX
        replicated = share.replicated_bytes / max(share.replicated_bytes + share.own_bytes, 1)
        for machine in range(share.num_machines):
            x = self._left + (machine + 0.1) * step
            for start, part, colour in (
                (0.0, replicated, LOCATION_COLOURS["every"]),
                (replicated, 1 - replicated, LOCATION_COLOURS["one"]),
            ):
                corner, size = (x, low + start * _BOX), (width, part * _BOX)
                self._axes.add_patch(Rectangle(corner, *size, facecolor=colour, linewidth=0))
            frame = Rectangle((x, low), width, _BOX, fill=False, edgecolor="0.25", linewidth=1.3)
            self._axes.add_patch(frame)
            self._line((x + width / 2, x + width / 2), (top, bar), _colour(busy), 2)
        text = (
            f"{share.num_machines} machines, this one first: on each of them "
            f"{human_bytes(share.replicated_bytes)}, on it alone {human_bytes(share.own_bytes)}"
        )
        self._write(self._middle, low - 0.15, text, size=self._small)
        return low - 0.25

    def _wide_memory(self, top: float, index: int, held: int, most: int, name: str) -> float:
        """A box below all GPUs; its lower edge."""
        low, width = top - _BOX, self._right - self._left
        self._memory(self._left, low, width, _BOX, index, most, upwards=False)
        text = f"{name}: {human_bytes(held)} of {human_bytes(most)}"
        self._write(self._middle, low + _BOX / 2, text, size=10, boxed=True)
        return low

    def _memory(
        self, x: float, y: float, width: float, height: float, index: int, budget: int,
        upwards: bool = True,
    ) -> None:  # fmt: skip
        """A box, filled as far as the budget is used."""
        held = self._contents[index]
        shares = {at: held[at] / max(budget, 1) for at in LOCATION_COLOURS if at in held}
        start = 0.0
        least = _SLIVER / (height if upwards else width)
        for location, share in _visible_shares(shares, least).items():
            corner = (x, y + start * height) if upwards else (x + start * width, y)
            size = (width, share * height) if upwards else (share * width, height)
            filled = Rectangle(corner, *size, facecolor=LOCATION_COLOURS[location], linewidth=0)
            self._axes.add_patch(filled)
            start += share
        frame = Rectangle((x, y), width, height, fill=False, edgecolor="0.25", linewidth=1.3)
        self._axes.add_patch(frame)

    def _legend(self) -> None:
        handles = []
        for location, colour in LOCATION_COLOURS.items():
            held = [memory[location] for memory in self._contents if location in memory]
            if held:
                handles.append(Patch(facecolor=colour, label=self._label(location, held)))
        # Two columns are not wider than the map.
        self._axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2,
            frameon=False, fontsize=10,
        )  # fmt: skip

    def _label(self, location: str, held: list[float]) -> str:
        """The meaning of a colour, and its bytes on the GPUs that have any."""
        least, most = human_bytes(min(held)), human_bytes(max(held))
        size = most if min(held) > 0.99 * max(held) else f"{least} to {most}"
        if location in ("host", "disk"):
            # Rows on GPUs that some GPUs cannot reach, which read them here.
            both = held[0] - sum(
                bytes_by_location(self._plan, name).get(location, 0.0) for name in self._plan.tables
            )
            also = f", {human_bytes(both)} of it on GPUs, too" if both > 0.01 * held[0] else ""
            return f"{_LOCATION_LABELS[location]}: {size}{also}"
        alone = self._plan.num_gpus == 1
        name = device_noun(self._plan)
        label = f"on the {name}" if alone else _LOCATION_LABELS[location]
        return f"{label}: {size}" + ("" if alone else f" a {name}")

    def _line(
        self, x: tuple[float, float], y: tuple[float, float], colour: str, width: float
    ) -> None:
        self._axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="butt")

    def _write(
        self, x: float, y: float, text: str, *, size: float, weight: str = "normal",
        align: str = "center", boxed: bool = False,
    ) -> None:  # fmt: skip
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
        self._axes.text(
            x, y, text, ha=align, va="center", fontsize=size, fontweight=weight, zorder=3,
            linespacing=1.05, bbox=box if boxed else None,
        )  # fmt: skip


def _visible_shares(shares: dict[str, float], least: float) -> dict[str, float]:
    """Shares of a box, at least `least` each, at the cost of the largest."""
    seen = {location: max(share, least) for location, share in shares.items()}
    if sum(seen.values()) > 1.0:
        largest = max(seen, key=seen.__getitem__)
        seen[largest] -= sum(seen.values()) - 1.0
    return seen


def _slots(links: list[Load]) -> dict[tuple[int, int], float]:
    """Offsets, from the middle of a GPU's upper edge, of its links to others.

    Those to the nearest GPUs lie outside, so that few arcs cross.
    """
    slots = {}
    for gpu in {end for load in links for end in _ends(load)}:
        peers = {sum(_ends(load)) - gpu for load in links if gpu in _ends(load)}
        left = sorted((peer for peer in peers if peer < gpu), reverse=True)
        right = sorted((peer for peer in peers if peer > gpu), reverse=True)
        for place, peer in enumerate(left + right):
            slots[gpu, peer] = _HALF * ((2 * place + 1) / len(peers) - 1)
    return slots


def _ends(load: Load) -> tuple[int, int]:
    one, other = load.readers[0], load.holders[0]
    return min(one, other), max(one, other)


def gpu_name(plan: Plan, gpu: int) -> str:
    """A GPU's name, short where there are many."""
    return f"{device_noun(plan)} {gpu}" if plan.num_gpus <= _MAX_NAMES else str(gpu)


def with_numbers(num_gpus: int) -> range:
    """GPUs whose numbers there is room for."""
    step = 1 if num_gpus <= _MAX_NUMBERS else math.ceil(num_gpus / _NUMBERS_OF_MORE)
    return range(0, num_gpus, step)


def _colour(share: float) -> str:
    return to_hex(BUSY(share)) if share > 0 else _UNUSED


def percent(share: float) -> str:
    """A share in 0..1 without decimals."""
    return f"{100 * share:.0f}%"
