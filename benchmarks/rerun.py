"""The kept results of one or two GPUs, made anew together and replaced together."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.claims.kept import CLAIMS_PAGE, draw_headlines, kept_pages
from benchmarks.claims.page import page
from benchmarks.claims.pictures import draw
from benchmarks.claims.registry import KEPT, Results
from benchmarks.runs import Config, Outcome, carry_out, configured, gpus_here
from dgl_mgpu.errors import ConfigError, DataFormatError


def report(results: Results, folder: Path) -> None:
    """Write the page and the pictures of what answers the papers' claims."""
    (folder / CLAIMS_PAGE).write_text(page(results))
    draw(results, folder)


def report_kept() -> None:
    """Write the pages and the pictures of the kept results."""
    report(Results(), KEPT)
    draw_headlines(KEPT)
    for name, content in kept_pages().items():
        (KEPT / name).write_text(content)


def rerun(arguments: list[str]) -> list[Outcome]:
    """Run what is kept of so many GPUs, and replace all of it, or nothing.

    Parameters
    ----------
    arguments : list of str
        ``gpus=1`` or ``gpus=2``, and what else :func:`benchmarks.runs.configured` takes:
        ``bench.only`` picks some of the set.

    Returns
    -------
    list of Outcome
        Nothing has been replaced if one is not 'ok'.

    Raises
    ------
    ConfigError
        If nothing is kept of this number of GPUs, or there are fewer.
    DataFormatError
        If results are of several commits, or lack what the pages show of them; then nothing has
        been replaced.
    """
    config, files = _configured(arguments)
    out = Path(config.bench.out)
    outcomes = carry_out(config, out, _only_gpus(config.bench.gpus), limited=True)
    if all(each.what == "ok" for each in outcomes):
        _replace({out / f"{run}.json": file for run, file in files.items()})
    return outcomes


def _configured(arguments: list[str]) -> tuple[Config, dict[str, str]]:
    """The configuration of the set, and the kept file of each run."""
    words = [f"bench.{word}" if word.startswith("gpus=") else word for word in arguments]
    config = configured(words)
    gpus = config.bench.gpus
    files = {name: run.keeps[gpus] for name, run in config.chosen().items() if gpus in run.keeps}
    others = sorted(set(config.bench.only) - set(files))
    if not files or others:
        kept = sorted({number for run in config.runs.values() for number in run.keeps})
        raise ConfigError(
            f"rerun {', '.join(others) or 'what is kept'} on {gpus} GPUs",
            "no file of docs/benchmarks is kept of that",
            f"say gpus=N for one of {kept}, and runs whose 'keeps' in benchmarks/conf has it",
        )
    config.bench.only = list(files)
    return config, files


def _only_gpus(gpus: int) -> Mapping[str, str]:
    """The environment in which programs see so many GPUs."""
    if gpus == gpus_here():
        return os.environ
    there = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus_here())))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(there.split(",")[:gpus])}


def _replace(files: Mapping[Path, str]) -> None:
    """Replace kept files by results, once both pages have been made of them."""
    commits = {json.loads(result.read_text())["machine"]["commit"] for result in files}
    if len(commits) > 1:
        raise DataFormatError(
            "replace the kept results",
            f"they are of the commits {', '.join(sorted(commits))}",
            "run all of them from one checkout",
        )
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder)
        for path in KEPT.iterdir():
            (tried / path.name).symlink_to(path)
        for result, name in files.items():
            (tried / name).unlink(missing_ok=True)
            (tried / name).symlink_to(result.resolve())
        page(Results(tried))
        kept_pages(tried)
    for result, name in files.items():
        shutil.copyfile(result, KEPT / name)
    report_kept()
