"""How busy a GPU is, as its driver sees it: nothing is traced, and nobody slowed down."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

#: NVML's number for samples of how much of the time a kernel ran.
_UTILIZATION = 1
#: What a call should take, or more: the driver takes some samples in a second.
SAMPLED_SECONDS = 3.0
#: Of what takes less than this there are too few.
_LEAST_SECONDS = 1.0


class _Sample(ctypes.Structure):
    """NVML's ``nvmlSample_t`` of an unsigned integer."""

    _fields_ = (("microseconds", ctypes.c_ulonglong), ("percent", ctypes.c_ulonglong))


def busy_share(device: torch.device, run: Callable[[], object]) -> float | None:
    """Share of the time in which a GPU had a kernel running while ``run`` was called.

    The mean of the driver's samples (NVML) that were taken meanwhile.

    Parameters
    ----------
    device : torch.device
        Of a GPU.
    run : callable
        Takes some ``SAMPLED_SECONDS``.

    Returns
    -------
    float or None
        None where the driver takes no samples, or ``run`` was too short for them.
    """
    torch.cuda.synchronize(device)
    begin = time.time()
    run()
    torch.cuda.synchronize(device)
    end = time.time()
    if end - begin < _LEAST_SECONDS:
        return None
    try:
        samples = _samples(device, begin)
    except OSError:
        return None
    # A sample is of the time before it: the first one may be of what came before the run.
    inside = [each.percent for each in samples if begin < each.microseconds / 1e6 <= end][1:]
    return sum(inside) / len(inside) / 100 if inside else None


def _samples(device: torch.device, since: float) -> list[_Sample]:
    """The driver's since a time in seconds, of those that it still has.

    Raises
    ------
    OSError
        If there is no NVML, or it has none.
    """
    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(nvml, name)(*arguments)
        if status:
            raise OSError(f"{name} gave NVML error {status}")

    call("nvmlInit_v2")
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(handle))
        kind, count = ctypes.c_uint(), ctypes.c_uint()

        def read(into: object) -> None:
            call(
                "nvmlDeviceGetSamples", handle, _UTILIZATION, ctypes.c_ulonglong(int(since * 1e6)),
                ctypes.byref(kind), ctypes.byref(count), into,
            )  # fmt: skip

        read(None)
        samples = (_Sample * count.value)()
        read(samples)
        return [
            _Sample(each.microseconds, each.percent & 0xFFFFFFFF) for each in samples[: count.value]
        ]
    finally:
        nvml.nvmlShutdown()
