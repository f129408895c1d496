"""Draws the pictures of these pages: ``python docs/pictures/draw.py`` writes them all.

Those of architecture.md are SVG files, on a light ground of their own, so that they can be read on
dark pages, too.  That of howto/command-line.md is what its command draws, and what the command
prints is written into the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dgl_mgpu.cli import main

INK, GROUND, LINE = "#1f2328", "#fbfbf9", "#5b6470"
#: Fills: what runs, memory, what is handed on.
WORK, MEMORY, DATA = "#dbe8fb", "#dff1e1", "#fdeecf"


@dataclass
class Picture:
    """Shapes of an SVG picture, in pixels from the upper left corner."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, fill: str, *lines: str) -> None:
        """A box; its first line is printed bold."""
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}"'
            f' stroke="{LINE}"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * number + 5, line, bold=number == 0)

    def text(
        self, x: float, y: float, line: str, *, bold: bool = False, anchor: str = "middle"
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'
        )

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """Straight from point to point, with its head at the last."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{dash}'
            ' marker-end="url(#head)"/>'
        )

    def line(self, *points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"/>'
        )

    def svg(self) -> str:
        head = (
            f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
            f' markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker>'
        )
        shapes = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="img"'
            f' font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{GROUND}"/>\n'
            f"{shapes}\n</svg>\n"
        )


def minibatch() -> Picture:
    """A seed's way to a loss."""
    draw = Picture(900, 430, "A seed node's way to a loss")
    draw.text(24, 34, "made ahead of time, on a quarter of the GPU (a side stream)", anchor="start")
    draw.box(24, 50, 150, 78, DATA, "seed nodes", "an epoch's order,", "dealt out to ranks")
    draw.box(
        220, 50, 210, 78, WORK, "sample the hops", "DGL's NeighborSampler", "→ ops.sample_blocks"
    )
    draw.box(476, 50, 170, 78, DATA, "blocks", "edges, and the ids of", "their input nodes")
    draw.box(692, 50, 184, 78, WORK, "gather features", "prefetch_node_feats", "→ ops.gather_rows")
    for start, stop in ((174, 220), (430, 476), (646, 692)):
        draw.arrow((start, 89), (stop, 89))

    draw.box(220, 186, 656, 84, MEMORY, "the store, one for all ranks", "", "")
    for x, name in ((240, "this GPU"), (400, "other GPUs"), (560, "host memory"), (720, "disk")):
        draw.box(x, 222, 136, 34, "#ffffff", name)
    draw.arrow((325, 186), (325, 128))
    draw.text(333, 162, "topology: GPUs and host", anchor="start")
    draw.arrow((784, 186), (784, 128))
    draw.text(776, 162, "features: all four", anchor="end")

    draw.text(24, 316, "the script's stream, meanwhile with the batch before", anchor="start")
    draw.box(692, 332, 184, 78, DATA, "mini-batch", "blocks with features", "and labels")
    draw.box(476, 332, 170, 78, WORK, "model", "dgl.nn", "→ ops.spmm, sddmm, …")
    draw.box(
        220,
        332,
        210,
        78,
        WORK,
        "loss and gradients",
        "backward through blocks",
        "transposed by a kernel",
    )
    draw.box(24, 332, 150, 78, WORK, "optimizer", "gradients averaged", "over ranks")
    draw.arrow((876, 89), (888, 89), (888, 371), (876, 371))
    for start, stop in ((692, 646), (476, 430), (220, 174)):
        draw.arrow((start, 371), (stop, 371))
    return draw


def row() -> Picture:
    """A row's way from disk to a kernel."""
    draw = Picture(900, 640, "A row's way from the data to a kernel")
    draw.text(24, 34, "once, when the store is built", anchor="start")
    draw.box(24, 50, 190, 78, DATA, "data", "files or a DGLGraph,", "read by the first rank")
    draw.box(
        254, 50, 190, 78, WORK, "hotness", "how often a row is read:", "the order of positions"
    )
    draw.box(484, 50, 170, 78, WORK, "plan", "the solver cuts the", "order into tiers")
    draw.box(694, 50, 182, 78, WORK, "segments", "one piece of memory a", "part, mapped by ranks")
    for start, stop in ((214, 254), (444, 484), (654, 694)):
        draw.arrow((start, 89), (stop, 89))

    tiers = (
        (24, "replicated", "one part,", "a copy on each GPU"),
        (244, "partitioned", "GPU (p - start) % parts", "row (p - start) // parts"),
        (464, "host memory", "one part, registered", "with every GPU"),
        (684, "disk", "one part, a file;", "read by the CPU"),
    )
    draw.text(24, 172, "hot", anchor="start")
    draw.text(876, 172, "cold", anchor="end")
    draw.arrow((56, 168), (836, 168), dashed=True)
    for x, *lines in tiers:
        draw.box(x, 184, 192, 74, MEMORY, *lines)
    draw.arrow((785, 128), (785, 160))

    draw.text(24, 306, "in each gather, for each id", anchor="start")
    draw.box(
        24, 322, 190, 78, WORK, "id → position", "an array, only where", "there are several tiers"
    )
    draw.box(
        254, 322, 190, 78, WORK, "position → place", "a comparison a tier,", "a modulo, a division"
    )
    draw.box(484, 322, 170, 78, DATA, "address", "pointers[part]", "+ row * row_bytes")
    draw.box(694, 322, 182, 78, WORK, "load", "whole lines; host rows", "in order of address")
    for start, stop in ((214, 254), (444, 484), (654, 694)):
        draw.arrow((start, 361), (stop, 361))
    for x in (120, 340):
        draw.line((x, 258), (x, 284), (569, 284))
    draw.arrow((569, 258), (569, 322))

    draw.text(24, 448, "where the row is on disk: its address is 0", anchor="start")
    draw.box(484, 464, 170, 60, MEMORY, "cache", "in this GPU's memory")
    draw.box(254, 464, 190, 60, DATA, "list of what is missing", "positions, to the host")
    draw.box(24, 464, 190, 60, WORK, "the CPU reads", "all of them from the file")
    draw.arrow((569, 400), (569, 464))
    draw.arrow((654, 494), (785, 494), (785, 400))
    draw.text(672, 486, "there", anchor="start")
    draw.arrow((484, 494), (444, 494))
    draw.arrow((254, 494), (214, 494))
    draw.box(
        24,
        556,
        852,
        60,
        DATA,
        "rows, in the order of the ids",
        "cast on the way where a dtype is asked for",
    )
    draw.arrow((119, 524), (119, 556))
    draw.arrow((845, 400), (845, 556))
    draw.text(135, 546, "and into the cache", anchor="start")
    return draw


def fullgraph() -> Picture:
    """An epoch of full-graph training."""
    draw = Picture(900, 560, "An epoch of full-graph training, on two ranks")
    draw.box(
        24,
        24,
        852,
        46,
        DATA,
        "partition_graph: each rank has a range of nodes and their in-edges, in tiles by source",
    )
    for left, rank, other in ((24, 0, 1), (464, 1, 0)):
        # What a rank fetches is drawn beside the other's rows.
        fetch, own = (left + 216, left) if rank == 0 else (left, left + 216)
        draw.arrow((left + 206, 70), (left + 206, 96))
        draw.box(left, 96, 412, 46, MEMORY, f"rank {rank}: own rows, in a window that others read")
        draw.box(own, 208, 196, 62, WORK, "sum tile 0", "sources: own rows")
        draw.box(
            fetch, 208, 196, 62, WORK, f"fetch from rank {other}", "by copy engines, meanwhile"
        )
        draw.box(left + 108, 304, 196, 62, WORK, "sum tile 1", f"sources: rank {other}'s rows")
        draw.arrow((own + 98, 142), (own + 98, 208))
        inner, outer = left + 108, left + 304
        draw.arrow((left + 98, 270), (left + 98, 335), (inner, 335))
        draw.arrow((left + 314, 270), (left + 314, 335), (outer, 335))
        draw.box(left, 400, 412, 46, WORK, "product with the weights, activation; next layer")
        draw.arrow((left + 206, 366), (left + 206, 400))
    draw.arrow((520, 142), (380, 208), dashed=True)
    draw.arrow((380, 142), (520, 208), dashed=True)
    draw.box(
        24,
        480,
        852,
        56,
        WORK,
        "loss, and the same way back",
        "what a rank's edges contribute to a row goes to its owner; "
        "gradients of weights are added up over ranks",
    )
    draw.arrow((230, 446), (230, 480))
    draw.arrow((670, 446), (670, 480))
    return draw


PICTURES = {"minibatch": minibatch, "row": row, "fullgraph": fullgraph}
HOWTO = Path(__file__).parents[1] / "howto"
#: Commands whose output is the block of text below them on a page, by the pictures they draw.
PLACEMENTS = {
    "placement": (
        "plan data=generated-twitter topology=dgx1 store.gpu_memory=5GiB --plot",
        HOWTO / "command-line.md",
    ),
    "machines": (
        "plan data=generated-products topology=8x-hgx-h200 store.gpu_memory=64MiB store.span=job "
        "--plot",
        HOWTO / "several-machines.md",
    ),
}
#: Under this name the picture has the output of the run that it was drawn by.
OUTPUT = "Output"


def placement(name: str, file: Path) -> str:
    """Draw a placement: what each GPU holds and how busy its links are; return what the command
    prints."""
    command, _ = PLACEMENTS[name]
    printed = io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(printed):
            status = main([*f"{command}={file}".split()])
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    if status:
        sys.exit(status)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    output = "".join(f"{line}\n" for line in lines if not line.startswith("picture: "))
    with Image.open(file) as picture:
        texts = PngInfo()
        texts.add_text(OUTPUT, output, zip=True)
        picture.load()
        picture.save(file, pnginfo=texts, dpi=picture.info["dpi"])
    return output


def blocks(name: str) -> re.Pattern[str]:
    """The command's block and that of its output, in three parts."""
    command = re.escape(PLACEMENTS[name][0])
    return re.compile(rf"(```bash\ndgl-mgpu {command}\n```\n+```text\n)(.*?)(```\n)", re.DOTALL)


def output_on(name: str) -> str:
    """What the page says that the command prints."""
    found = blocks(name).search(PLACEMENTS[name][1].read_text())
    return found[2] if found else ""


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(picture().svg())
    for name, (_, page) in PLACEMENTS.items():
        output = placement(name, Path(__file__).with_name(f"{name}.png"))
        page.write_text(
            blocks(name).sub(
                lambda found, output=output: found[1] + output + found[3],  # type: ignore[misc]
                page.read_text(),
            )
        )
