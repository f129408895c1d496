"""What a shell's limits are the reason of names them."""

from __future__ import annotations

import errno
import logging
import os
import resource
from pathlib import Path

import pytest

from dgl_mgpu.errors import DeviceMemoryError, LimitError
from dgl_mgpu.train.launch import typed_errors as rlimits
from dgl_mgpu.train.launch.typed_errors import typed_memory


@pytest.fixture
def limits(monkeypatch):
    """Limits of this process, as they would be read."""
    there = {}

    def getrlimit(limit):
        return there.get(limit, resource.RLIM_INFINITY), resource.RLIM_INFINITY

    monkeypatch.setattr(rlimits.resource, "getrlimit", getrlimit)
    return there


def test_open_files(limits):
    limits[resource.RLIMIT_NOFILE] = 64
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    of_torch = RuntimeError("Too many open files. Communication with the workers is no longer…")
    for each in (error, of_torch):
        with pytest.raises(LimitError, match=r"Too many open files.*ulimit -n allows a process 64"):  # noqa: SIM117
            with typed_memory("train as configured", "lower it"):
                raise each


def test_address_space(limits):
    limits[resource.RLIMIT_AS] = 4 << 30
    for error in (MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))):
        with pytest.raises(DeviceMemoryError, match=r"ulimit -v allows a process 4.* GiB\); lower"):  # noqa: SIM117
            with typed_memory("train as configured", "lower it"):
                raise error
    limits.clear()
    with pytest.raises(DeviceMemoryError, match="too little memory; lower it"):  # noqa: SIM117
        with typed_memory("train as configured", "lower it"):
            raise MemoryError


def test_other_errors_are_raised_as_they_are(limits):
    with pytest.raises(FileNotFoundError), typed_memory("train as configured", "lower it"):
        Path("/none").read_bytes()


def test_processor_time(limits, caplog):
    with caplog.at_level(logging.WARNING):
        rlimits.warn_of_time()
        assert not caplog.records and rlimits.kill_reasons() == "out of memory?"
        limits[resource.RLIMIT_CPU] = 30
        rlimits.warn_of_time()
    assert "ulimit -t is 30" in caplog.text
    assert rlimits.kill_reasons() == "out of memory, or ulimit -t 30 s?"
