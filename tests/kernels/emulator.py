"""Runs CUDA kernels on the CPU, for tests on machines without a GPU.

A test of an operator's CUDA implementation calls it directly, with CPU tensors, while the
fixture ``emulated`` has put an :class:`EmulatedDriver` in the driver's place. ``emulation.h``
says how kernels are run and which mistakes that brings to light.

Reads and writes beyond a tensor are found, too, and end the process, with AddressSanitizer in it::

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \\
        python -m pytest -s tests/kernels
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dgl_mgpu.ops.device import Kernel, source_text
from dgl_mgpu.utils.resources import resource_folder

_HEADER = Path(__file__).with_name("emulation.h")
# GCC fuses products and sums as NVRTC does, if it optimises and the processor can; and stops
# where the behaviour is undefined, as at a vector load from a misaligned address.
_COMMAND = [
    "g++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-g1", "-O1",
    "-fexpensive-optimizations", "-march=native", "-ffp-contract=fast", "-fsanitize=undefined",
    "-fno-sanitize=vptr,pointer-overflow,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error", "-U_FORTIFY_SOURCE", "-Wno-attributes",
]  # fmt: skip
if hasattr(ctypes.CDLL(None), "__asan_init"):
    _COMMAND += ["-fsanitize=address", "--param=asan-stack=0", "--param=asan-globals=0"]
_TEXT = "kernel.cu"
_MAX_THREADS = 1024
_RUBBISH = -0x3232323232323233  # 0xCD… as emulation.h fills shared memory
#: A launch takes over the process's signals for wild addresses.
_LAUNCHING = threading.Lock()
_CACHE_BYTES = 1 << 14
_NUM_SMS = 2
_BLOCKS_PER_SM = 2


class EmulationError(Exception):
    """A kernel does what a GPU does not define, or waits forever."""


class EmulatedDriver:
    """A driver (see ``dgl_mgpu.ops.device``) for CPU tensors, with two small multiprocessors.

    Attributes
    ----------
    timeout : float
        Seconds that a launch may take.
    launched : set of Kernel
        What has been launched.
    """

    def __init__(self, timeout: float = 200) -> None:
        self.timeout = timeout
        self.launched: set[Kernel] = set()

    def launch(
        self,
        kernel: Kernel,
        device: torch.device,
        blocks: int,
        threads: int,
        arguments: tuple[Any, ...],
    ) -> None:
        """Run a kernel to its end.

        Raises
        ------
        EmulationError
            If the launch is not a valid one, or the kernel fails.
        """
        self.launched.add(kernel)
        self.run(
            source_text(kernel.source),
            kernel.expression,
            blocks,
            threads,
            *arguments,
            cooperative=kernel.cooperative,
        )

    def run(
        self,
        text: str,
        expression: str,
        blocks: int,
        threads: int,
        *arguments: Any,
        cooperative: bool = False,
    ) -> None:
        """The same for a kernel given by its text."""
        at_once = _NUM_SMS * _BLOCKS_PER_SM
        if not 0 < blocks < 2**31 or not 0 < threads <= _MAX_THREADS:
            raise EmulationError(f"{expression}: {blocks} blocks of {threads} threads")
        if cooperative and blocks > at_once:
            raise EmulationError(f"{expression}: {blocks} blocks at once, where {at_once} fit")
        library = _library(text, expression)
        kinds = library.emulated_parameters().decode().split()
        if len(kinds) != len(arguments):
            raise EmulationError(f"{expression}: {len(arguments)} arguments for {len(kinds)}")
        slots = b"".join(
            _slot(expression, place, kind, argument)
            for place, (kind, argument) in enumerate(zip(kinds, arguments, strict=True))
        )
        message = ctypes.create_string_buffer(2000)
        with _LAUNCHING:
            done = library.emulated_launch(
                slots, blocks, threads, min(blocks, at_once), self.timeout, message, len(message)
            )  # fmt: skip
        if not done:
            reason = message.value.decode(errors="replace")
            raise EmulationError(f"{expression}, {reason}{_lines(library, reason, text)}")

    def resident_blocks(self, kernel: Kernel, device: torch.device, threads: int) -> int:
        """Blocks that run at once."""
        return _NUM_SMS * _BLOCKS_PER_SM

    def num_sms(self, device: torch.device) -> int:
        """Multiprocessors."""
        return _NUM_SMS

    def cache_bytes(self, device: torch.device) -> int:
        """Few enough that some tests' rows do not fit."""
        return _CACHE_BYTES

    def current_stream(self, device: torch.device) -> int:
        """The only one."""
        return 0

    def synchronize(self, device: torch.device) -> None:
        """Nothing: a launch returns when it is done."""

    def mark(self, device: torch.device) -> _Done:
        """The end of the last launch, which is done."""
        return _Done()

    def host_buffer(self, count: int) -> torch.Tensor:
        """An int64 vector, filled with rubbish."""
        return torch.full((count,), _RUBBISH)


class _Done:
    def synchronize(self) -> None:
        """Nothing."""


def _slot(expression: str, place: int, kind: str, argument: Any) -> bytes:
    if isinstance(argument, torch.Tensor):
        given, slot = "p8", ctypes.c_uint64(argument.data_ptr())
    elif isinstance(argument, np.ndarray):
        given, slot = f"s{argument.nbytes}", ctypes.c_uint64(argument.ctypes.data)
    elif argument is None:
        given, slot = "p8", ctypes.c_uint64(0)
    elif isinstance(argument, float):
        given, slot = "d8", ctypes.c_double(argument)
    elif isinstance(argument, int) and -(2**63) <= argument < 2**63:
        given, slot = "i8", ctypes.c_int64(argument)
    else:
        raise EmulationError(f"{expression}: argument {place} is {argument!r}")
    if given != kind:
        names = {"p": "a pointer", "d": "a double", "i": "an integer", "s": "a struct"}
        raise EmulationError(
            f"{expression}: argument {place} is {argument!r}, not {names[kind[0]]} of {kind[1:]} B"
        )
    return bytes(slot)


@functools.cache
def _library(text: str, expression: str) -> ctypes.CDLL:
    command = [*_COMMAND, f"-I{resource_folder('kernels')}"]
    parts = (*command, _HEADER.read_text(), text, expression)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"dgl_mgpu-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            code, built = Path(scratch, "main.cpp"), Path(scratch, "kernel.so")
            Path(scratch, _TEXT).write_text(text)
            code.write_text(
                f'#include "{_HEADER}"\n#include "{_TEXT}"\nEMULATE_KERNEL({expression})\n'
            )
            done = subprocess.run(
                [*command, "-o", str(built), str(code)], capture_output=True, text=True
            )
            if done.returncode:
                raise EmulationError(f"{expression} does not compile:\n{done.stderr}")
            built.replace(path)
    library = ctypes.CDLL(str(path))
    library.emulated_parameters.restype = ctypes.c_char_p
    library.emulated_launch.restype = ctypes.c_bool
    library.emulated_launch.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int64] * 3, ctypes.c_double, ctypes.c_char_p, ctypes.c_int64
    ]  # fmt: skip
    return library


def _lines(library: ctypes.CDLL, message: str, text: str) -> str:
    """The lines of a kernel's text that a message gives as an offset, innermost call first."""
    offset = re.search(r"offset (0x\w+)", message)
    if offset is None:
        return ""
    done = subprocess.run(
        ["addr2line", "-s", "-i", "-e", library._name, offset[1]], capture_output=True, text=True
    )
    numbers = map(int, re.findall(rf"^{_TEXT}:(\d+)", done.stdout, re.MULTILINE))
    return "".join(f"\n{number:5}: {text.splitlines()[number - 1]}" for number in numbers)
