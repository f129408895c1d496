"""A script of DGL's examples, and how it is run: what lists of cases consist of."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from packaging.requirements import Requirement

#: A pattern of a number as scripts print it, as a group.
NUMBER = r"([0-9.]+(?:e-?\d+)?)"
#: The pattern of most scripts.
ACCURACY = r"[Tt]est [Aa]cc(?:uracy|\.)?:? (\d\.\d+)"


@dataclass(frozen=True)
class Case:
    """A script, and how it is run.

    Attributes
    ----------
    name : str
    script : str
        Relative to DGL's ``examples``; a notebook's code is run as a script.
    args : tuple of str
    data : str or None
        Of :data:`benchmarks.dgl_examples_data.WRITERS`; None if the script makes its own.
    measure : str
        What the pattern finds.
    pattern : str
        Its last match in the script's output has the value as its group.
    on_cpu : tuple of str or None
        Arguments for a machine without a GPU; None if the script needs one.
    requires : tuple of str
        Packages beyond DGL's own needs, as pip takes them.
    is_seeded : bool
        Whether the script seeds itself, so that runs differ in little.
    loads_on_gpu : bool
        Whether a loader of DGL's gives it mini-batches on the GPU: else ``on`` captures nothing.
    num_gpus : int
        GPUs that ``args`` name.
    """

    name: str
    script: str
    args: tuple[str, ...]
    data: str | None
    pattern: str = ACCURACY
    measure: str = "test accuracy"
    on_cpu: tuple[str, ...] | None = None
    requires: tuple[str, ...] = ("torchmetrics",)
    is_seeded: bool = False
    loads_on_gpu: bool = True
    num_gpus: int = 1

    def arguments(self, has_gpu: bool) -> tuple[str, ...] | None:
        """Those for this machine."""
        return self.args if has_gpu else self.on_cpu

    def value(self, output: str) -> float | None:
        """What the script printed last of its measure."""
        found = re.findall(self.pattern, output, re.MULTILINE)
        return float(found[-1]) if found else None

    def absent(self) -> list[str]:
        """Packages that the script needs and this machine lacks."""
        return [each for each in self.requires if not _is_installed(Requirement(each))]


def _is_installed(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version)
