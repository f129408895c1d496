"""Hydra's command line."""

from __future__ import annotations

import argparse
from typing import Any
from unittest.mock import patch

from dgl_mgpu.graph.originals import originals


def get_args_parser() -> argparse.ArgumentParser:
    """In place of ``get_args_parser``: each option's help is a string when it is checked."""
    check = argparse.ArgumentParser._check_help  # type: ignore[attr-defined]

    def check_help(parser: argparse.ArgumentParser, action: Any) -> None:
        if action.help is not None and not isinstance(action.help, str):
            action.help = "Install or uninstall shell completion"
        check(parser, action)

    with patch.object(argparse.ArgumentParser, "_check_help", check_help):
        return originals["hydra.main:get_args_parser"]()
