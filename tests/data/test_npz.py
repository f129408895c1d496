from __future__ import annotations

import numpy as np
import pytest

from dgl_mgpu.data.npz import NpzReader, NpzWriter
from dgl_mgpu.errors import DataFormatError


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "data.npz"
    with NpzWriter(path) as writer:
        writer.write("small", (3,), np.dtype(np.int64), [np.arange(2), np.array([2])])
        rows = np.arange(12, dtype=np.float32).reshape(4, 3)
        writer.write("rows", (4, 3), np.dtype(np.float32), [rows[:1], rows[1:]])
        writer.write("empty", (0, 5), np.dtype(np.float32), [])
    return path


def test_numpy_reads_what_was_streamed(archive):
    with np.load(archive) as content:
        np.testing.assert_array_equal(content["small"], [0, 1, 2])
        np.testing.assert_array_equal(content["rows"], np.arange(12).reshape(4, 3))
        assert content["empty"].shape == (0, 5)
        assert content["rows"].dtype == np.float32


def test_maps_without_copying(archive):
    reader = NpzReader(archive)
    reader.verify()
    rows = reader.map("rows")
    assert isinstance(rows, np.memmap)
    assert rows.flags.aligned
    assert not rows.flags.writeable
    assert rows.offset % 64 == 0
    np.testing.assert_array_equal(rows, np.arange(12).reshape(4, 3))
    assert reader.map("empty").shape == (0, 5)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_what_numpy_wrote(tmp_path, save):
    arrays = {
        "c": np.random.default_rng(0).random((5, 7)),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "bytes": np.arange(3, dtype=np.uint8),
    }
    save(tmp_path / "a.npz", **arrays)
    reader = NpzReader(tmp_path / "a.npz")
    reader.verify()
    for name, expected in arrays.items():
        if reader.members[name].is_mappable:
            got = reader.map(name)
        else:
            reader.unpack(name, tmp_path / "a.npy")
            got = np.load(tmp_path / "a.npy")
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(reader.read(name), expected)
        if save is np.savez_compressed:
            assert not reader.members[name].is_mappable


def test_every_truncation_is_noticed(archive, tmp_path):
    content = archive.read_bytes()
    for length in range(0, len(content), 97):
        path = tmp_path / "short.npz"
        path.write_bytes(content[:length])
        with pytest.raises(DataFormatError, match=r"short\.npz"):
            NpzReader(path).verify()


def test_a_flipped_bit_is_noticed(archive):
    content = bytearray(archive.read_bytes())
    offset = NpzReader(archive).members["rows"].offset
    content[offset + 5] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataFormatError, match="CRC"):
        NpzReader(archive).verify()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_anywhere_is_noticed_or_harmless(tmp_path, save):
    path = tmp_path / "a.npz"
    expected = np.arange(50)
    save(path, a=expected)
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(content), 300):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        try:
            reader = NpzReader(path)
            reader.verify()
            if "a" in reader.members:
                np.testing.assert_array_equal(reader.read("a"), expected)
        except DataFormatError:
            pass


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.array([{}], dtype=object))
    with pytest.raises(DataFormatError, match="Python objects"):
        NpzReader(tmp_path / "a.npz")


def test_missing_member_and_wrong_size(archive, tmp_path):
    with pytest.raises(DataFormatError, match="small, rows, empty, not other"):
        NpzReader(archive).map("other")
    with pytest.raises(ValueError, match="2 values"), NpzWriter(tmp_path / "b.npz") as writer:
        writer.write("a", (3,), np.dtype(np.int64), [np.arange(2)])
