"""Remote reads without neighbour partitioning and without interleaving: MGG's figure 9."""

from __future__ import annotations

import torch

from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.ops.spmm_remote import Entries, Pairs, Sources, pair_up, spmm_remote


class SeparateReads:
    """Sums of local and of remote entries by launches of the kernel of their own, then added up.

    No warp has both.  Adding up is part of it: each row's sum is written and read once more.

    Parameters
    ----------
    reads : RemoteReads
        Those that interleave, with the pipeline and the window that are taken.
    aside : torch.cuda.Stream, optional
        For the remote entries, beside the local ones; without it they come after them.
    """

    def __init__(self, reads: RemoteReads, aside: torch.cuda.Stream | None = None) -> None:
        self._reads, self._aside = reads, aside
        local, remote = (Entries(*tile.relation.csc()[:2]) for tile in reads._virtual)
        nothing = _nothing_like(local)
        self._local, self._remote = (local, nothing), (nothing, remote)
        self._pairs = [self._pair_up(*kinds) for kinds in (self._local, self._remote)]

    def _pair_up(self, local: Entries, remote: Entries) -> Pairs:
        return pair_up(local.indptr, remote.indptr, self._reads.pipeline.ps)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """As `RemoteReads.sums` of a matrix; collective."""
        reads = self._reads
        sources = Sources(rows, reads._shared_rows(rows), reads._starts)
        of_local, of_remote = self._pairs
        if self._aside is None:
            own = spmm_remote(*self._local, sources, pairs=of_local, pipeline=reads.pipeline)
            others = spmm_remote(*self._remote, sources, pairs=of_remote, pipeline=reads.pipeline)
            return own.add_(others)
        current = torch.cuda.current_stream(rows.device)
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            others = spmm_remote(*self._remote, sources, pairs=of_remote, pipeline=reads.pipeline)
        own = spmm_remote(*self._local, sources, pairs=of_local, pipeline=reads.pipeline)
        # What was made aside goes back to that stream, which waits for this one before it goes on.
        current.wait_stream(self._aside)
        return own.add_(others)


class RemoteEntries:
    """Sums all of whose entries are read as remote ones are, local ones as well.

    Of remote entries alone the kernel takes partitions of any size, also whole rows.

    Parameters
    ----------
    reads : RemoteReads
        With the pipeline and the window that are taken.
    partitioned : bool
        Whether rows are cut into the pipeline's partitions, some of them a warp.  Else a warp has
        all entries of one row.
    """

    def __init__(self, reads: RemoteReads, partitioned: bool) -> None:
        self._reads = reads
        part, pipeline = reads.part, reads.pipeline
        indptr, columns, _ = part.relation.csc()
        own = torch.arange(part.num_own_src, device=part.halo.device) + part.src.bounds[part.rank]
        positions = torch.cat([own, part.halo]).to(columns.dtype)
        self._entries = Entries(indptr, positions[columns.long()])
        self._nothing = _nothing_like(self._entries)
        whole = max(1, int(indptr.diff().max()))
        ps, dist = (pipeline.ps, pipeline.dist) if partitioned else (whole, 1)
        self._pairs = pair_up(self._nothing.indptr, indptr, ps)
        self._steps = (dist, pipeline.wpb)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """As `RemoteReads.sums` of a matrix; collective."""
        sources = Sources(rows, self._reads._shared_rows(rows), self._reads._starts)
        # Not by the function in front of it, whose pipelines have local entries, too.
        return torch.ops.dgl_mgpu.spmm_remote.default(
            *self._nothing, *self._entries, *self._pairs, *self._steps, *sources
        )


def _nothing_like(entries: Entries) -> Entries:
    """No entries, of as many rows."""
    return Entries(torch.zeros_like(entries.indptr), entries.columns[:0])
