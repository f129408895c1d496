"""Sphinx directives for what is made of the code: configuration keys, and the commands' help."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import configuration
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class ConfigurationKeys(SphinxDirective):
    """Tables of all keys of ``configs/``."""

    def run(self) -> list[nodes.Node]:
        lines = configuration.tables().splitlines()
        found = nodes.Element()
        self.state.nested_parse(StringList(lines, "configs/"), 0, found, match_titles=True)
        return found.children


class Usage(SphinxDirective):
    """What the command in the module named says of itself."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        usage = importlib.import_module(self.arguments[0]).USAGE
        return [nodes.literal_block(usage, usage.format(configs="PATH"), language="text")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("configuration-keys", ConfigurationKeys)
    app.add_directive("usage", Usage)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
