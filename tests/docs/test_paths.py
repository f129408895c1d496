"""Files that pages name are there."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, ROOT

_PATH = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cu|cuh|yaml))`")
#: Examples, which readers are to write.
_EXAMPLES = {"script.py", "train.py", "my_kernels.py", "whole.py", "kernels/degree.cu"}


def named() -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), path)
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for path in dict.fromkeys(_PATH.findall(page.read_text()))
        if path not in _EXAMPLES and not path.startswith("FOLDER/")
    ]


@pytest.mark.parametrize(("page", "path"), named())
def test_a_file_is_where_a_page_says(page, path):
    if "/" in path:
        assert any((base / path).is_file() for base in (ROOT, ROOT / "dgl_mgpu")), path
    else:
        folders = ("dgl_mgpu", "kernels", "tests", "benchmarks", "configs", "docs")
        assert any(any((ROOT / folder).rglob(path)) for folder in folders), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_folder_of_the_project_is_where_a_page_says(page):
    folders = re.findall(r"\b(?:tests|dgl_mgpu)(?:/[a-z_]+)+(?![\w./*])", page.read_text())
    missing = [path for path in folders if not (ROOT / path).is_dir()]
    # That page also names folders that its reader makes.
    assert page.name == "extending.md" or not missing
