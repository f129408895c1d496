"""Every error this package raises on purpose, and the advice for a name that is not known.

Each says three things: what was asked for, what was found instead, and what the reader can
do about it.  Each also derives from the built-in exception that fits, so that ``except
ValueError`` keeps working in code that has never heard of this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: As many names as advice still helps with.
_FEW = 3


def nearest(name: str, known: Iterable[str], group: str = "") -> str:
    """Advice that names what was probably meant, in upper or lower case, or all that there is.

    That is what the name is a part of, where it is a part of few, or else the one most like it.
    ``group`` stands before each of them in the advice.
    """
    by_lower = {each.lower(): each for each in sorted(known)}
    close = [each for each in by_lower if name.lower() in each]
    if not 0 < len(close) <= _FEW:
        close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(repr(group + by_lower[each]) for each in close)}?"
    return f"choose from {', '.join(group + each for each in by_lower.values())}"


class DGLMGPUError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    asked : str
        What was asked for, as a clause that goes on from «cannot»: ``"gather rows 0..9 of table
        'feat'"``; or keys with their values, ``"trainer.ranks=0"``.
    found : str
        What was found instead: ``"there is no row 12, the table has 10"``.
    fix : str
        What to do: ``"pass ids in [0, 10)"``.
    """

    def __init__(self, asked: str, found: str = "", fix: str = "") -> None:
        # args hold all three: the error pickles across ranks. A DataLoader worker's error is made
        # anew from its text alone, in another process, and that is then all there is.
        super().__init__(asked, found, fix)
        self.asked = asked
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        if not self.found:
            return self.asked
        # Keys are named as a command line has them, other things that were asked for by a verb.
        use = "use " if "=" in self.asked.partition(" ")[0] else ""
        return f"cannot {use}{self.asked}: {self.found}; {self.fix}"


class InvalidInputError(DGLMGPUError, ValueError):
    """An argument has the wrong shape, dtype, range or content."""


class IdOutOfRangeError(InvalidInputError, IndexError):
    """A node or edge id is negative or not smaller than the number of rows."""


class InvalidWeightError(InvalidInputError):
    """Edge weights hold NaN, infinity or a negative value, or are all zero at some node."""


class ConfigError(DGLMGPUError, ValueError):
    """A configuration key, value or data-set name is unknown or out of its range."""


class _MemoryError(DGLMGPUError, MemoryError):
    """Memory is too small.

    Attributes
    ----------
    needed, available : int
        Bytes.
    """

    def __init__(
        self, asked: str, found: str = "", fix: str = "", needed: int = 0, available: int = 0
    ) -> None:
        super().__init__(asked, found, fix)
        self.args = (asked, found, fix, needed, available)
        self.needed = needed
        self.available = available


class PlanDoesNotFitError(_MemoryError):
    """A placement needs more memory than a tier has.

    Attributes
    ----------
    needed, available : int
        Bytes, per GPU for device tiers and for the whole machine for host and disk.
    """


class DeviceMemoryError(_MemoryError):
    """A device, mostly a GPU, has too little free memory, or cannot map memory of the host.

    Attributes
    ----------
    needed, available : int
        Bytes on that device; 0 where they are not known.
    """


class PeerAccessError(DGLMGPUError, RuntimeError):
    """A rank cannot map the memory of another's GPU."""


class StoreClosedError(DGLMGPUError, RuntimeError):
    """A store is read after it was closed, or from a process that cannot reach its memory."""


class UnreachableError(DGLMGPUError):
    """A rank can reach no copy of some partition over any link of the topology."""


class SharedMemoryError(DGLMGPUError, OSError):
    """A shared-memory segment cannot be created, sized or mapped."""


class DataFormatError(DGLMGPUError, ValueError):
    """A data file is missing, truncated, corrupt or of another format."""


class CheckpointError(DGLMGPUError, ValueError):
    """A checkpoint is missing, truncated, corrupt or belongs to another run's configuration."""


class OutputError(DGLMGPUError, OSError):
    """What is to be written, a run's metrics, a data set or results in files, cannot be."""


class LimitError(DGLMGPUError, OSError):
    """A limit that the system sets for each process, such as of open files, is reached."""


class NonFiniteLossError(DGLMGPUError, FloatingPointError):
    """The loss of a training run became NaN or infinite."""


class RankFailedError(DGLMGPUError, RuntimeError):
    """A rank of a multi-process run raised, was killed or stopped answering."""


class WorkerFailedError(DGLMGPUError, RuntimeError):
    """A process that samples, a DataLoader's worker, was killed or cannot hand a batch over."""


class UnsupportedEnvironmentError(DGLMGPUError, ImportError):
    """Python, torch or DGL is outside the range this package supports."""


class UnsupportedByStoreError(DGLMGPUError, AttributeError):
    """A store's graph does not have what a DGLGraph has under this name."""


class UnsupportedByPartitionError(DGLMGPUError, TypeError):
    """A part of a graph cannot do what the whole graph can."""


class PartitionedRowsError(DGLMGPUError, RuntimeError):
    """A function of torch cannot take rows of a graph that ``--partition`` has dealt out."""


class UnavailableError(DGLMGPUError, ImportError):
    """A part of DGL, or an extra of this package, cannot work in this environment."""
