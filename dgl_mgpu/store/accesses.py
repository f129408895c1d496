"""Counts how often nodes are read while a store is used, to order the rows of a later store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.placement import save_accesses
from dgl_mgpu.store.feature_storage import Traffic
from dgl_mgpu.store.memory import Table

# Counts that ranks exchange at a time.
_CHUNK_COUNTS = 1 << 22


def add_accesses(counts: torch.Tensor, ids: torch.Tensor) -> None:
    """Add one for each id, on the device of the counts, without a wait."""
    counts.index_add_(0, ids, counts.new_ones(1).expand(len(ids)))


class Accesses:
    """How often each node's features were read; made by :meth:`GlobalStore.count_accesses`.

    Counts within ``with``, which may be entered again: then counts add up.

    Counts each row of a node feature that this process reads through ``store.graph`` or
    :meth:`GlobalStore.gather`: the input nodes of every mini-batch of a DataLoader, whichever
    process sampled it, and rows that a script reads itself.  The count of a node is that of its
    feature that was read most, so that a label read for the seeds does not count them twice.
    Edge features and topology do not count, nor do rows that a DataLoader's worker or an operator
    called without the graph reads.

    Takes 4 bytes a node on the store's device for each feature that is read.

    Parameters
    ----------
    traffic : Traffic
        Calls this for every gather.
    tables : mapping of Table to str
        The node type of each table of node features.
    num_nodes : mapping of str to int
    """

    def __init__(
        self, traffic: Traffic, tables: Mapping[Table, str], num_nodes: Mapping[str, int]
    ) -> None:
        self._traffic = traffic
        self._tables = dict(tables)
        self._num_nodes = dict(num_nodes)
        self._counts: dict[Table, torch.Tensor] = {}

    def __enter__(self) -> Accesses:
        self._traffic.watchers.append(self._add)
        return self

    def __exit__(self, *exception: object) -> None:
        self._traffic.watchers.remove(self._add)

    def _add(self, table: Table, ids: torch.Tensor) -> None:
        if table not in self._tables:  # an edge feature
            return
        counts = self._counts.get(table)
        if counts is None:
            num_rows = self._num_nodes[self._tables[table]]
            counts = torch.zeros(num_rows, dtype=torch.int32, device=ids.device)
            if counts.is_cuda:
                torch.cuda.synchronize(counts.device)  # other streams may be the next to add
            self._counts[table] = counts
        if not len(counts):
            return
        if ids.is_cuda:
            # The gather reports ids out of range later; here they must do no harm.
            ids = ids.clamp(0, len(counts) - 1)
        add_accesses(counts, ids)

    def counts(self) -> dict[str, np.ndarray]:
        """What this rank counted so far.

        Returns
        -------
        dict of ndarray, int32, shape (num_nodes,)
            By node type.
        """
        by_type = {ntype: np.zeros(num, np.int32) for ntype, num in self._num_nodes.items()}
        for table, counts in list(self._counts.items()):
            if counts.is_cuda:
                torch.cuda.synchronize(counts.device)  # streams that still add
            largest = by_type[self._tables[table]]
            np.maximum(largest, counts.cpu().numpy(), out=largest)
        return by_type

    def save(self, path: str | Path) -> None:
        """Write the sum of all ranks' counts to a file that ``hotness`` of a store can name.

        Collective: every rank calls it, the first one writes.

        Parameters
        ----------
        path : str or Path
            An .npz file; see :func:`dgl_mgpu.placement.save_accesses`.

        Raises
        ------
        InvalidInputError
            If no rank counted anything, or the file cannot be written.
        RankFailedError
            On the other ranks, if so.
        """
        ranks = Communicator.of_all_machines()
        counts = {ntype: _sum(ranks, local) for ntype, local in self.counts().items()}

        def write() -> None:
            if not any(total.any() for total in counts.values()):
                raise InvalidInputError(
                    f"save to {path} how often nodes were read",
                    "no node feature was read while counting",
                    "read features inside 'with store.count_accesses() as accesses:'",
                )
            save_accesses(path, counts)

        ranks.broadcast_from_rank0(f"save to {path} how often nodes were read", write)


def _sum(ranks: Communicator, counts: np.ndarray) -> np.ndarray:
    total = np.empty(len(counts), np.int64)
    for begin in range(0, len(counts), _CHUNK_COUNTS):
        part = slice(begin, begin + _CHUNK_COUNTS)
        total[part] = np.sum(ranks.all_gather(counts[part]), axis=0, dtype=np.int64)
    return total
