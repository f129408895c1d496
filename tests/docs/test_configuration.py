"""The tables of configuration keys have every key, with the value that a run has."""

from __future__ import annotations

import re
import runpy
from dataclasses import asdict
from typing import Any

import pytest
import yaml

from dgl_mgpu.placement import POLICIES
from dgl_mgpu.train.compose import compose
from tests.docs.pages import ROOT

CONFIGURATION = runpy.run_path(str(ROOT / "docs" / "_ext" / "configuration.py"))


def leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in node.items():
        below = leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {}
        found |= below or {f"{prefix}{key}": value}
    return found


def test_every_key_has_a_row_with_its_default(monkeypatch):
    monkeypatch.delenv("DGL_MGPU_DATA", raising=False)
    rows = [line.split(" | ")[:2] for line in CONFIGURATION["tables"]().splitlines()]
    defaults = {key.strip("| `"): value[0].strip("`") for key, *value in rows if value}
    for key, value in leaves(asdict(compose([]))).items():
        if key == "data.root":
            assert defaults[key].endswith(f",{value}}}")  # what the environment says, or this
        else:
            assert yaml.safe_load(defaults[key]) == value, key


def test_every_key_and_choice_is_explained():
    rows = [line.strip("| ").split(" |") for line in CONFIGURATION["tables"]().splitlines()]
    rows = [cells for cells in rows if cells[0].startswith("`")]
    assert rows
    assert [cells[0] for cells in rows if not cells[-1].strip()] == []


def test_all_policies_are_named():
    """As a key's comment, a file of YAML cannot take them from the code."""
    (row,) = (line for line in CONFIGURATION["tables"]().splitlines() if "`store.policy`" in line)
    assert set(re.findall(r"\w+", row.split(" | ")[2])) >= set(POLICIES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# head\n\na: 1  # beside\n", ("g.a", "1", "beside")),
        ("# head\n\n# above,\n# two lines\na: [1, 2]\n", ("g.a", "[1, 2]", "above, two lines")),
        ("a: x  # one;\n      # two\nb: y\n", ("g.a", "x", "one; two")),
        ("# @package _global_\n# head\na:\n  b: {}\n", ("a.b", "{}", "")),
    ],
)
def test_comments_are_found(text, expected, tmp_path):
    (tmp_path / "file.yaml").write_text(text)
    assert tuple(CONFIGURATION["keys"](tmp_path / "file.yaml", "g")[0]) == expected
