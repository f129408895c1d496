"""NumPy's .npz archives larger than memory: written as streams, read as memory maps.

An .npz is a zip archive of .npy files.  A member that is stored without compression can be
memory-mapped within the archive; a compressed one has to be unpacked first.  ``numpy.load`` does
neither: it copies every member into memory.
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from dgl_mgpu.data.files import FIX, corrupt_file, reading

_CHUNK_BYTES = 1 << 24
#: Array data in archives written here begin at a multiple of this, the size of a page.
_ALIGNMENT = 4096
#: Fixed part of a member's header in the archive, and zipfile's own 64-bit size record.
_LOCAL_HEADER_BYTES, _ZIP64_RECORD_BYTES = 30, 20
#: Extra record that pads a header; the id is the one that Android's zipalign uses for it.
_PADDING_ID = 0xD935


class NpzWriter:
    """Writes an .npz archive array by array, and each array chunk by chunk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)

    def __enter__(self) -> NpzWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._zip.close()
        self._file.close()

    def write(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, chunks: Iterable[np.ndarray]
    ) -> None:
        """Append the array `name`, whose content in row-major order is that of all chunks."""
        info = zipfile.ZipInfo(f"{name}.npy")
        header_bytes = _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_RECORD_BYTES + 4
        padding = -(self._file.tell() + header_bytes) % _ALIGNMENT
        info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
        description = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
        written = 0
        with self._zip.open(info, "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, description)
            for chunk in chunks:
                contiguous = np.ascontiguousarray(chunk, dtype)
                member.write(contiguous.reshape(-1).view(np.uint8).data)
                written += contiguous.size
        if written != int(np.prod(shape)):
            raise ValueError(f"{name}: {written} values were written for shape {shape}")


@dataclass(frozen=True)
class Member:
    """One array of an .npz archive."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    offset: int | None  # of its data in the archive; None where they are compressed

    @property
    def is_mappable(self) -> bool:
        """Whether the array is uncompressed and aligned, as those of `NpzWriter` are."""
        return self.offset is not None and self.offset % self.dtype.alignment == 0


class NpzReader:
    """Reads the arrays of an .npz archive without copying them into memory.

    All methods raise DataFormatError if the file is truncated, corrupt or not such an archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, FIX), zipfile.ZipFile(path) as archive, path.open("rb") as file:
            self.members = {
                info.filename.removesuffix(".npy"): self._describe(archive, file, info)
                for info in archive.infolist()
            }

    @staticmethod
    def _describe(archive: zipfile.ZipFile, file: IO[bytes], info: zipfile.ZipInfo) -> Member:
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
            else:
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(member)
            header_bytes = member.tell()
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds Python objects")
        if info.file_size != header_bytes + dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f"{info.filename} has not the size that its shape needs")
        offset = None
        if info.compress_type == zipfile.ZIP_STORED:
            # The length of a member's header is only known from the header itself.
            file.seek(info.header_offset)
            local = file.read(_LOCAL_HEADER_BYTES)
            name_bytes, extra_bytes = struct.unpack("<HH", local[-4:])
            begin = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
            offset = begin + header_bytes
        return Member(shape, dtype, fortran, offset)

    def verify(self) -> None:
        """Read every byte and compare with the checksums (about 1 GB/s)."""
        with reading(self.path, FIX), zipfile.ZipFile(self.path) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    while member.read(_CHUNK_BYTES):
                        pass

    def map(self, name: str) -> np.ndarray:
        """Return the mappable array `name` as a read-only memory map."""
        member = self._member(name)
        if not member.is_mappable:
            raise ValueError(f"{name} in {self.path} is compressed or unaligned")
        if 0 in member.shape:
            return np.empty(member.shape, member.dtype)
        return np.memmap(
            self.path,
            member.dtype,
            "r",
            offset=member.offset or 0,
            shape=member.shape,
            order="F" if member.fortran_order else "C",
        )

    def read(self, name: str) -> np.ndarray:
        """Read the array `name` into memory."""
        self._member(name)
        with reading(self.path, FIX), np.load(self.path, allow_pickle=False) as archive:
            return archive[name]

    def unpack(self, name: str, path: Path) -> None:
        """Write the array `name` to the .npy file `path`, a chunk at a time."""
        self._member(name)
        with (
            reading(self.path, FIX),
            zipfile.ZipFile(self.path) as archive,
            archive.open(f"{name}.npy") as member,
            path.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, _CHUNK_BYTES)

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise corrupt_file(self.path, f"it holds {', '.join(self.members)}, not {name}", FIX)
        return self.members[name]
