"""Optional packages: which extra of this package brings them, and an error that says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from dgl_mgpu.errors import UnavailableError

#: Extras in ``pyproject.toml`` by the packages that are imported of them.
EXTRAS = {
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "ogb": "ogb",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


@contextmanager
def required(asked: str) -> Iterator[None]:
    """Import optional packages in here.

    Parameters
    ----------
    asked : str
        What they are imported for, as in :class:`~dgl_mgpu.errors.DGLMGPUError`.

    Raises
    ------
    UnavailableError
        If one of `EXTRAS` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise _not_installed(package, asked) from error


def require(package: str, asked: str) -> None:
    """Raise UnavailableError, as `required`, if one of `EXTRAS` is not installed."""
    if not is_installed(package):
        raise _not_installed(package, asked)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def _not_installed(package: str, asked: str) -> UnavailableError:
    return UnavailableError(asked, f"{package} is not installed", install_command(EXTRAS[package]))


def install_command(extra: str) -> str:
    """What installs an extra."""
    return f"pip install 'dgl-mgpu[{extra}]'"
