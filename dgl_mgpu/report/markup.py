"""Pieces of a page: tables, bars of colours, legends, pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any


def facts(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A heading, and below it names with their values; nothing where there are none."""
    if values:
        rows = (
            f"<tr><td>{escape(name)}</td><td>{escape('-' if v is None else str(v))}</td></tr>"
            for name, v in values.items()
        )
        yield f"<h2>{escape(title)}</h2>"
        yield f'<table class="facts">{"".join(rows)}</table>'


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def bar(parts: Iterable[tuple[str, float]]) -> str:
    """A bar of colours, and the shares of its width that they take; all of it if they are more."""
    spans = (
        f'<span style="width:{100 * share:.2f}%;background:{colour}"></span>'
        for colour, share in parts
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def legend(colours: Mapping[str, str]) -> str:
    """What colours stand for."""
    keys = (
        f'<span class="key" style="background:{colour}"></span>{escape(name)}'
        for name, colour in colours.items()
    )
    return f"<p>{''.join(keys)}</p>"


def image(png: bytes, text: str) -> str:
    """A picture that is part of the page, and what is on it in words."""
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">'
