"""The check of Python, torch and DGL at import."""

from __future__ import annotations

import pytest

from dgl_mgpu.dgl import environment
from dgl_mgpu.dgl.environment import VersionRange, check_environment, release
from dgl_mgpu.errors import UnsupportedEnvironmentError


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
