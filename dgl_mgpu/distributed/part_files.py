"""A rank's part of a graph, read from the files of ``dgl.distributed.partition_graph``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.strategies import AUTO, ExchangeStrategy
from dgl_mgpu.distributed.graph import PartitionedGraph, assemble, device_of
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.distributed.partition import Ownership
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.store.part_files import PartEdges, Rows, facts_of, read_part

_ACTION = "load a rank's part of a graph"
#: Edges, and bytes of features, that are on their way from the files at a time.
_CHUNK, _CHUNK_BYTES = 1 << 22, 1 << 26


def load_partition(
    path: Path | str, *, exchange: str = "halo", device: torch.device | str | None = None
) -> PartitionedGraph:
    """Give each rank its part of a graph that was partitioned before, from its own files alone.

    Collective where torch.distributed is initialised: every rank calls it.  No rank needs room for
    the whole graph.  Nodes and edges have the numbers of the partition, part by part: rank ``n``
    has part ``n``, of which it needs the folder, and the JSON file.

    Parameters
    ----------
    path : Path or str
        The JSON file that ``dgl.distributed.partition_graph`` or
        :func:`dgl_mgpu.write_partition` wrote, of as many parts as there are ranks.
    exchange : str
        How ranks get each other's rows, as for :func:`dgl_mgpu.partition_graph`.
    device : torch.device or str, optional
        Where the part goes: this rank's GPU by default, or the CPU where there is none.

    Returns
    -------
    PartitionedGraph
        As :func:`dgl_mgpu.partition_graph` gives it, of int64 ids, with the features of this rank's
        nodes in the dtypes of the files; those of edges are not read.  ``ndata[dgl.NID]`` and
        ``edata[dgl.EID]`` have the partition's numbers of its nodes and edges, int64.

    Raises
    ------
    InvalidInputError
        If the files cannot be read or do not belong together, there are more or fewer parts than
        ranks, ``exchange`` is no strategy, or there is no such device.
    RankFailedError
        If another rank failed.
    """
    ranks = Communicator.of_all_machines()

    def read() -> tuple[Any, torch.device]:
        if exchange != AUTO:
            ExchangeStrategy.named(exchange)
        found = read_part(Path(path), ranks.rank, ranks.size, "ranks")
        return found, device_of(None, device)

    files, where = ranks.run_all(_ACTION, read)
    _check_alike({**facts_of(files), "exchange": exchange}, ranks)
    owned = {
        ntype: Ownership(None, tuple(ids.bounds.tolist())) for ntype, ids in files.nodes.items()
    }
    parts = {
        etype: _cut(
            ranks.run_all(_ACTION, partial(_edges, of_type, where)),
            owned[etype[0]],
            owned[etype[2]],
            int(files.edges[etype].bounds[-1]),
            ranks,
        )
        for etype, of_type in files.in_edges.items()
    }
    graph = assemble(parts, owned, exchange, where)
    for ntype, ownership in owned.items():
        data = graph.nodes[ntype].data
        for name, rows in files.features[ntype].items():
            data[name] = ranks.run_all(_ACTION, partial(_copied, rows, where))
        data[dgl.NID] = ownership.nodes(ranks.rank, where)
    for etype, part in parts.items():
        graph.edges[etype].data[dgl.EID] = part.edges
    return graph


def _check_alike(facts: dict[str, str], ranks: Communicator) -> None:
    for rank, others in enumerate(ranks.all_gather(facts)):
        if others != facts:
            name = next(key for key in {**facts, **others} if facts.get(key) != others.get(key))
            raise InvalidInputError(
                _ACTION,
                f"rank {rank} found {others.get(name)} for {name}, this one {facts.get(name)}",
                "give all ranks files of one partition, and the same exchange",
            )


def _copied(rows: np.ndarray, where: torch.device) -> torch.Tensor:
    """Mapped rows on a device, of which the host holds some at a time."""
    like = torch.from_numpy(rows[:0].copy())
    copied = torch.empty(rows.shape, dtype=like.dtype, device=where)
    row_bytes = max(1, rows[:1].nbytes)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, len(rows), step):
        copied[begin : begin + step] = torch.from_numpy(rows[begin : begin + step].copy())
    return copied


def _ids(column: Rows, where: torch.device) -> torch.Tensor:
    """Ids that are looked up in the files; int64."""
    count = column.shape[0]
    ids = torch.empty(count, dtype=torch.int64, device=where)
    for begin in range(0, count, _CHUNK):
        places = np.arange(begin, min(begin + _CHUNK, count))
        ids[begin : begin + _CHUNK] = torch.from_numpy(column[places])
    return ids


def _edges(
    edges: PartEdges, where: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets of own nodes' edges, and the edges' sources and ids; int64."""
    indptr = torch.zeros(len(edges.degrees) + 1, dtype=torch.int64)
    torch.cumsum(torch.from_numpy(edges.degrees), 0, out=indptr[1:])
    return indptr.to(where), _ids(edges.sources, where), _ids(edges.eids, where)


def _cut(
    edges: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    of_src: Ownership,
    of_dst: Ownership,
    num_whole_edges: int,
    ranks: Communicator,
) -> Part:
    """A rank's part of a relation, of its own edges; others tell it what they read of its rows."""
    indptr, columns, eids = edges
    low, high = of_src.bounds[ranks.rank], of_src.bounds[ranks.rank + 1]
    remote = (columns < low) | (columns >= high)
    halo, place = torch.unique(columns[remote], return_inverse=True)
    own = columns[~remote] - low
    columns -= low
    columns[remote] = place + (high - low)
    out_degrees = torch.bincount(own, minlength=high - low)
    owners = of_src.owners(halo)
    wanted = torch.bincount(owners, minlength=ranks.size).tolist()
    sending = [of_rank[ranks.rank] for of_rank in ranks.all_gather(wanted)]
    # For each row of another rank, which of its rows it is, and how many edges here come from it.
    bounds = torch.tensor(of_src.bounds, device=halo.device)
    reads = torch.bincount(place, minlength=len(halo))
    sent, of_others = ranks.all_to_all(
        torch.stack([halo - bounds[owners], reads], 1), wanted, sending
    ).unbind(1)
    out_degrees.index_add_(0, sent, of_others)
    return Part(
        rank=ranks.rank,
        src=of_src,
        dst=of_dst,
        relation=Relation(
            high - low + len(halo), len(indptr) - 1, csc=Compressed(indptr, columns, None)
        ),
        edges=eids,
        halo=halo,
        wanted=wanted,
        sent=sent.contiguous(),
        sending=sending,
        out_degrees=out_degrees,
        num_whole_edges=num_whole_edges,
    )
