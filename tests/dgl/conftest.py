"""Fresh interpreters, since what is tested happens at import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment import search_path

# What torch_geometric sets off, which ogb imports where it is installed.
_OTHERS_WARNINGS = (
    "-W", "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "-W", "ignore:invalid escape sequence:SyntaxWarning",
)  # fmt: skip


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter with an empty home, every warning an error."""

    def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DGL")}
        environment["HOME"] = str(home)
        environment["PYTHONPATH"] = search_path(*folders)
        return subprocess.run(
            [sys.executable, "-W", "error", *_OTHERS_WARNINGS, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
        )

    return run
