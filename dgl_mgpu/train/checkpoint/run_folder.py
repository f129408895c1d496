"""The folder of a training run, locked for one job at a time and one run alone."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from dgl_mgpu.errors import OutputError
from dgl_mgpu.report.metrics import METRICS_FILE, require_no_run
from dgl_mgpu.train.compose import typed_hydra_errors
from dgl_mgpu.utils.file_lock import killed_holder, locked

log = logging.getLogger(__name__)

_LOCK = ".run.lock"
_LOOK_SECONDS = 0.1
# Holds the locks of the present command's folders.
_locks = contextlib.ExitStack()


class _Refused(BaseException):
    """Carries an error through Hydra, which only warns of an Exception that a callback raises."""


@contextlib.contextmanager
def locked_folders() -> Iterator[None]:
    """Run Hydra's job within, in a folder that is locked until the end (`FolderGuard`)."""
    with _locks:
        try:
            yield
        except _Refused as refused:
            assert refused.__cause__ is not None
            raise refused.__cause__ from None


class FolderGuard(Callback):
    """Hydra's callback that locks a run's folder before anything is written there.

    Raises OutputError if another job has the folder, or it cannot be made; InvalidInputError if it
    is another run's than the resumed one; ConfigError if its name cannot be resolved.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Lock the folder of one run."""

        def check(folder: Path) -> None:
            from dgl_mgpu.train.checkpoint.checkpoint import resumes_in, run_folder

            resumed = OmegaConf.select(config, "trainer.resume") or None
            if resumes_in(folder, resumed):
                return
            require_no_run(folder, resumed)
            before = folder if resumed is None else run_folder(resumed)
            if holder := killed_holder(before / _LOCK):
                _warn_of_killed(before, holder)

        self._take(config, "hydra.run.dir", check)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Lock the folder that those of several runs are in."""

        def check(folder: Path) -> None:
            for metrics in sorted(folder.glob(f"**/{METRICS_FILE}")):
                require_no_run(metrics.parent)

        self._take(config, "hydra.sweep.dir", check)

    def _take(self, config: DictConfig, key: str, check: Callable[[Path], None]) -> None:
        try:
            with typed_hydra_errors("name the run's folder"), _in_hydra(config):
                folder = Path(str(OmegaConf.select(config, key)))
            folder.mkdir(parents=True, exist_ok=True)
            if holder := _locks.enter_context(locked(folder / _LOCK, _in_use(folder))):
                _warn_of_killed(folder, holder)
            check(folder)
        except Exception as error:
            raise _Refused from error


@contextlib.contextmanager
def _in_hydra(config: DictConfig) -> Iterator[None]:
    """Resolve ``${hydra:…}`` in names of folders as in the run."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _in_use(folder: Path) -> Callable[[str], None]:
    looked = False

    def busy(holder: str) -> None:
        nonlocal looked
        if not looked:  # a process that checks whether the folder's job lives holds it for a moment
            looked = True
            time.sleep(_LOOK_SECONDS)
            return
        raise OutputError(
            f"train in {folder}",
            f"a job has this folder already, {holder}",
            "wait for its end, or choose another folder (hydra.run.dir)",
        )

    return busy


def _warn_of_killed(folder: Path, holder: str) -> None:
    log.warning("the run before in %s was killed, or its machine: it was %s", folder, holder)


def is_as_hydra_made_it(folder: Path, log: Path) -> bool:
    """Whether a run's folder holds only the options and the log that Hydra writes first."""
    options = folder / ".hydra"
    if not options.is_dir():
        return False
    option_files = {options / name for name in ("config.yaml", "hydra.yaml", "overrides.yaml")}
    return {*folder.iterdir(), *options.iterdir()} <= {*option_files, options, log, folder / _LOCK}


def remove_unused(folder: Path, log: Path) -> None:
    """Remove the folder of a run that has written nothing.

    Folders that it is in go with it, if there is nothing else in them, up to the current one.
    """
    here = Path.cwd()
    if folder == here or not is_as_hydra_made_it(folder, log):
        return
    with contextlib.suppress(OSError):  # there is something in it
        shutil.rmtree(folder / ".hydra")
        for file in (log, folder / _LOCK):
            file.unlink(missing_ok=True)
        for parent in (folder, *folder.parents):
            if parent != folder and here not in parent.parents:
                break
            parent.rmdir()
