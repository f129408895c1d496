"""``dgl-mgpu install-dgl``: which wheel it takes, what it makes of it, and that pip knows of it."""

from __future__ import annotations

import base64
import csv
import hashlib
import platform
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from dgl_mgpu.dgl import environment, wheel
from dgl_mgpu.dgl.wheel import WHEELS, Wheel, install_dgl, nearest, repack
from dgl_mgpu.errors import DataFormatError, UnavailableError, UnsupportedEnvironmentError

INFORMATION = "dgl-2.1.0.dist-info"
FILES = {
    "dgl/__init__.py": "there = True\n",
    "dgl/graphbolt/__init__.py": "",
    "dgl/libdgl.so": "C++",
    "dgl/_ffi/_cy3/core.cpython-312-x86_64-linux-gnu.so": "for one Python",
    "dgl/_ffi/_cython/core.cpp": "its source",
    "dgl/graphbolt/libgraphbolt_pytorch_2.2.1.so": "for one torch",
    "dgl/dgl_sparse/libdgl_sparse_pytorch_2.2.1.so": "for one torch",
    f"{INFORMATION}/METADATA": "Metadata-Version: 2.1\nName: dgl\nVersion: 2.1.0\n",
    f"{INFORMATION}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-cp312-x\n",
    f"{INFORMATION}/top_level.txt": "dgl\n",
    f"{INFORMATION}/RECORD": "of the wheel as it was\n",
}
PYTHON_FILES = {"dgl/__init__.py", "dgl/graphbolt/__init__.py"}
LINUX = ("Linux", "x86_64", "glibc")


def pretend(monkeypatch: pytest.MonkeyPatch, machine: tuple[str, ...], python=(3, 13)) -> None:
    system, processor, libc = machine
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(sys, "version_info", (*python, 4, "final", 0))


def make_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, tag: str = "cp312") -> Path:
    """A small stand-in for one of PyPI's wheels, which is known from then on."""
    file = folder / str(Wheel(tag, "manylinux1_x86_64", ""))
    with ZipFile(file, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    made = Wheel(tag, "manylinux1_x86_64", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(wheel, "WHEELS", (made,))
    return file


@pytest.mark.parametrize(
    ("machine", "python", "expected"),
    [
        (LINUX, (3, 14), "cp312-cp312-manylinux1_x86_64"),
        (LINUX, (3, 13), "cp312-cp312-manylinux1_x86_64"),
        (LINUX, (3, 12), "cp312-cp312-manylinux1_x86_64"),
        (LINUX, (3, 11), "cp311-cp311-manylinux1_x86_64"),
        (("Linux", "aarch64", "glibc"), (3, 13), "cp312-cp312-manylinux2014_aarch64"),
        (("Darwin", "arm64", ""), (3, 13), "cp312-cp312-macosx_12_0_arm64"),
        (("Darwin", "arm64", ""), (3, 11), "cp311-cp311-macosx_11_0_arm64"),
        (("Darwin", "x86_64", ""), (3, 14), "cp312-cp312-macosx_11_0_x86_64"),
    ],
)
def test_the_wheel_of_the_nearest_python_for_this_machine(monkeypatch, machine, python, expected):
    pretend(monkeypatch, machine, python)
    assert str(nearest()) == f"dgl-2.1.0-{expected}.whl"
    assert wheel.runs_here(nearest())


@pytest.mark.parametrize(
    "machine", [("Linux", "aarch64", ""), ("Windows", "AMD64", ""), ("Linux", "riscv64", "glibc")]
)
def test_any_wheel_has_the_python_files_for_other_machines(monkeypatch, machine):
    pretend(monkeypatch, machine)
    assert nearest().python == (3, 12)
    assert not any(map(wheel.runs_here, WHEELS))


def test_each_known_wheel_has_a_name_and_a_hash_of_its_own():
    assert len({str(each) for each in WHEELS}) == len({each.sha256 for each in WHEELS}) == 8
    assert all(len(bytes.fromhex(each.sha256)) == 32 for each in WHEELS)


@pytest.mark.parametrize(
    ("machine", "python", "tag", "compiled"),
    [
        (LINUX, (3, 14), "py3-none-manylinux1_x86_64", {"dgl/libdgl.so"}),
        (
            LINUX,
            (3, 12),
            "cp312-cp312-manylinux1_x86_64",
            {"dgl/libdgl.so", "dgl/_ffi/_cy3/core.cpython-312-x86_64-linux-gnu.so"},
        ),
        (("Windows", "AMD64", ""), (3, 13), "py3-none-any", set()),
    ],
)
def test_a_wheel_is_left_with_what_can_be_used(
    monkeypatch, tmp_path, machine, python, tag, compiled
):
    pretend(monkeypatch, machine, python)
    file = make_wheel(tmp_path, monkeypatch)
    repacked = repack(file, wheel.WHEELS[0], tmp_path / "new")
    assert repacked.name == f"dgl-2.1.0-{tag}.whl"
    with ZipFile(repacked) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    information = {name for name in FILES if name.startswith(INFORMATION)}
    assert set(contents) == PYTHON_FILES | compiled | information
    assert contents["dgl/__init__.py"].decode() == FILES["dgl/__init__.py"]
    said = contents[f"{INFORMATION}/WHEEL"].decode().splitlines()
    assert f"Tag: {tag}" in said
    assert f"Root-Is-Purelib: {str(not compiled).lower()}" in said
    recorded = list(csv.reader(contents[f"{INFORMATION}/RECORD"].decode().splitlines()))
    assert {name for name, _, _ in recorded} == set(contents)
    for name, digest, size in recorded:
        if name != f"{INFORMATION}/RECORD":
            sha256 = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
            assert sha256 == hashlib.sha256(contents[name]).digest()
            assert int(size) == len(contents[name])


@pytest.fixture(scope="module")
def environment_with_pip(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


@pytest.fixture
def elsewhere(monkeypatch, environment_with_pip) -> Path:
    """What is installed goes there; no index is reached, and no DGL is there before or after."""
    monkeypatch.setattr(sys, "executable", python_of(environment_with_pip))
    monkeypatch.setattr(wheel, "installed_version", lambda package: None)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    yield environment_with_pip
    if "dgl" in pip("list"):
        pip("uninstall", "--yes", "dgl")


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_linux = pytest.mark.skipif(
    not any(each.platform == "manylinux1_x86_64" and wheel.runs_here(each) for each in WHEELS),
    reason="its stand-in for a wheel is for Linux on x86_64",
)


@needs_linux
@pytest.mark.parametrize("how", ["file", "index"])
def test_pip_lists_checks_and_uninstalls_what_was_installed(elsewhere, monkeypatch, tmp_path, how):
    tag = "cp311" if sys.version_info < (3, 12) else "cp312"
    file = make_wheel(tmp_path, monkeypatch, tag)
    if how == "index":  # pip's stand-in for one
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = install_dgl(file if how == "file" else None)
    assert said == f"installed DGL 2.1.0: Python files and libdgl of {file.name}"
    assert "dgl" in [line.split()[0] for line in pip("list").splitlines()[2:]]
    assert pip("check").strip() == "No broken requirements found."
    assert "dgl==2.1.0" in pip("freeze").split()  # and no file that is gone
    place = subprocess.run(
        [sys.executable, "-c", "import dgl; print(dgl.there, dgl.__path__[0])"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={},
    ).stdout.split()
    assert place[0] == "True"
    folder = Path(place[1])
    assert (folder / "libdgl.so").read_text() == FILES["dgl/libdgl.so"]
    assert not list(folder.rglob("*pytorch*"))
    pip("uninstall", "--yes", "dgl")
    assert not folder.exists() and not (folder.parent / INFORMATION).exists()


def test_a_supported_dgl_stays(monkeypatch):
    monkeypatch.setattr(wheel, "installed_version", lambda package: "2.4.0+cu124")
    monkeypatch.setattr(environment, "installed_version", lambda package: "2.4.0+cu124")
    monkeypatch.setattr(wheel, "_pip", lambda *_: pytest.fail("pip was run"))
    assert install_dgl() == "DGL 2.4.0+cu124 is there, and stays as it is"


@pytest.mark.parametrize("version", ["0.1.3", "2.5.0"])
def test_another_dgl_is_not_replaced(monkeypatch, version):
    monkeypatch.setattr(wheel, "installed_version", lambda package: version)
    monkeypatch.setattr(environment, "installed_version", lambda package: version)
    monkeypatch.setattr(wheel, "_pip", lambda *_: pytest.fail("pip was run"))
    with pytest.raises(UnsupportedEnvironmentError, match="pip uninstall dgl, then"):
        install_dgl()


def test_a_file_that_is_none_of_the_wheels_is_refused(elsewhere, monkeypatch, tmp_path):
    file = make_wheel(tmp_path, monkeypatch)
    with file.open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(DataFormatError, match=r"its SHA-256 is .*dgl-2\.1\.0-cp312"):
        install_dgl(file)
    with pytest.raises(DataFormatError, match="No such file"):
        install_dgl(tmp_path / "nothing.whl")
    with pytest.raises(DataFormatError, match="Is a directory"):
        install_dgl(tmp_path)
    assert "dgl" not in pip("list")


@needs_linux
def test_what_an_index_has_under_the_name_is_refused_if_it_is_another(
    elsewhere, monkeypatch, tmp_path
):
    make_wheel(tmp_path, monkeypatch, "cp311" if sys.version_info < (3, 12) else "cp312")
    (known,) = wheel.WHEELS
    others = Wheel(known.python_tag, known.platform, "0" * 64)
    monkeypatch.setattr(wheel, "WHEELS", (others,))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataFormatError, match=known.sha256):
        install_dgl()
    assert "dgl" not in pip("list")


def test_without_a_network_it_says_how_to_bring_the_file(elsewhere, monkeypatch):
    pretend(monkeypatch, LINUX)
    with pytest.raises(UnavailableError, match="No matching distribution") as error:
        install_dgl()
    command = (
        "pip download --no-deps --only-binary=:all: --platform=manylinux1_x86_64 "
        "--python-version=3.12 dgl==2.1.0"
    )
    assert command in error.value.fix
    assert "dgl-mgpu install-dgl dgl-2.1.0-cp312-cp312-manylinux1_x86_64.whl" in error.value.fix


def test_without_pip_it_says_how_to_get_it(monkeypatch, tmp_path):
    venv.create(tmp_path / "environment")
    monkeypatch.setattr(wheel, "installed_version", lambda package: None)
    monkeypatch.setattr(sys, "executable", python_of(tmp_path / "environment"))
    with pytest.raises(UnavailableError, match="No module named pip; install pip"):
        install_dgl()
