"""Sphinx's configuration: ``make docs`` builds docs/_build from the Markdown pages and docstrings.

Sources are relative to the checkout, and not to this folder, so that links between README.md and
the pages here are the same in the site as where the files are read one by one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
# For autodoc, and for the directives that are made of the code.
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import dgl_mgpu  # noqa: E402, F401  (lets DGL import)

project = "dgl_mgpu"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "docs/notebooks/*.ipynb"]
exclude_patterns = [".*", "data", "outputs", "dist", "build", "docs/_build"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc", "generated"]
nb_execution_mode = "off"  # the tests run notebooks, and compare what they show
myst_heading_anchors = 4  # those that GitHub gives to headings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types stand in the docstrings, with shapes and units
autodoc_mock_imports = ["numba.cuda"]  # of numba-cuda, which is for GPUs
numpydoc_show_class_members = False  # autodoc lists them
default_role = "py:obj"

html_theme = "furo"
pygments_style = "friendly"  # which colours what a diff adds
html_title = "dgl_mgpu"
html_show_copyright = False
# Lines of 100 columns, as in the code, beside the navigation.
html_theme_options = {"light_css_variables": {"code-font-size": "0.735rem"}}
html_extra_path = ["_ext/index.html"]  # leads on to root_doc


def escape_stars(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Shapes such as ``(n, *row_shape)`` are no emphasis."""
    lines[:] = [re.sub(r"(?<=[ (])\*(?=[a-z])", r"\*", line) for line in lines]


def without_field_numbers(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Fields of named tuples are documented by their class."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", without_field_numbers)
    app.connect("autodoc-process-docstring", escape_stars, priority=100)  # before numpydoc
