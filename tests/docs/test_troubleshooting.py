"""docs/troubleshooting.md: a section for each error, with messages that the code has."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from dgl_mgpu import errors
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)$\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.DGLMGPUError) and name[0] != "_"
}
QUOTED = [
    (section, message)
    for section, text in SECTIONS.items()
    for cell in re.findall(r"^\| (`.*?) \| ", text, re.M)
    for message in re.findall(r"`(.*?)`", cell)
]


@functools.cache
def texts() -> list[str]:
    """The package's texts, with … for what is filled in."""
    found = []
    for path in (ROOT / "dgl_mgpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "…" for each in node.values
                ]
                found.append("".join(map(str, parts)))
    return found


def is_in_the_code(message: str) -> bool:
    parts = message.split("…")
    return any(all(part in text for part in parts) for text in texts())


def test_every_error_has_its_section_in_their_order():
    assert list(SECTIONS) == list(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_a_section_names_the_built_in_exception(name):
    """And says more than a line."""
    bases = [base for base in CLASSES[name].__mro__[1:] if base.__module__ == "builtins"]
    nearest = bases[0].__name__ if bases else "Exception"
    if nearest != "Exception":
        own_base = any(f"`{base.__name__}`" in SECTIONS[name] for base in CLASSES[name].__bases__)
        assert f"`{nearest}`" in SECTIONS[name] or own_base
    assert len(SECTIONS[name].split()) > 15


@pytest.mark.parametrize(("section", "message"), QUOTED)
def test_quoted_messages_are_raised(section, message):
    assert is_in_the_code(message)


def test_a_message_that_is_not_raised_is_found():
    assert QUOTED
    assert not is_in_the_code("no such … in the code of this package")
