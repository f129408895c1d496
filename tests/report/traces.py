"""Traces as torch's profiler writes them: one made by hand, with a GPU, and a run to record one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import torch

from dgl_mgpu.utils.stages import stage

#: Microseconds at which the trace's first step begins; the file's clock does not begin at 0.
ORIGIN = 4_460_956_419_000.5
HOST, AUTOGRAD = 321, 654


def _event(category: str, name: str, begin: float, end: float, pid: int, tid: int, **args) -> dict:
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
        "ts": ORIGIN + begin, "dur": end - begin, "args": args,
    }  # fmt: skip


def _range(name: str, begin: float, end: float) -> dict:
    return _event("user_annotation", name, begin, end, HOST, HOST)


def _launch(number: int, at: float, thread: int = HOST, category: str = "cuda_runtime") -> dict:
    name = "cudaLaunchKernel" if category == "cuda_runtime" else "cuLaunchKernel"
    return _event(category, name, at, at + 4, HOST, thread, correlation=number)


def _on_gpu(
    category: str, name: str, begin: float, end: float, stream: int, device: int = 0, **args
) -> dict:
    args |= {"device": device, "context": 1, "stream": stream}
    return _event(category, name, begin, end, device, stream, **args)


def gpu_events() -> list[dict]:
    """Two steps of 1000 and 800 us, in microseconds from the first one's begin.

    Stream 7 has the model and stream 20 the next batch's sampling and features.  Of the first step
    the GPU is busy in [0, 50), [100, 500), [600, 700) and [900, 1000): 650 us.  The second step's
    window begins with an evaluation of 300 us, so the step is [1300, 2100), and busy in
    [1400, 1800): 400 us of 800.
    """
    return [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        _range("ProfilerStep#4", 0, 1000),
        _range("stage sample", 10, 90),
        _range("stage forward", 100, 300),
        _range("stage backward", 310, 600),
        _range("DistributedDataParallel.forward", 100, 290),
        _range("ProfilerStep#5", 1000, 2100),
        _range("stage evaluate", 1000, 1300),
        _range("stage forward", 1300, 1500),
        _range("stage backward", 1500, 1800),
        # What ran as the trace began; its launch is not in it.
        _on_gpu("kernel", "before", -30, 50, 7, correlation=1),
        # Sampling overlaps what the model does, in another stream.
        _event("cpu_op", "dgl_mgpu::sample_hops", 20, 80, HOST, HOST, **{"External id": 71}),
        _on_gpu("kernel", "sample_hops", 100, 300, 20, correlation=2, **{"External id": 71}),
        _launch(3, 85, category="cuda_driver"),
        _on_gpu("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 280, 350, 20, correlation=3),
        _launch(4, 110),
        _on_gpu("kernel", "gemm", 200, 500, 7, correlation=4),
        _on_gpu("gpu_user_annotation", "stage forward", 200, 500, 7),
        # Another thread launches what runs backward, and the GPU comes to it late.
        _launch(5, 320, thread=AUTOGRAD),
        _on_gpu("kernel", "gemm_backward", 600, 700, 7, correlation=5),
        _launch(6, 330, thread=AUTOGRAD),
        _on_gpu("gpu_memset", "Memset (Device)", 900, 1100, 7, correlation=6),
        _event("cuda_runtime", "cudaStreamSynchronize", 700, 950, HOST, HOST, correlation=7),
        _launch(8, 1050),
        _on_gpu("kernel", "gemm", 1100, 1250, 7, correlation=8),
        _launch(9, 1310),
        _on_gpu("kernel", "gemm", 1400, 1800, 7, correlation=9),
        # Another GPU does a little.
        _on_gpu("gpu_memcpy", "Memcpy DtoD", 1500, 1510, 7, device=1, correlation=10),
    ]


def write_trace(path: Path, events: list[dict]) -> Path:
    text = json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def train(steps: int, on_step: Callable[[], None]) -> None:
    """Some steps of a small model on the CPU, with their stages."""
    model = torch.nn.Linear(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with stage("sample"):
            rows = torch.randn(64, 32)
        with stage("forward"):
            loss = model(rows).square().mean()
        with stage("backward"):
            loss.backward()
        with stage("update"):
            optimizer.step()
        on_step()
