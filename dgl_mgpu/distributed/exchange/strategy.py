"""The names of the strategies to exchange rows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.spmm_remote import Pipeline

#: What a pipeline's parameters may be: MGG's ranges (section 4) in powers of two.
STEPS = {"ps": (1, 2, 4, 8, 16, 32), "dist": (1, 2, 4, 8, 16), "wpb": (1, 2, 4, 8, 16)}
#: Rounds of the halo where no number is given.
_CHUNKS = 2
_HALO = re.compile(r"halo in ([1-9]\d{0,8})")
_REMOTE = re.compile(r"remote reads, " + " ".join(rf"{name}=(\d{{1,9}})" for name in STEPS))
#: Instead of a strategy's name: whichever is the fastest.
AUTO = "auto"


@dataclass(frozen=True)
class ExchangeStrategy:
    """Broadcast; or the halo, before all sums or in chunks; or remote reads with some pipeline.

    Attributes
    ----------
    chunks : int
        0 for none.
    pipeline : Pipeline, optional
    is_blocking : bool
        Whether the halo comes before all sums.
    """

    chunks: int = 0
    pipeline: Pipeline | None = None
    is_blocking: bool = False

    def __str__(self) -> str:
        if self.pipeline is not None:
            steps = (f"{name}={getattr(self.pipeline, name)}" for name in STEPS)
            return f"remote reads, {' '.join(steps)}"
        if self.is_blocking:
            return "halo at first"
        return f"halo in {self.chunks}" if self.chunks else "broadcast"

    @classmethod
    def named(cls, name: str) -> ExchangeStrategy:
        """The strategy of a name: 'halo', 'broadcast', 'remote', or in full, as ``str`` writes it.

        Raises
        ------
        InvalidInputError
            If a pipeline's parameter is out of its range, or there is no such strategy.
        """
        short = {"halo": cls(chunks=_CHUNKS), "remote": cls(pipeline=Pipeline())}
        others = {str(BROADCAST): BROADCAST, str(HALO_BLOCKING): HALO_BLOCKING}
        if found := {**short, **others}.get(str(name)):
            return found
        if chunks := _HALO.fullmatch(str(name)):
            return cls(chunks=int(chunks[1]))
        if parameters := _REMOTE.fullmatch(str(name)):
            return cls(pipeline=Pipeline(*map(int, parameters.groups())))
        raise InvalidInputError(
            "exchange rows between ranks",
            f"there is no exchange={name!r}",
            f"use {AUTO}, halo, broadcast, remote, or one in full: 'halo at first', 'halo in 3', "
            "'remote reads, ps=16 dist=8 wpb=2'",
        )


BROADCAST = ExchangeStrategy()
HALO_BLOCKING = ExchangeStrategy(is_blocking=True)
