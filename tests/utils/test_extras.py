"""What is not installed is said, with the extra that brings it."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib

import pytest

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.utils.extras import EXTRAS, install_command, is_installed, require, required
from tests.environment import CHECKOUT

PICTURES = ("plots", "placement_plot", "machine_map")


@pytest.fixture
def without(monkeypatch):
    """Hides packages."""

    def hide(package: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize("package", EXTRAS)
def test_each_optional_package_is_in_its_extra(package):
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    assert package not in names
    extra = project["optional-dependencies"][EXTRAS[package]]
    assert package in [re.split(r"[^\w-]", line)[0] for line in extra]


@pytest.mark.parametrize("package", EXTRAS)
def test_a_package_that_is_not_installed_names_its_extra(package, without):
    without(package)
    assert not is_installed(package)
    message = re.escape(
        f"cannot do it: {package} is not installed; {install_command(EXTRAS[package])}"
    )
    with pytest.raises(UnavailableError, match=message):
        require(package, "do it")
    with pytest.raises(UnavailableError, match=message), required("do it"):
        importlib.import_module(package)


def test_what_is_missing_within_a_package_stays_its_own_error():
    require("torch", "do it")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"), required("do it"):
        import no_such_thing  # noqa: F401


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_need_matplotlib(name, without, monkeypatch):
    without("matplotlib")
    for other in PICTURES:
        monkeypatch.delitem(sys.modules, f"dgl_mgpu.report.{other}", raising=False)
    with pytest.raises(UnavailableError, match=r"draw a picture.*dgl-mgpu\[plots\]"):
        importlib.import_module(f"dgl_mgpu.report.{name}")
