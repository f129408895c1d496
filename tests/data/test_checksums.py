"""Files made of data sets: any change of one is told of, and they are made again as they were."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from dgl_mgpu.data import checksums, files, load, ogb, ogb_hetero
from dgl_mgpu.errors import DataFormatError
from tests.data.test_ogb import NUM_EDGES, write_binary_set, write_csv_set
from tests.data.test_ogb_hetero import write_set

OPTIONS = {"num_nodes": 100, "num_edges": 1000}


def arrays(of: object) -> list[np.ndarray]:
    """All arrays of a data set, and of what it is made of."""
    if isinstance(of, np.ndarray):
        return [np.array(of)]
    if dataclasses.is_dataclass(of):
        of = [getattr(of, each.name) for each in dataclasses.fields(of)]
    if isinstance(of, dict):
        of = list(of.values())
    return [array for each in of for array in arrays(each)] if isinstance(of, list | tuple) else []


EDGES = {"edge_feat": np.ones((NUM_EDGES, 1))}
#: What writes raw files, and what reads them.
SETS = {
    "csv": (write_csv_set, ogb.load_folder),
    "binary": (lambda folder: write_binary_set(folder, **EDGES), ogb.load_folder),
    "several types": (write_set, ogb_hetero.load_folder),
    "generated": (lambda folder: None, lambda folder, _: load("generated", folder, **OPTIONS)),
}


def flipped(path: Path, rng: np.random.Generator) -> None:
    """A bit is another, and the time that a user may set is as it was."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncated(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(path.read_bytes()[: int(rng.integers(path.stat().st_size))])


def gone(path: Path, rng: np.random.Generator) -> None:
    path.unlink()


@pytest.mark.parametrize(("write", "read"), SETS.values(), ids=SETS)
def test_a_changed_file_is_made_again(tmp_path, caplog, write, read):
    folder = tmp_path / "set"
    meta = write(folder)
    expected = arrays(read(folder, meta))
    rng = np.random.default_rng(0)
    made = [path.parent for path in tmp_path.rglob("checksums.json")]
    names = {path for each in made for path in each.rglob("*") if path.is_file()}
    assert len(names) > 5 and len(expected) > 5
    for number, path in enumerate(sorted(names)):
        # What is remembered is no part of it; and what is made of a file goes with it.
        if path.name == "checked.json" or not path.exists() or not path.stat().st_size:
            continue
        change = (flipped, truncated, gone)[number % 3]
        caplog.clear()
        change(path, rng)
        with caplog.at_level(logging.WARNING):
            found = arrays(read(folder, meta))
        # Of sums that are others, nobody hears until they are compared again.
        is_told = "it is made again" in caplog.text
        assert is_told or (path.name, change) == ("checksums.json", flipped), (path, change)
        assert len(found) == len(expected) and all(map(np.array_equal, found, expected))


def test_a_raw_file_that_is_mapped_is_no_longer_what_it_was(tmp_path):
    """Its own sums tell, which are compared when what is made of it is made again."""
    folder = tmp_path / "set"
    meta = write_binary_set(folder)
    ogb.load_folder(folder, meta)
    path = folder / "raw" / "data.npz"
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("node_feat.npy").header_offset
    before, content = path.stat(), bytearray(path.read_bytes())
    content[start + 400] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataFormatError, match=r"data\.npz"):
        ogb.load_folder(folder, meta)


def test_files_are_read_once_for_each_state_of_theirs(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(checksums, "_sum", lambda path, start: read.append(start) or start)
    source = tmp_path / "source"
    source.write_bytes(bytes(500))

    def fill(folder):
        (folder / "in").mkdir()
        (folder / "in" / "a").write_bytes(bytes(2500))
        (folder / "b").write_bytes(bytes(10))

    def opened() -> list[int]:
        read.clear()
        files.derived_once(tmp_path / "made", fill, [source])
        return sorted(read)

    everything = [0, 0, 0, 1000, 2000]
    assert opened() == everything
    assert opened() == everything and opened() == []
    os.utime(tmp_path / "made" / "b")
    assert opened() == [0] and opened() == []
    shutil.copytree(tmp_path / "made", tmp_path / "copy")
    shutil.rmtree(tmp_path / "made")
    (tmp_path / "copy").rename(tmp_path / "made")
    assert opened() == [0, 0, 1000, 2000] and opened() == []
    (tmp_path / "made" / "checked.json").write_text("[")
    assert opened() == everything and opened() == []


def test_sums_are_those_of_the_whole_file_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 1000)
    content = np.random.default_rng(0).bytes(2500)
    (tmp_path / "a").write_bytes(content)
    (found,) = checksums._sums([tmp_path / "a"])
    pieces = [zlib.crc32(content[at : at + 1000]) for at in (0, 1000, 2000)]
    assert found == [2500, *pieces]


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"chunk": 1, "files": {}}', "{"])
def test_damaged_sums(tmp_path, damage, caplog):
    def fill(folder):
        (folder / "a").write_text("a")

    files.derived_once(tmp_path / "made", fill)
    (tmp_path / "made" / "checksums.json").write_text(damage)
    (tmp_path / "made" / "a").write_text("b")
    files.derived_once(tmp_path / "made", fill)
    assert "checksums.json" in caplog.text and "made again" in caplog.text
    assert (tmp_path / "made" / "a").read_text() == "a"
    assert sorted(os.listdir(tmp_path)) == ["made"]
