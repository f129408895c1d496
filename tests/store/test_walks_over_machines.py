"""Random walks over machines that have a store together: those of a store of one machine."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist

from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    InvalidWeightError,
    RankFailedError,
    UnsupportedByStoreError,
)
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.test_random_walks import METAPATH, shop
from tests.store.unread_ids import unread


def friends() -> dgl.DGLGraph:
    """A homogeneous graph with every edge both ways, and nodes without any."""
    draw = torch.Generator().manual_seed(7)
    source, target = torch.randint(300, (2, 1500), generator=draw)
    g = dgl.to_simple(dgl.graph((torch.cat([source, target]), torch.cat([target, source]))))
    return dgl.add_nodes(g, 5)


def _walks_alike(idtype: torch.dtype, ratio: float) -> None:
    rank = dist.get_rank()
    # A rank has no starts, another one mentions some more than once.
    count = [0, 30, 80][rank]
    starts = torch.arange(count).to(idtype) % 40
    for g, options in (
        (shop(idtype), {"metapath": METAPATH}),
        (shop(idtype), {"metapath": METAPATH * 3, "restart_prob": 0.1, "return_eids": True}),
        (shop(idtype), {"metapath": METAPATH, "prob": "w", "return_eids": True}),
        (friends().astype(idtype), {"length": 12}),
        (friends().astype(idtype), {"length": 0}),
        (friends().astype(idtype), {"length": 3, "restart_prob": torch.tensor([0.0, 0.5, 1.0])}),
    ):
        with GlobalStore.from_dgl(g, seed=5, device="cpu") as store:
            expected = _walks(store, starts, options)
        with GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=ratio) as store:
            assert store.graph.spans_machines
            found = _walks(store, starts, options)
        for tensor, other in zip(found, expected, strict=True):
            assert tensor.dtype == other.dtype and torch.equal(tensor.cpu(), other)
        if count:
            assert options.get("length") == 0 or (found[0][:, 1] >= 0).any()


def _walks(store: GlobalStore, starts: torch.Tensor, options: dict[str, Any]) -> tuple:
    store.graph.set_epoch(2)
    return store.graph.random_walk(starts.to(store.device), **options)


@machines_on_gpus_too
@pytest.mark.parametrize(("idtype", "ratio"), [(torch.int32, 0.0), (torch.int64, 0.2)])
def test_walks_are_those_of_one_machine(
    ranks: RankProcesses, idtype: torch.dtype, ratio: float
) -> None:
    ranks.run(on_machines, "abc", _walks_alike, idtype, ratio)


def _wrong() -> None:
    rank, g = dist.get_rank(), shop()
    g.edges["follows"].data["bad"] = torch.where(torch.arange(300) == 7, torch.nan, 1.0).float()
    g.edges["followed-by"].data["bad"] = g.edges["follows"].data["bad"]
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        nodes = torch.arange(60, device=store.device)
        walk = store.graph.random_walk
        for ids in nodes[:1], unread(nodes[:1].cpu()):
            for bad in 60, -1:  # the latter is not to be taken for a walk that has ended
                with pytest.raises(
                    IdOutOfRangeError if rank == 1 else RankFailedError,
                    match=f"there is no seed node {bad}",
                ):
                    walk(ids + (bad if rank == 1 else 0), metapath=["buys"])
        with pytest.raises(InvalidInputError, match="does not begin where"):
            walk(nodes, metapath=["buys", "follows"])
        # Raised by the machine that has the edge.
        with pytest.raises((InvalidWeightError, RankFailedError), match=r"InvalidWeight|infinite"):
            walk(nodes, metapath=["follows"], prob="bad")
        with pytest.raises(UnsupportedByStoreError, match="select PinSAGE neighbors"):
            store.graph.pinsage_neighbors(nodes, 2, 2, 2, ["buys", "bought-by"])
        with pytest.raises(InvalidInputError, match="the same in the same order"):
            walk(nodes, metapath=["buys" if rank == 1 else "follows"])
        # What was wrong is over.
        assert walk(nodes, metapath=["buys"])[0].shape == (60, 2)
    one_way = dgl.edge_type_subgraph(g, ["buys"])
    with (
        GlobalStore.from_dgl(one_way, span="job", replica_ratio=0) as store,
        pytest.raises(UnsupportedByStoreError, match="no edge type has these the other way"),
    ):
        store.graph.random_walk(nodes, metapath=["buys"])


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("there is no room")


def _has_no_room(name: str) -> None:
    g, rank, nodes = shop(), dist.get_rank(), torch.arange(40)
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(f"dgl_mgpu.{name}", _no_room)
            with pytest.raises(
                MemoryError if rank == 1 else RankFailedError, match="there is no room"
            ):
                store.graph.random_walk(nodes, metapath=METAPATH)
        with pytest.raises(RankFailedError, match="there is no room"):
            store.graph.random_walk(nodes, metapath=METAPATH)


@pytest.mark.parametrize(
    "name",
    [
        "store.random_walks.fingerprint_sums",  # before the first step
        "sampling.walks.EvenStepsByRow.step",  # within one
        "sampling.walks.draw_blocks",  # between steps
    ],
)
def test_a_machine_without_room_ends_all(ranks: RankProcesses, name: str) -> None:
    ranks.run(on_machines, "abc", _has_no_room, name)


@machines_on_gpus_too
def test_what_is_wrong_is_told(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _wrong)
