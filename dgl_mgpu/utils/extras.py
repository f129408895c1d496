"""Optional packages: which extra of this package brings them, and an error that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dgl_mgpu.errors import UnavailableError

#: Extras in ``pyproject.toml`` by the packages that are imported of them.
EXTRAS = {
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "ogb": "ogb",
    "pandas": "ogb",
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
        raise UnavailableError(
            asked, f"{package} is not installed", f"{install_command(EXTRAS[package])}"
        ) from error


def install_command(extra: str) -> str:
    """What installs an extra."""
    return f"pip install 'dgl-mgpu[{extra}]'"
