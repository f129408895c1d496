from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgl_mgpu.distributed import partition as ownership
from dgl_mgpu.distributed.local_part import cut
from dgl_mgpu.distributed.partition import Ownership, assigned, fingerprint, ranges, shuffled
from tests.distributed.graphs import KINDS, edges

_NUM_RANKS = 3


def dealt(strategy: str, num_nodes: int, in_degrees: torch.Tensor) -> Ownership:
    if strategy == "order":
        return ranges(None, in_degrees, _NUM_RANKS)
    if strategy == "shuffled":
        return ranges(shuffled(num_nodes, 2), in_degrees, _NUM_RANKS)
    if strategy == "one rank has all":
        return assigned(torch.ones(num_nodes, dtype=torch.int64), _NUM_RANKS)
    return assigned(torch.arange(num_nodes) % _NUM_RANKS, _NUM_RANKS)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("strategy", ["order", "shuffled", "one rank has all", "dealt"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_in_edges_of_its_nodes(kind, strategy, idtype):
    num_src, num_dst, src, dst = edges(kind)
    of_dst = dealt(strategy, num_dst, torch.bincount(dst, minlength=num_dst))
    of_src = of_dst if num_src == num_dst else dealt("shuffled", num_src, torch.zeros(num_src))
    parts = [cut(src.to(idtype), dst.to(idtype), of_src, of_dst, r) for r in range(_NUM_RANKS)]

    all_edges = [edge for part in parts for edge in part.edges.tolist()]
    assert sorted(all_edges) == list(range(len(src)))
    for rank, part in enumerate(parts):
        own_src, own_dst = of_src.nodes(rank).tolist(), of_dst.nodes(rank).tolist()
        assert (part.num_own_src, part.num_own_dst) == (len(own_src), len(own_dst))
        assert part.relation.idtype == part.out_degrees.dtype == idtype
        everyone = [node for r in range(_NUM_RANKS) for node in of_src.nodes(r).tolist()]
        halo = [everyone[position] for position in part.halo.tolist()]
        assert part.halo.tolist() == sorted(set(part.halo.tolist()))

        # Edge by edge, the ends are those of the whole graph.
        assert part.relation.num_src == len(own_src) + len(halo)
        row, col = part.relation.coo()
        local = [(own_src + halo)[r] for r in row.tolist()]
        assert local == src[part.edges].tolist()
        assert [own_dst[c] for c in col.tolist()] == dst[part.edges].tolist()
        # Destination by destination, and edges of one in the order of their ids.
        order = [(c, e) for c, e in zip(col.tolist(), part.edges.tolist(), strict=True)]
        assert order == sorted(order)

        # The halo is what edges come from, and nothing else.
        read = {src[e].item() for e in range(len(src)) if dst[e].item() in own_dst}
        assert set(halo) == read - set(own_src)
        for other in range(_NUM_RANKS):
            theirs = [node for node in of_src.nodes(other).tolist() if node in set(halo)]
            assert part.wanted[other] == len(theirs)
            # What the other one sends this rank, in the order in which the halo has it.
            begin = sum(parts[other].sending[:rank])
            sent = parts[other].sent[begin : begin + parts[other].sending[rank]]
            assert [of_src.nodes(other).tolist()[row] for row in sent.tolist()] == theirs
        assert len(part.sent) == sum(part.sending) and len(part.halo) == sum(part.wanted)
        assert part.wanted[rank] == part.sending[rank] == 0
        assert part.out_degrees.tolist() == [(src == node).sum().item() for node in own_src]


class _Largest(TorchDispatchMode):
    """Notes how many bytes the largest result of an operator has."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple) else [found]:
            if isinstance(each, torch.Tensor):
                self.nbytes = max(self.nbytes, each.nbytes)
        return found


def test_a_part_of_many_edges_is_cut_out_of_a_byte_for_each(monkeypatch):
    monkeypatch.setattr(ownership, "_STRETCH", 1000)
    num_nodes, num_edges, num_ranks = 200, 30_000, 20
    draw = torch.Generator().manual_seed(4)
    src, dst = (torch.randint(num_nodes, (num_edges,), generator=draw) for _ in range(2))
    owned = ranges(shuffled(num_nodes, 0), torch.bincount(dst, minlength=num_nodes), num_ranks)
    with _Largest() as largest:
        fingerprint(src, dst)
    assert 0 < largest.nbytes <= 8 * 1000
    with _Largest() as largest:
        part = cut(src, dst, owned, owned, 3)
    assert largest.nbytes == num_edges
    assert part.relation.num_edges > num_edges // 40
