"""A rank's part of a graph, read from the files of ``dgl.distributed.partition_graph``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from dgl_mgpu.store.part_files import PartEdges, facts_of, read_part
from dgl_mgpu.utils.types import CanonicalEtype
from dgl_mgpu.utils.unused_memory import trim_heap

_ACTION = "load a rank's part of a graph"
#: Edges, and bytes of features, that are on their way from the files at a time.
_CHUNK, _CHUNK_BYTES = 1 << 19, 1 << 23


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
        nodes and edges in the dtypes of the files.  ``ndata[dgl.NID]`` and ``edata[dgl.EID]`` have
        the partition's numbers of its nodes and edges, int64.

    Raises
    ------
    InvalidInputError
        If the files cannot be read or do not belong together, there are more or fewer parts than
        ranks, ``exchange`` is no strategy, or there is no such device.
    RankFailedError
        If another rank failed.
    """
    ranks = Communicator.of_all_machines()

    def read_files() -> tuple[Any, torch.device]:
        if exchange != AUTO:
            ExchangeStrategy.named(exchange)
        found = read_part(Path(path), ranks.rank, ranks.size, "ranks")
        trim_heap()  # of what edges were sorted with
        return found, device_of(None, device)

    files, where = ranks.run_all(_ACTION, read_files)
    _check_alike({**facts_of(files), "exchange": exchange}, ranks)
    owned = {
        ntype: Ownership(None, tuple(ids.bounds.tolist())) for ntype, ids in files.nodes.items()
    }
    parts = {}
    for etype, ids in files.edges.items():
        read = partial(_OwnEdges.of, files.in_edges, etype, owned[etype[0]], ranks.rank, where)
        own = ranks.run_all(_ACTION, read)
        with ranks.told_of_errors():
            ends = owned[etype[0]], owned[etype[2]]
            parts[etype] = _part(own, *ends, int(ids.bounds[-1]), ranks)
    with ranks.told_of_errors():
        graph = assemble(parts, owned, exchange, where)

    def fill() -> None:
        for ntype, ownership in owned.items():
            data = graph.nodes[ntype].data
            for name, rows in files.features[ntype].items():
                data[name] = _copied(rows, where)
            data[dgl.NID] = ownership.nodes(ranks.rank, where)
        for etype, part in parts.items():
            data, first = graph.edges[etype].data, int(files.edges[etype].bounds[ranks.rank])
            for name, rows in files.edge_features[etype].items():
                data[name] = _copied(rows, where, part.edges - first)
            data[dgl.EID] = part.edges

    ranks.run_all(_ACTION, fill)
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


def _copied(
    rows: np.ndarray, where: torch.device, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Mapped rows on a device, those at some places, of which the host holds some at a time."""
    like = torch.from_numpy(rows[:0].copy())
    copied = torch.empty(rows.shape, dtype=like.dtype, device=where)
    row_bytes = max(1, rows[:1].nbytes)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, len(rows), step):
        some: slice | np.ndarray = slice(begin, begin + step)
        if places is not None:
            some = places[some].cpu().numpy()
        copied[begin : begin + step] = torch.from_numpy(rows[some].copy())
    return copied


class _OwnEdges(NamedTuple):
    """A rank's own edges of a type, read from its files."""

    relation: Relation  # from own and halo rows to own rows
    eids: torch.Tensor  # int64, shape (num_edges,)
    halo: torch.Tensor  # int64, shape (num_halo,): other ranks' nodes that edges begin at
    halo_rows: torch.Tensor  # int64, shape (num_halo,): which of its owner's rows each is
    wanted: list[int]  # by rank, how many of the halo's nodes it owns
    reads: torch.Tensor  # int64, shape (own rows + num_halo,): edges that begin at each

    @classmethod
    def of(
        cls,
        in_edges: dict[CanonicalEtype, PartEdges],
        etype: CanonicalEtype,
        of_src: Ownership,
        rank: int,
        where: torch.device,
    ) -> _OwnEdges:
        """Read the edges of a type, which are taken out of ``in_edges``.

        In memory are, beside what is returned, a byte for each node of all ranks and a chunk.
        """
        edges = in_edges.pop(etype)
        indptr = torch.zeros(len(edges.degrees) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(edges.degrees), 0, out=indptr[1:])
        columns = torch.empty(int(indptr[-1]), dtype=torch.int64, device=where)
        eids = torch.empty_like(columns)
        is_read = torch.zeros(of_src.num_nodes, dtype=torch.bool, device=where)
        for places, sources, numbers in edges.chunks(_CHUNK):
            chunk = slice(int(places[0]), int(places[-1]) + 1)
            columns[chunk] = torch.from_numpy(sources)
            eids[chunk] = torch.from_numpy(numbers)
            is_read[columns[chunk]] = True
        del edges  # with where each is in the file
        trim_heap()
        low, high = of_src.bounds[rank : rank + 2]
        is_read[low:high] = False
        halo = is_read.nonzero()[:, 0]
        del is_read
        num_rows = high - low + len(halo)
        reads = torch.zeros(num_rows, dtype=torch.int64, device=where)
        for chunk in columns.split(_CHUNK):
            is_own = (chunk >= low) & (chunk < high)
            place = torch.searchsorted(halo, chunk) + (high - low)
            chunk.copy_(torch.where(is_own, chunk - low, place))
            reads.index_add_(0, chunk, torch.ones_like(chunk))
        bounds = torch.tensor(of_src.bounds, device=where)
        wanted = torch.searchsorted(halo, bounds).diff().tolist()
        halo_rows = halo.clone()
        for of_owner, first in zip(halo_rows.split(wanted), of_src.bounds, strict=False):
            of_owner -= first
        relation = Relation(
            num_rows, len(indptr) - 1, csc=Compressed(indptr.to(where), columns, None)
        )
        return cls(relation, eids, halo, halo_rows, wanted, reads)


def _part(
    own: _OwnEdges, of_src: Ownership, of_dst: Ownership, num_whole_edges: int, ranks: Communicator
) -> Part:
    """A rank's part of a relation; others tell it what they read of its rows."""
    sending = [of_rank[ranks.rank] for of_rank in ranks.all_gather(own.wanted)]
    out_degrees, of_halo = own.reads.split([of_src.count(ranks.rank), len(own.halo)])
    sent = ranks.all_to_all(own.halo_rows, own.wanted, sending)
    of_others = ranks.all_to_all(of_halo, own.wanted, sending)
    return Part(
        rank=ranks.rank,
        src=of_src,
        dst=of_dst,
        relation=own.relation,
        edges=own.eids,
        halo=own.halo,
        wanted=own.wanted,
        sent=sent,
        sending=sending,
        out_degrees=out_degrees.index_add(0, sent, of_others),
        num_whole_edges=num_whole_edges,
    )
