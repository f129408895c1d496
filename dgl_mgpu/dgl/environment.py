"""Which Python, torch and DGL are installed, and whether this package supports them.

Versions are read from the packages' metadata: neither torch nor DGL is imported for it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata

from dgl_mgpu.errors import UnsupportedEnvironmentError

Version = tuple[int, ...]


@dataclass(frozen=True)
class VersionRange:
    """The versions ``since <= version < before`` of one package."""

    package: str  # the distribution's name, or "python"
    since: str
    before: str

    def holds(self, version: str) -> bool:
        """Whether `version` lies in the range; suffixes such as ``+cpu`` or ``rc1`` are ignored."""
        return release(self.since) <= release(version) < release(self.before)

    def __str__(self) -> str:
        return f"{self.package} >={self.since},<{self.before}"


# torch 2.4 is the first with the device-generic torch.amp; no upper bound below the next major
# version. DGL 2.1 is the newest on PyPI for Linux, and the one whose C API the backend binds: its
# functions are those of 2.2 to 2.4.
SUPPORTED = (
    VersionRange("python", "3.11", "3.15"),
    VersionRange("torch", "2.4", "3"),
    VersionRange("dgl", "2.1", "2.5"),
)


def release(version: str) -> Version:
    """The leading numbers of a version: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed_version(package: str) -> str | None:
    """The installed version of `package` (``"python"`` is the interpreter's), None if absent."""
    if package == "python":
        return ".".join(str(part) for part in sys.version_info[:3])
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_environment(*packages: str) -> None:
    """Raise UnsupportedEnvironmentError unless supported versions are installed.

    Parameters
    ----------
    *packages : str
        Of these; by default of all in `SUPPORTED`.
    """
    for supported in SUPPORTED:
        package = supported.package
        if packages and package not in packages:
            continue
        version = installed_version(package)
        if version is None or not supported.holds(version):
            raise UnsupportedEnvironmentError(
                f"use dgl_mgpu without {supported}",
                f"{package} {version} is installed" if version else "it is not installed",
                fix(supported, version),
            )


def fix(supported: VersionRange, version: str | None) -> str:
    """What to do where a package has this version, which is not supported, or is absent (None)."""
    if supported.package == "python":
        return "use Python 3.11 to 3.14"
    if supported.package == "dgl":
        # pip may take a version of 2018 for the newest: the only one without a Python's tag.
        install = "run dgl-mgpu install-dgl"
        return f"pip uninstall dgl, then {install}" if version else install
    return f"pip install '{str(supported).replace(' ', '')}'"
