"""The check of Python, torch and DGL at import."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dgl_mgpu.dgl import environment
from dgl_mgpu.dgl.environment import SUPPORTED, VersionRange, check_environment, release
from dgl_mgpu.errors import UnsupportedEnvironmentError
from tests.docs.pages import ROOT


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Pretend that these versions are installed; tests change the entries."""
    versions: dict[str, str | None] = {"python": "3.11.7", "torch": "2.13.0+cpu", "dgl": "2.1.0"}
    monkeypatch.setattr(environment, "installed_version", versions.__getitem__)
    return versions


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("python", "3.11.0"),
        ("python", "3.12.13"),
        ("python", "3.14.10"),
        ("torch", "2.4.0"),
        ("torch", "2.11.0"),
        ("torch", "2.99.1+cu140"),
        ("torch", "2.5.0a0+git1234"),
        ("dgl", "2.1.0+cu121"),
        ("dgl", "2.2.1"),
        ("dgl", "2.4.0+cu124"),
    ],
)
def test_supported_versions_pass(installed, package, version):
    installed[package] = version
    check_environment()


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("python", "3.10.14"),
        ("python", "3.15.0"),
        ("torch", "2.3.1"),
        ("torch", "1.13.1"),
        ("torch", "3.0.0"),
        ("dgl", "2.0.0"),
        ("dgl", "0.1.3"),
        ("dgl", "2.5.0"),
    ],
)
def test_unsupported_versions_are_named(installed, package, version):
    installed[package] = version
    with pytest.raises(UnsupportedEnvironmentError) as error:
        check_environment()
    assert f"{package} {version}" in error.value.found
    assert package in error.value.asked


@pytest.mark.parametrize(
    ("package", "command"), [("torch", "pip install"), ("dgl", "run dgl-mgpu install-dgl")]
)
def test_missing_packages_are_named_with_the_command_that_installs_them(
    installed, package, command
):
    installed[package] = None
    with pytest.raises(UnsupportedEnvironmentError, match=f"not installed.*{command}"):
        check_environment()


def test_only_the_named_packages_are_looked_at(installed):
    installed["dgl"] = "0.1.3"
    check_environment("python", "torch")
    with pytest.raises(UnsupportedEnvironmentError, match="pip uninstall dgl"):
        check_environment("dgl")


def test_the_error_is_an_import_error():
    assert issubclass(UnsupportedEnvironmentError, ImportError)


def test_this_environment_is_supported():
    check_environment()


def test_release_reads_the_leading_numbers():
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("2.5.0a0") == (2, 5, 0)
    assert release("nonsense") == ()


def test_a_range_excludes_its_end():
    versions = VersionRange("torch", "2.4", "3")
    assert versions.holds("2.4") and not versions.holds("3") and not versions.holds("2.3.99")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    requirement.name: requirement.specifier
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, group)
}


def test_supported_versions_are_those_that_pip_installs():
    ranges = {"python": SpecifierSet(PROJECT["requires-python"]), **REQUIREMENTS}
    for supported in SUPPORTED:
        allowed = SpecifierSet(f">={supported.since},<{supported.before}")
        assert ranges[supported.package] == allowed


def test_pip_takes_dgl_where_there_is_a_wheel_of_it_alone():
    (dgl,) = (it for it in map(Requirement, PROJECT["dependencies"]) if it.name == "dgl")
    for python, system, machine, expected in (
        ("3.11", "linux", "x86_64", True),
        ("3.12", "linux", "aarch64", True),
        ("3.13", "linux", "x86_64", False),
        ("3.14", "linux", "aarch64", False),
        ("3.12", "linux", "riscv64", False),
        ("3.12", "darwin", "arm64", False),
        ("3.12", "win32", "AMD64", False),
    ):
        there = {"python_version": python, "sys_platform": system, "platform_machine": machine}
        assert dgl.marker.evaluate(there) is expected


def test_the_oldest_versions_that_are_tried_are_the_oldest_that_are_allowed():
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"dgl", "numba", "numpy", "pandas", "torch"} <= set(pins)
    for name, version in pins.items():
        (oldest,) = (it.version for it in REQUIREMENTS[name] if it.operator in (">=", "=="))
        assert f"{version}.".startswith(f"{oldest}.") or version == oldest
