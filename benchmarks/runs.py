"""The benchmarks as configured runs: a program of this folder, its options, and what it needs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.claims.registry import OUTCOMES
from benchmarks.datasets import NO_FILES
from benchmarks.machine import describe_machine
from dgl_mgpu.errors import ConfigError

CONFIGURATION = Path(__file__).parent / "conf"
ROOT = Path(__file__).parents[1]


@dataclass
class Run:
    """One entry of ``runs`` in ``benchmarks/conf``.

    Attributes
    ----------
    program : str
        A module of this folder.
    gpus : int
        GPUs that it needs at least.
    skip : bool
        Whether this scale leaves it out.
    limit_s : float
        Seconds after which a rerun of the kept results ends it.
    keeps : dict
        The file of docs/benchmarks that is its result, by the number of GPUs.
    options : dict
        Of the program, underscores for dashes; None leaves one out, True sets a flag.
    """

    program: str = MISSING
    gpus: int = 0
    skip: bool = False
    limit_s: float = math.inf
    keeps: dict[int, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def command(self, out: Path) -> list[str]:
        """What runs it, with its result to go to a file."""
        words = [sys.executable, "-m", f"benchmarks.{self.program}"]
        for name, value in {**self.options, "out": out}.items():
            if value is None or value is False:
                continue
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words += map(str, value if isinstance(value, list) else [value])
        return words


@dataclass
class Bench:
    """What is asked for: ``bench`` in ``benchmarks/conf``.

    Attributes
    ----------
    scale : str
    gpus : int
        GPUs to use.
    only : list of str
        Names of runs; all of them, if there are none.
    out : str
        Folder of the results.
    data : str
        Root of the data sets.
    """

    scale: str = MISSING
    gpus: int = MISSING
    only: list[str] = field(default_factory=list)
    out: str = MISSING
    data: str = MISSING


@dataclass
class Config:
    bench: Bench = field(default_factory=Bench)
    runs: dict[str, Run] = field(default_factory=dict)

    def chosen(self) -> dict[str, Run]:
        """The runs that are asked for."""
        return {name: self.runs[name] for name in self.bench.only or self.runs}


@dataclass(frozen=True)
class Outcome:
    """What became of a run: 'ok', 'failed' or 'left out', and why."""

    run: str
    what: str
    why: str = ""
    seconds: float = 0.0


def gpus_here() -> int:
    """GPUs that the programs could use: none without CuPy, which compiles the kernels."""
    import torch

    return torch.cuda.device_count() if importlib.util.find_spec("cupy") else 0


def _numbers_up_to(gpus: int) -> list[int]:
    """Numbers of GPUs that papers compare."""
    return [count for count in (1, 2, 4, 8) if count <= gpus]


def configured(overrides: list[str]) -> Config:
    """The configuration of a command line.

    Raises
    ------
    ConfigError
        If a key, scale or run is unknown, a value of the wrong type, or there are fewer GPUs than
        asked for.
    """
    OmegaConf.register_new_resolver("gpus_here", gpus_here, replace=True)
    OmegaConf.register_new_resolver("eighths", lambda gpus: min(gpus, 8) / 8, replace=True)
    OmegaConf.register_new_resolver("numbers_up_to", _numbers_up_to, replace=True)
    config: Any
    try:
        with initialize_config_dir(str(CONFIGURATION), version_base="1.3"):
            raw = compose("config", overrides)
        merged = OmegaConf.merge(OmegaConf.structured(Config), raw)
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            f"configure the benchmarks with {overrides}",
            str(error).splitlines()[0],
            "see benchmarks/conf for what there is",
        ) from error
    unknown = set(config.bench.only) - set(config.runs)
    if unknown:
        raise ConfigError(
            f"run {', '.join(sorted(unknown))}",
            "no such run",
            f"choose from {', '.join(config.runs)}",
        )
    if config.bench.gpus > gpus_here():
        raise ConfigError(
            f"run benchmarks of the scale '{config.bench.scale}' on {config.bench.gpus} GPUs",
            f"{gpus_here()} GPUs that CuPy can use",
            "use bench.scale=auto, or such a machine",
        )
    return config


def carry_out(
    config: Config,
    out: Path,
    environment: Mapping[str, str] | None = None,
    *,
    limited: bool = False,
) -> list[Outcome]:
    """Run what is asked for, one after the other; what each prints goes to a file of its name.

    A run that fails, or takes longer than its limit if ``limited``, does not keep the others from
    being tried.
    """
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name, run in config.chosen().items():
        if run.gpus > config.bench.gpus or run.skip:
            few = f"needs {run.gpus} GPU{'s' if run.gpus > 1 else ''}"
            why = few if run.gpus > config.bench.gpus else f"not at scale {config.bench.scale}"
            outcomes.append(Outcome(name, "left out", why))
            continue
        print(f"{name} …", flush=True)
        limit_s = run.limit_s if limited else math.inf
        outcomes.append(_carried_out(name, run, out, environment, limit_s))
        last = outcomes[-1]
        print(f"  {last.what} after {last.seconds:.0f} s {last.why}", flush=True)
    summary = {"machine": describe_machine(), "outcomes": [each.__dict__ for each in outcomes]}
    (out / OUTCOMES).write_text(json.dumps(summary, indent=1) + "\n")
    return outcomes


def _carried_out(
    name: str, run: Run, out: Path, environment: Mapping[str, str] | None, limit_s: float
) -> Outcome:
    log = out / f"{name}.log"
    begin = time.perf_counter()
    with log.open("w") as printed:
        started = subprocess.Popen(
            run.command(out.resolve() / f"{name}.json"), stdout=printed, stderr=subprocess.STDOUT,
            cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = started.wait(None if limit_s == math.inf else limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(started)
    seconds = time.perf_counter() - begin
    if code is None:
        return Outcome(name, "failed", f"(took longer than {limit_s:g} s, see {log})", seconds)
    if code == NO_FILES:
        return Outcome(name, "left out", log.read_text().splitlines()[-1], seconds)
    if code:
        return Outcome(name, "failed", f"(status {code}, see {log})", seconds)
    return Outcome(name, "ok", "", seconds)


def _end(started: subprocess.Popen[bytes]) -> None:
    """End a run that is not over, and its ranks with it."""
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
