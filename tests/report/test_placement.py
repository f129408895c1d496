"""What a plan's picture shows is what the plan says, summed here row by row and by hand."""

from __future__ import annotations

import io
import itertools
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.machine import HostGroup, Network, Topology, preset
from dgl_mgpu.placement import HOST, MachineShare, Plan, TableSpec, locate, solve
from dgl_mgpu.placement.cost import efficiency, over_network
from dgl_mgpu.report import machine_map
from dgl_mgpu.report.colours import LOCATION_COLOURS
from dgl_mgpu.report.machine_map import MachineMap, with_numbers
from dgl_mgpu.report.placement import LinkUtilisation, bytes_by_location, contents, tier_bandwidths
from dgl_mgpu.report.placement_plot import placement_figure, plot_placements

ROWS, ROW_BYTES, READS = 240, 4096, 1000.0
HOT = 1.0 / np.arange(1, ROWS + 1)


def table(hotness=HOT):
    return TableSpec.features("feat", ROWS, ROW_BYTES, hotness, READS)


def placed(topology, share=0.3, **options):
    """A plan for GPUs that have room for so much of the table."""
    budget = int(share * ROWS * ROW_BYTES)
    return solve(topology, [table()], gpu_budget_bytes=budget, **options)


def two_gpus():
    """Two GPUs that share 30 GB/s to the host, where each alone has 25 and 20."""
    return Topology(
        name="two",
        link_bandwidth=np.array([[900.0, 50.0], [50.0, 900.0]]),
        gpu_memory=10**9,
        host_bandwidth=np.array([25.0, 20.0]),
        host_memory=10**9,
        host_groups=(HostGroup((0, 1), 30.0),),
        disk_bandwidth=4.0,
        disk_memory=10**9,
    )


def rows_of(plan):
    """Tier and part of every row of the table."""
    tiers = plan.tables["feat"].tiers
    where, part, _ = locate(np.arange(ROWS), tiers)
    return [(tiers[t], p) for t, p in zip(where.tolist(), part.tolist(), strict=True)]


MACHINES = {
    "dgx1": lambda: placed(preset("dgx1")),
    "dgx1-4gc, XGNN's copies": lambda: placed(preset("dgx1-4gc"), policy="xgnn"),
    "switch": lambda: placed(preset("hgx-h200"), 0.05),
    "PCIe, disk": lambda: placed(
        preset("pcie"), 0.02, host_budget=100 * ROW_BYTES, allow_disk=True
    ),
    "replicated": lambda: placed(preset("quad-v100"), policy="replicated"),
    "one GPU": lambda: placed(preset("single")),
    "no GPU": lambda: placed(preset("cpu", 2)),
    "no GPU, 16 ranks": lambda: placed(preset("cpu", 16), 0.03),
    "every kind of copies": lambda: placed(preset("dgx1"), 0.09, policy="clique_opt"),
}
#: Plans of one of several machines.
SHARES = {
    "64 machines": lambda: over_network(
        placed(preset("hgx-h200"), 0.05),
        MachineShare(64, 0.2, 200 << 30, 30 << 30, {"feat": 0.4}),
        Network(50.0, 1e-5),
        5e6,
        8,
    ),
    "two racks": lambda: over_network(
        placed(preset("gb200-nvl72"), 0.1),
        MachineShare(2, 0.2, 200 << 30, 30 << 30, {"feat": 0.4}),
        Network(50.0, 1e-5),
        5e6,
        8,
    ),
}


@pytest.fixture(scope="module", params=list(MACHINES))
def plan(request):
    return MACHINES[request.param]()


def test_bytes_of_each_memory_row_by_row(plan):
    n = plan.num_gpus
    expected = [dict.fromkeys(LOCATION_COLOURS, 0) for _ in range(n + 2)]
    once = dict.fromkeys(LOCATION_COLOURS, 0)
    for tier, part in rows_of(plan):
        holders = tier.copies[part]
        kept = {n: "every", 1: "one"}.get(len(holders), "several") if holders else tier.memory
        once[kept if n > 1 or not holders else "every"] += ROW_BYTES
        for gpu in holders:
            expected[gpu]["every" if n == 1 else kept] += ROW_BYTES
        if tier.memory == "host" or (holders and any(s[part] == HOST for s in tier.source)):
            expected[n]["host"] += ROW_BYTES
        if tier.memory == "disk":
            expected[n + 1]["disk"] += ROW_BYTES
    found = contents(plan)
    for memory, held in zip(found, expected, strict=True):
        assert memory == pytest.approx({kept: size for kept, size in held.items() if size})
    totals = [sum(memory.values()) for memory in found]
    assert totals == pytest.approx([*plan.gpu_bytes, plan.host_bytes, plan.disk_bytes], abs=4)
    assert bytes_by_location(plan, "feat") == pytest.approx(
        {k: size for k, size in once.items() if size}
    )


def test_loads_row_by_row(plan):
    n = plan.num_gpus
    reads = np.zeros((n, n + 2))
    for tier, part in rows_of(plan):
        # The model takes the rows of a tier to be as hot as each other.
        hot = (HOT / HOT.sum())[tier.start : tier.stop].mean()
        for gpu, source in enumerate(tier.source):
            if tier.memory == "gpu":
                memory = n if source[part] == HOST else source[part]
            else:
                memory = n if tier.memory == "host" else n + 1
            reads[gpu, memory] += READS * hot * ROW_BYTES
    for load in plan.loads:
        columns = {"host": [n, n + 1], "disk": [n + 1]}.get(load.kind, load.holders)
        moved = reads[np.ix_(load.readers, columns)].sum()
        assert load.nbytes == pytest.approx(moved, abs=1e-6)
        bandwidth = load.bandwidth * 1e9 * efficiency(load.kind, ROW_BYTES)
        assert load.seconds == pytest.approx(moved / bandwidth, abs=1e-15)


def test_busy_shares_are_bytes_over_bandwidth_over_time(plan):
    busy = LinkUtilisation.from_plan(plan)
    spent = {(load.kind, load.readers, load.holders): load for load in plan.loads}
    for (kind, readers, holders), load in spent.items():
        share = load.nbytes / (load.bandwidth * 1e9 * efficiency(kind, ROW_BYTES))
        share /= max(plan.seconds)
        if kind == "peer" and len(readers) == len(holders) == 1:
            assert busy.links[readers[0], holders[0]] == pytest.approx(share)
        elif kind == "host" and len(readers) == 1:
            assert busy.host[readers[0]] == pytest.approx(share)
    assert np.nanmax(np.concatenate([busy.links.ravel(), busy.host])) <= 1 + 1e-9
    linked = ~np.isnan(busy.links)
    np.fill_diagonal(linked, False)
    one_to_one = {(*r, *h) for k, r, h in spent if k == "peer" and len(r) == len(h) == 1}
    assert {tuple(pair) for pair in np.argwhere(linked).tolist()} == one_to_one


def test_a_step_by_hand():
    even = [table(np.ones(ROWS))]
    dealt = solve(two_gpus(), even, "partitioned")
    busy = LinkUtilisation.from_plan(dealt)
    # 500 rows over 50 GB/s; a GPU's memory serves its own 500 and the other's at 900 GB/s.
    assert dealt.step_seconds == pytest.approx(500 * 4096 / 50e9)
    assert busy.links == pytest.approx(np.array([[1 / 9, 1.0], [1.0, 1 / 9]]))
    assert busy.peer_share(0) == pytest.approx(1.0)
    # All 2000 rows of both come over the 30 GB/s that they share, of which reads reach 95 %.
    off = LinkUtilisation.from_plan(solve(two_gpus(), even, "host"))
    assert off.shared == {(0, 1): pytest.approx(1.0)}
    assert off.host == pytest.approx([30 / 50, 30 / 40])
    # Half of the rows on the disk: 1000 rows at 4 GB/s, after 2000 at 28.5.
    disk = solve(two_gpus(), even, "host", host_budget=120 * 4096, allow_disk=True)
    times = 2000 * 4096 / 28.5e9, 1000 * 4096 / 4e9
    assert disk.step_seconds == pytest.approx(sum(times))
    assert LinkUtilisation.from_plan(disk).disk == pytest.approx(times[1] / sum(times))
    assert LinkUtilisation.from_plan(disk).shared[0, 1] == pytest.approx(times[0] / sum(times))


def test_machines_that_share_rows():
    plan = SHARES["64 machines"]()
    busy = LinkUtilisation.from_plan(plan)
    # 5 MB at 50 GB/s and eight exchanges, beside what the machine's own memories take.
    network = 1e-4 + 8e-5
    assert busy.network == pytest.approx(np.full(8, network / plan.step_seconds))
    alone = placed(preset("hgx-h200"), 0.05).step_seconds
    assert plan.step_seconds == pytest.approx(alone + network)
    assert Plan.from_dict(plan.to_dict()).share == plan.share
    _, axes = _map(plan)
    texts = [text.get_text() for text in axes.texts]
    assert any(text.startswith("64 machines, this one first: on each") for text in texts)
    # A box of each machine has what all have, below what it has alone.
    heights = [
        box.get_height()
        for box in axes.patches
        if isinstance(box, Rectangle) and box.get_y() < -2 and box.get_facecolor()[3]
    ]
    assert len(heights) >= 128
    assert sum(h for h in heights if h > 0.3) / 64 == pytest.approx(0.42 * 200 / 230)


def test_what_a_switch_serves_and_takes():
    busy = LinkUtilisation.from_plan(
        solve(preset("hgx-h200"), [table(np.ones(ROWS))], "partitioned")
    )
    # Seven links of 396 GB/s behind ports of 373.
    assert busy.taken == pytest.approx(np.ones(8))
    assert busy.served == pytest.approx(np.ones(8))
    assert busy.links[0, 1] == pytest.approx(373 / 396 / 7)


def test_bandwidths_of_the_tiers_by_hand():
    expected = {"device": 900e9, "peer": 50e9, "host": 15e9, "disk": 2e9}
    assert tier_bandwidths(placed(two_gpus())) == pytest.approx(expected)
    alone = Topology("one", np.array([[900.0]]), 10**9, 25.0, 10**9)
    assert tier_bandwidths(placed(alone)) == pytest.approx({"device": 900e9, "host": 25e9})
    switch = tier_bandwidths(placed(preset("hgx-h200")))
    assert switch["peer"] == pytest.approx(373e9)
    assert switch["host"] == pytest.approx(27e9)
    # Two of its GPUs have one link, behind ports that are narrower.
    pair = tier_bandwidths(placed(preset("hgx-h200", 2)))
    assert pair["peer"] == pytest.approx(373e9)


def _map(plan):
    figure = Figure(figsize=(12.0, 6.0), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.08, 0.93, 0.9))
    MachineMap(axes, plan, LinkUtilisation.from_plan(plan)).draw()
    return figure, axes


def _fill(axes, gpu):
    """How much of a GPU's box is filled with each colour."""
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return {
        to_hex(box.get_facecolor()).upper(): box.get_height()
        for box in boxes
        if abs(box.get_x() + box.get_width() / 2 - gpu) < 0.01
        and 0.0 <= box.get_y() < 1.0
        and box.get_facecolor()[3]  # the frame is not filled
    }


def test_boxes_are_filled_as_far_as_memories_are(plan):
    _, axes = _map(plan)
    for gpu in range(plan.num_gpus):
        heights = _fill(axes, gpu)
        for kept, size in contents(plan)[gpu].items():
            # What is little is drawn as long as is seen, for which the largest makes room.
            share = size / plan.gpu_budget[gpu]
            assert heights[LOCATION_COLOURS[kept]] == pytest.approx(max(share, 0.04), abs=0.081)
        assert sum(heights.values()) <= 1 + 1e-9


def test_what_is_little_is_seen_within_a_full_box(monkeypatch):
    # The hottest row, on every GPU, takes 1 of 21, which is little when 0.3 is.
    monkeypatch.setattr(machine_map, "_SLIVER", 0.3)
    plan = MACHINES["every kind of copies"]()
    assert sorted(contents(plan)[0]) == ["every", "several"]
    heights = _fill(_map(plan)[1], 0)
    assert min(heights.values()) == pytest.approx(0.3)
    assert sum(heights.values()) == pytest.approx(1.0)


def _texts(figure):
    """Where text is drawn."""
    texts = [figure.subfigs[0]._suptitle]
    for axes in figure.subfigs[0].axes:
        texts += [*axes.texts, axes.title]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                places = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
                texts += [label for place, label in places if low <= place <= high]
    return [text for text in texts if text.get_text()]


@pytest.mark.parametrize(
    "machine",
    ["dgx1", "switch", "PCIe, disk", "one GPU", "no GPU, 16 ranks", "64 machines", "two racks"],
)
def test_no_text_lies_on_another_or_outside(machine):
    plan = {**MACHINES, **SHARES}[machine]()
    figure = placement_figure([plan], ["a data set on a machine, policy auto"])
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in _texts(figure)]
    assert len(boxes) >= 4 * len(with_numbers(plan.num_gpus)) + 5
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= 1500 and box.y1 <= 1320
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def test_pictures_of_plans_side_by_side(tmp_path):
    plans = [MACHINES["dgx1"](), MACHINES["PCIe, disk"]()]
    plot_placements(plans, tmp_path / "two.png", ["one", "other"])
    with Image.open(tmp_path / "two.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (3000, 1320))


def test_a_picture_in_memory_and_as_svg(tmp_path):
    plan, file = MACHINES["one GPU"](), io.BytesIO()
    plot_placements([plan], file, ["one"])
    assert Image.open(file).size == (1500, 1320)
    plot_placements([plan], tmp_path / "one.SVG", ["one"])
    assert ElementTree.parse(tmp_path / "one.SVG").getroot().tag.endswith("svg")


def test_what_cannot_be_drawn(tmp_path):
    plan = MACHINES["one GPU"]()
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        plot_placements([plan], tmp_path / "plan.bmp", ["one"])
    with pytest.raises(InvalidInputError):
        plot_placements([], tmp_path / "plan.png", [])
    earlier = plan.to_dict()
    del earlier["loads"]
    with pytest.raises(InvalidInputError, match="solve the plan again"):
        plot_placements([Plan.from_dict(earlier)], tmp_path / "plan.png", ["one"])
    assert list(tmp_path.iterdir()) == []
