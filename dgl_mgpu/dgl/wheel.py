"""DGL for a Python that PyPI has no wheel of it for: ``dgl-mgpu install-dgl``.

In a wheel for another Python one library alone is of no use, in whose place DGL takes ctypes. So
the wheel is written anew as one for any Python, without that library and without those for torch
2.0 to 2.2. pip installs it, and lists, checks and uninstalls it as any other.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from dgl_mgpu.dgl.environment import check_environment, installed_version
from dgl_mgpu.errors import DataFormatError, UnavailableError
from dgl_mgpu.utils.atomic_write import typed_output

VERSION = "2.1.0"
_ASKED = f"install DGL {VERSION}"
_INFORMATION = f"dgl-{VERSION}.dist-info"
_LIBRARIES = (".so", ".dylib")


@dataclass(frozen=True)
class Wheel:
    """One of the files that PyPI has of DGL `VERSION`."""

    python_tag: str
    platform: str  # as pip names it
    sha256: str

    @property
    def python(self) -> tuple[int, int]:
        """The version of Python that it is for."""
        return 3, int(self.python_tag.removeprefix("cp3"))

    @property
    def download(self) -> list[str]:
        """What pip is to be told to fetch it, on any machine."""
        return [
            *("download", "--no-deps", "--only-binary=:all:", f"--platform={self.platform}"),
            *("--python-version={}.{}".format(*self.python), f"dgl=={VERSION}"),
        ]

    def __str__(self) -> str:
        return f"dgl-{VERSION}-{self.python_tag}-{self.python_tag}-{self.platform}.whl"


# PyPI has them for older Pythons, too.
WHEELS = tuple(
    Wheel(*line.split())
    for line in """\
    cp311 manylinux1_x86_64 050af2b3d54f158be67ae222dbf786b2b35e5d5d6a29fbf2a81b854e99f13adf
    cp312 manylinux1_x86_64 af9b5974d667d11b9b2dc153981241c248a314c1a54880d4a2af12a00470b78d
    cp311 manylinux2014_aarch64 3b54764b7fae40d41eb936bbfe9f254b1b11ed4993d8c61be8e81d09d955f72a
    cp312 manylinux2014_aarch64 0f8605418e71191f7a4b43a5a6597e655512c7a48171ac042993d77c676f3092
    cp311 macosx_11_0_x86_64 994a7dd11d6da251438762e9fb6657ee2bd9715300aa1f11143a0d61be620ec5
    cp312 macosx_11_0_x86_64 c0abdc0bf4407f67d1df45b9acd5f8017d26ef13aebaaec973a35905cb70e4ef
    cp311 macosx_11_0_arm64 fc7ea52fa9d42bf507ccf3b43b6d05c5ee3fce4c614033833ef08aa089b89bc6
    cp312 macosx_12_0_arm64 ffebbfbbc2278861601fa44b533e3b4a6f21bbfd742542932cb3af0c7621cffc
""".splitlines()
)


def install_dgl(file: Path | None = None) -> str:
    """Install DGL `VERSION` by pip, unless a version is there that is supported.

    Parameters
    ----------
    file : Path, optional
        One of the `WHEELS`, for a machine that reaches no index. By default pip fetches the one
        that is nearest to this Python and machine.

    Returns
    -------
    str
        What is there now, in words.

    Raises
    ------
    UnsupportedEnvironmentError
        If a version of DGL is installed that is not supported.
    DataFormatError
        If the file is none of the `WHEELS`, or what pip fetches is another one.
    UnavailableError
        If pip cannot fetch or install it.
    OutputError
        If there is no space.
    """
    version = installed_version("dgl")
    if version is not None:
        check_environment("dgl")
        return f"DGL {version} is there, and stays as it is"
    with (
        typed_output(_ASKED, "free space there, or name another folder in TMPDIR"),
        tempfile.TemporaryDirectory(prefix="dgl-mgpu-") as name,
    ):
        folder = Path(name)
        if file is None:
            wheel = nearest()
            file = _fetch(wheel, folder)
            _recognized(file, (wheel,))
        else:
            wheel = _recognized(file, WHEELS)
        # By its name: pip would note the place of a file, which is gone soon.
        found = f"--find-links={repack(file, wheel, folder / 'repacked').parent}"
        _pip(
            ["install", "--no-deps", "--no-index", found, f"dgl=={VERSION}"],
            "see what pip says, or install into another environment: python3 -m venv FOLDER",
        )
    parts = "Python files and libdgl" if runs_here(wheel) else "Python files, without libdgl"
    return f"installed DGL {VERSION}: {parts} of {wheel}"


def nearest() -> Wheel:
    """The wheel for this machine, or else any, of the newest Python that is not newer than this."""
    wheels = [wheel for wheel in WHEELS if runs_here(wheel)] or WHEELS
    return max((it for it in wheels if it.python <= sys.version_info), key=lambda it: it.python)


def runs_here(wheel: Wheel) -> bool:
    """Whether the libraries of a wheel are for this machine, whichever Python it is for."""
    libc, system = platform.libc_ver()[0], platform.system()
    is_for_this = {"manylinux": libc == "glibc", "macosx": system == "Darwin"}
    family = wheel.platform.partition("_")[0].rstrip("0123456789")
    return is_for_this[family] and wheel.platform.endswith(f"_{platform.machine()}")


def repack(file: Path, wheel: Wheel, folder: Path) -> Path:
    """Write what this Python can use of a wheel as a wheel of its own.

    Parameters
    ----------
    file : Path
        The wheel.
    wheel : Wheel
        Which one it is.
    folder : Path
        Where to write; it is made.

    Returns
    -------
    Path
        The new wheel.
    """
    tag, kept = "py3-none-any", set()
    if runs_here(wheel):
        tag, kept = f"py3-none-{wheel.platform}", {"libdgl"}
        if wheel.python == sys.version_info[:2]:
            tag = f"{wheel.python_tag}-{wheel.python_tag}-{wheel.platform}"
            kept.add("core")  # DGL's calls of C functions, in Cython
    folder.mkdir()
    path = folder / f"dgl-{VERSION}-{tag}.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with ZipFile(file) as source, ZipFile(path, "w", ZIP_DEFLATED) as target:
        for member in source.infolist():
            place = Path(member.filename)
            is_of_use = place.name.partition(".")[0] in kept
            if place.suffix == ".cpp" or (place.suffix in _LIBRARIES and not is_of_use):
                continue
            if member.filename == f"{_INFORMATION}/RECORD":
                continue
            content = source.read(member)
            if member.filename == f"{_INFORMATION}/WHEEL":
                is_pure = str(not kept).lower()
                content = (
                    "Wheel-Version: 1.0\nGenerator: dgl-mgpu\n"
                    f"Root-Is-Purelib: {is_pure}\nTag: {tag}\n"
                ).encode()
            target.writestr(member, content, ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            rows.writerow((member.filename, f"sha256={digest.decode()}", len(content)))
        rows.writerow((f"{_INFORMATION}/RECORD", "", ""))
        target.writestr(f"{_INFORMATION}/RECORD", record.getvalue())
    return path


def _fetch(wheel: Wheel, folder: Path) -> Path:
    """Have pip download a wheel, from whichever index it is set to use."""
    _pip(
        [*wheel.download, f"--dest={folder}"],
        "see what pip says; without a network, fetch it elsewhere, by "
        f"pip {' '.join(wheel.download)}, and run dgl-mgpu install-dgl {wheel}",
    )
    return next(folder.glob("*.whl"))


def _recognized(file: Path, wheels: Collection[Wheel]) -> Wheel:
    """Which of the wheels a file is, by its content."""
    names = ", ".join(map(str, wheels))
    try:
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        problem = error.strerror or str(error)
        raise DataFormatError(f"{_ASKED} from {file}", problem, f"name one of {names}") from error
    for wheel in wheels:
        if wheel.sha256 == sha256:
            return wheel
    raise DataFormatError(
        f"{_ASKED} from {file}", f"its SHA-256 is {sha256}", f"take PyPI's {names}"
    )


def _pip(arguments: list[str], fix: str) -> None:
    """Run this Python's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
    if lines[-1].endswith("No module named pip"):
        fix = "install pip: python -m ensurepip, or uv pip install pip"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    raise UnavailableError(_ASKED, (errors or lines)[-1], fix)
