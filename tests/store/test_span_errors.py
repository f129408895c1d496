"""What a store over machines does not serve, and what is wrong on one rank: all are told."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading.negative_sampler import GlobalUniform

import dgl_mgpu
from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import (
    ConfigError,
    IdOutOfRangeError,
    InvalidInputError,
    RankFailedError,
    StoreClosedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.graph.errors import UnknownFeatureError
from dgl_mgpu.ops import SampleFuture, SampleKey
from dgl_mgpu.store.graph import StoreGraph
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.span_graphs import NODES, WIDTH, batches, emulated_gpus, equal, power_law
from tests.store.unread_ids import unread


def _refused() -> None:
    g = power_law()
    error = pytest.raises(UnsupportedByStoreError, match="the job have one copy of the data")
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0, edges=True) as store:
        nodes, graph = torch.arange(5), store.graph
        with error:
            graph.pinsage_neighbors(nodes, 2, 2, 2)
        with error:
            graph.has_edges_between(nodes, nodes)
        with error:
            graph.view()
        with error:
            _ = graph.get_node_storage("feat").view
        for options in {"num_workers": 1}, {"use_prefetch_thread": True}:
            loader = dgl.dataloading.DataLoader(graph, nodes, NeighborSampler([2]), **options)
            with pytest.raises(UnsupportedByStoreError, match="num_workers=0 and use_prefetch"):
                iter(loader)
        pairs = as_edge_prediction_sampler(NeighborSampler([2]), negative_sampler=GlobalUniform(1))
        with error:
            list(dgl.dataloading.DataLoader(graph, nodes, pairs))
        with pytest.raises(UnsupportedByStoreError, match="in another process"):
            pickle.dumps(store.graph.get_node_storage("feat"))
    with (
        GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store,
        pytest.raises(UnsupportedByStoreError, match="with edges=True"),
    ):
        store.graph.find_edges(nodes)
    with pytest.raises(UnsupportedByStoreError, match="GraphBolt's samplers read the edges"):
        GlobalStore.from_graphbolt(None, span="job")
    with pytest.raises(ConfigError, match=r"store\.span is none of machine, job"):
        GlobalStore.from_dgl(g, span="jobs")
    with pytest.raises(ConfigError, match="not in"):
        GlobalStore.from_dgl(g, span="job", replica_ratio=1.5)


def test_what_is_not_served_is_told(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _refused)


def _wrong_on_one_rank(by_kernels: bool = False) -> None:
    rank, g = dist.get_rank(), power_law()
    with (
        GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store,
        emulated_gpus(store) if by_kernels else contextlib.nullcontext(),
    ):
        good = torch.arange(5, device=store.device)
        for wrong, error in ([NODES], IdOutOfRangeError), ([0.5], InvalidInputError):
            ids = torch.tensor(wrong, device=store.device) if rank == 1 else good
            ids = unread(ids) if by_kernels else ids
            raised = error if rank == 1 else RankFailedError
            # What only a kernel sees of ids on a GPU is told by the round that asks for them.
            on_gpus = by_kernels or store.device.type == "cuda"
            at_once = not (on_gpus and error is IdOutOfRangeError)
            with pytest.raises(raised, match="cannot gather rows of 'feat': "):
                store.gather("feat", ids)
            of_hop = "neighbors" if at_once else "a hop: 3 neighbors"
            with pytest.raises(raised, match=f"cannot sample {of_hop}: "):
                store.graph.sample_neighbors(ids, 3)
            of_hops = "neighbors" if at_once else "hops of 3 neighbors"
            with pytest.raises(raised, match=f"cannot sample {of_hops}: "):
                batches(store.graph, ids, NeighborSampler([3]))
            of_degrees = "count in-edges" if at_once else "gather in-degrees of"
            with pytest.raises(raised, match=f"cannot {of_degrees}"):
                store.graph.in_degrees(ids)
        with pytest.raises(
            UnknownFeatureError if rank == 1 else RankFailedError, match="'unknown'"
        ):
            store.gather("unknown" if rank == 1 else "feat", good)
        with pytest.raises(InvalidInputError if rank == 1 else RankFailedError, match="edge type"):
            store.graph.in_degrees(etype="unknown" if rank == 1 else None)
        with pytest.raises(InvalidInputError, match="the same in the same order"):
            store.gather("label" if rank == 1 else "feat", good)
        # What was wrong is over.
        assert equal(store.gather("feat", good), g.ndata["feat"][:5])


@machines_on_gpus_too
def test_what_is_wrong_on_one_rank_is_told_on_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _wrong_on_one_rank)


def test_what_kernels_find_wrong_on_one_rank_is_told_on_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _wrong_on_one_rank, True)


def _started_with_bad_seeds() -> None:
    """A batch is started before the features of another one are gathered, which are not its own."""
    g, rank, seeds = power_law(), dist.get_rank(), torch.arange(20)
    (etype,) = g.canonical_etypes
    with (
        GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=0.1) as store,
        emulated_gpus(store),
    ):
        structure = store.graph._structure

        def start(nodes: torch.Tensor) -> SampleFuture:
            assert structure.others is not None
            arguments = structure.views(), nodes, [{etype: 2}], SampleKey(0)
            return structure.others.sample_hops_async(*arguments, replace=False, one_by_one=list)

        (expected,) = start(seeds).result()
        for bad, error in (
            (torch.tensor([NODES]), IdOutOfRangeError),  # which a kernel finds
            (torch.tensor([0.5]), InvalidInputError),  # for which nothing can be asked
        ):
            fails = pytest.raises(error if rank == 1 else RankFailedError)
            batch = None
            with fails if rank == 1 and error is InvalidInputError else contextlib.nullcontext():
                batch = start(bad if rank == 1 else seeds)
            assert torch.equal(store.gather("feat", seeds), g.ndata["feat"][seeds])
            for _ in range(2 if batch else 0):
                with fails:
                    batch.result()
        # What was wrong is over.
        (found,) = start(seeds).result()
        assert all(map(torch.equal, found.edges[etype], expected.edges[etype]))


def test_bad_seeds_of_a_batch_are_told_with_that_batch(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _started_with_bad_seeds)


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("there is no room")


def _has_no_room(name: str) -> None:
    rank, g = dist.get_rank(), power_law()
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(f"dgl_mgpu.store.remote.{name}", _no_room)
            with pytest.raises(
                MemoryError if rank == 1 else RankFailedError, match="there is no room"
            ):
                batches(store.graph, torch.arange(50), NeighborSampler([3]))
                store.gather("feat", torch.arange(NODES))
        with pytest.raises(RankFailedError, match="there is no room"):
            store.gather("feat", torch.arange(5))


@pytest.mark.parametrize("name", ["gather_rows", "sample_neighbors"])
def test_a_rank_without_room_is_told_of_on_all(ranks: RankProcesses, name: str) -> None:
    ranks.run(on_machines, "abc", _has_no_room, name)


def _rows_of_owners() -> None:
    rank, g = dist.get_rank(), power_law()
    ids = torch.randperm(NODES, generator=torch.Generator().manual_seed(rank))
    for span in "job", "machine":
        with GlobalStore.from_dgl(g, span=span) as store:
            own = store.graph.own_nodes()
            rows = torch.arange(own.start, own.stop)[:, None] * torch.tensor([1, -1])
            wrong = [
                ("_N", rows, ids + 1, IdOutOfRangeError),
                ("_N", rows, ids - 1, IdOutOfRangeError),  # is no node from the end
                ("_N", rows, ids.float(), InvalidInputError),
                ("_N", rows, ids < 5, InvalidInputError),
                ("_N", rows, ids[None], InvalidInputError),
                ("_N", rows, ids.tolist(), InvalidInputError),
                ("_N", rows[:-1], ids, InvalidInputError),
                ("_N", rows.tolist(), ids, InvalidInputError),
                ("item", rows, ids, InvalidInputError),
            ]
            for *arguments, error in wrong:
                fails = contextlib.nullcontext()
                if rank == 1 or span == "job":
                    fails = pytest.raises(error if rank == 1 else RankFailedError)
                with fails:
                    found = arguments if rank == 1 else ("_N", rows, ids)
                    store.graph.rows_of_owners("numbers", *found)
            if span == "job":  # gloo would end the process
                for other in rows.int(), rows[:, :1]:
                    with pytest.raises(InvalidInputError, match="is to gather numbers, of shape"):
                        given = other if rank == 1 else rows
                        store.graph.rows_of_owners("numbers", "_N", given, ids)
            found = store.graph.rows_of_owners("numbers", "_N", rows, ids.int())
            assert torch.equal(found, ids[:, None] * torch.tensor([1, -1]))


def test_wrong_rows_and_ids_of_owners_are_told_on_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _rows_of_owners)


def both_ways() -> dgl.DGLGraph:
    """With every edge the other way, too, as walks need, and weights."""
    g = power_law()
    found = dgl.to_bidirected(dgl.graph(g.edges(), num_nodes=NODES))
    found.ndata.update(g.ndata)
    found.edata["w"] = torch.arange(found.num_edges()).float() + 1
    return found


def _writes(graph: StoreGraph) -> None:
    graph.ndata["feat"][torch.arange(3)] = torch.zeros(3, WIDTH)


def _writes_weights(graph: StoreGraph) -> None:
    graph.edata["w"][torch.arange(3)] = torch.zeros(3)


def _walks(graph: StoreGraph, **options: Any) -> None:
    graph.random_walk(torch.arange(9), length=3, **options)


CALLS: dict[str, Callable[[StoreGraph], object]] = {
    "read a slice": lambda graph: graph.ndata["feat"][3:9],
    "sample a hop": lambda graph: graph.sample_neighbors(torch.arange(9), 3),
    "sample hops": lambda graph: graph.sample_blocks(torch.arange(9), [3, 3]),
    "sample by weight": lambda graph: graph.sample_blocks(torch.arange(9), [3], prob="w"),
    "check weights": lambda graph: graph.check_weights("w"),
    "walk": _walks,
    "in-degrees": lambda graph: graph.in_degrees(),
    "out-degrees": lambda graph: graph.count_degrees("out", graph.canonical_etypes[0]),
    "write rows": _writes,
    "write weights": _writes_weights,
}


def _one_does_something_else() -> None:
    g, rank, nodes = both_ways(), dist.get_rank(), torch.arange(5)
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        for call in CALLS.values():
            with pytest.raises(InvalidInputError, match="the same in the same order"):
                call(store.graph) if rank == 1 else store.gather("label", nodes)
        # Nothing was changed, and what was wrong is over.
        assert equal(store.gather("feat", nodes), g.ndata["feat"][:5])
        assert equal(store.graph.edata["w"][nodes], g.edata["w"][:5])


def test_a_rank_that_does_something_else_is_told_of(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _one_does_something_else)


def _trains_beside_a_read(path: str) -> None:
    rank, nodes = dist.get_rank(), torch.arange(5)
    options = {"replica_ratio": 0, "embeddings": {"emb": 4}}
    with GlobalStore.from_dgl(power_law(), span="job", **options) as store:
        embedding = store.embedding("emb")
        optimizer = dgl_mgpu.SparseAdam([embedding])
        before = embedding(nodes).detach()
        for change in (
            optimizer.step,
            lambda: embedding.write(nodes, torch.ones(5, 4)),
            lambda: embedding.save(path),
            lambda: embedding.load(path),
        ):
            embedding(nodes).sum().backward()
            with pytest.raises(InvalidInputError, match="the same in the same order"):
                change() if rank == 1 else store.gather("feat", nodes)
        assert torch.equal(embedding(nodes), before)


def test_a_rank_that_trains_rows_while_others_read_is_told_of(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    ranks.run(on_machines, "abc", _trains_beside_a_read, str(tmp_path / "rows.npz"))


def _wrong_arguments() -> None:
    g, rank, nodes = both_ways(), dist.get_rank(), torch.arange(5)
    with GlobalStore.from_dgl(g, span="job", replica_ratio=0) as store:
        graph = store.graph

        def write(ids: Any, rows: Any) -> None:
            graph.ndata["feat"][ids] = rows

        rows = torch.zeros(5, WIDTH)
        for right, wrong, error in (
            (lambda: store.gather("feat", nodes), lambda: store.gather("feat", "ids"), TypeError),
            (
                lambda: graph.ndata["feat"][nodes],
                lambda: graph.ndata["feat"][[[1], [2, 3]]],
                ValueError,
            ),
            (
                lambda: graph.sample_neighbors(nodes, 2),
                lambda: graph.sample_neighbors(nodes, 2, edge_dir="out"),
                InvalidInputError,
            ),
            (
                lambda: graph.sample_neighbors(nodes, 2),
                lambda: graph.sample_neighbors(None, 2),
                RuntimeError,
            ),
            (
                lambda: graph.check_weights("w"),
                lambda: graph.check_weights("unknown"),
                UnknownFeatureError,
            ),
            (lambda: _walks(graph), lambda: _walks(graph, prob="unknown"), UnknownFeatureError),
            (lambda: write(nodes, rows), lambda: write("ids", rows), TypeError),
            (lambda: write(nodes, rows), lambda: write(nodes, [[1.0], [2.0, 3.0]]), ValueError),
        ):
            with pytest.raises(error if rank == 1 else RankFailedError):
                (wrong if rank == 1 else right)()
        assert equal(store.gather("feat", nodes), g.ndata["feat"][:5])


def test_wrong_arguments_are_told_before_anything_is_sent(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _wrong_arguments)


def _interrupted(within: str) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    rank = dist.get_rank()
    told = "rank 1 failed with KeyboardInterrupt"
    with (
        GlobalStore.from_dgl(both_ways(), span="job", replica_ratio=0) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        if rank == 1:
            patch.setattr(f"dgl_mgpu.{within}", interrupt)
        with pytest.raises(
            KeyboardInterrupt if rank == 1 else RankFailedError, match="" if rank == 1 else told
        ) as caught:
            store.gather("feat", torch.arange(NODES))
            store.graph.sample_blocks(torch.arange(50), [3])
            _walks(store.graph)
        dist.barrier()  # others are told while the error is there
        assert caught.value is not None


@pytest.mark.parametrize(
    "within",
    [
        "store.remote.gather_rows",
        "store.remote.sample_neighbors",
        "sampling.walks.EvenStepsByRow.step",  # within a round
        "sampling.walks.draw_blocks",  # between rounds
        "comm.communicator.dist.all_to_all_single",  # in torch, whose frames hold the connection
    ],
)
def test_a_rank_that_is_interrupted_is_told_of(ranks: RankProcesses, within: str) -> None:
    ranks.run(on_machines, "abc", _interrupted, within)


def _closed(is_silent: bool) -> None:
    g, rank, nodes = both_ways(), dist.get_rank(), torch.arange(9)
    options = {"span": "job", "replica_ratio": 0}
    kept = GlobalStore.from_dgl(g, **options)
    for call in (lambda store: store.gather("feat", nodes), *(
        lambda store, call=call: call(store.graph) for call in CALLS.values()
    )):  # fmt: skip
        store = GlobalStore.from_dgl(g, **options)
        store.gather("feat", nodes)
        if rank == 1:
            store.close()
        if rank != 1 or not is_silent:
            with pytest.raises(
                StoreClosedError if rank == 1 else RankFailedError,
                match="its store was closed" if rank == 1 else "rank 1 failed with StoreClosedErr",
            ):
                call(store)
        store.close()
        # Other stores of the job are as before.
        assert equal(kept.gather("feat", nodes), g.ndata["feat"][:9])
    kept.close()


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_store_that_one_rank_has_closed_is_told_of(ranks: RankProcesses, is_silent: bool) -> None:
    ranks.run(on_machines, "abc", _closed, is_silent)


def _leaves_early() -> None:
    def read(rank: int) -> None:
        with GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) as store:
            if rank == 1:
                raise ValueError("no more batches for me")
            store.gather("feat", torch.arange(9))

    rank = dist.get_rank()
    with pytest.raises(ValueError if rank == 1 else RankFailedError, match="no more batches"):
        read(rank)


def test_why_a_rank_leaves_a_store_is_told(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _leaves_early)


def _dropped() -> None:
    stores = [GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) for _ in range(2)]
    if dist.get_rank() == 1:
        del stores[0]
        gc.collect()
    else:
        with pytest.raises(RankFailedError, match="rank 1 failed with StoreClosedError"):
            stores[0].gather("feat", torch.arange(9))
    stores[-1].gather("feat", torch.arange(9))
    for store in stores:
        store.close()


def test_a_store_that_one_rank_has_let_go_of_is_told_of(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _dropped)


def _closed_by_a_fork() -> None:
    nodes = torch.arange(9)
    with GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) as store:
        if dist.get_rank() == 1:
            process = os.fork()
            if process == 0:
                try:
                    store.close()
                finally:
                    os._exit(0)
            os.waitpid(process, 0)
        assert len(store.gather("feat", nodes)) == len(nodes)


def test_a_fork_closes_no_connections(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _closed_by_a_fork)


def _number_of_the_rank() -> None:
    rank, nodes = dist.get_rank(), torch.arange(9)
    # At each place of machines another rank is wrong: the errors have their numbers in the job.
    of_place = 2 if rank in (0, 2) else 3
    told = pytest.raises(RankFailedError, match=f"rank {of_place} failed .* on rank {of_place}$")
    is_wrong = rank == of_place
    with (
        GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        with pytest.raises(InvalidInputError) if is_wrong else told:
            store.gather("feat", nodes.float() if is_wrong else nodes)
        if is_wrong:
            patch.setattr("dgl_mgpu.store.remote.gather_rows", _no_room)
        with pytest.raises(MemoryError) if is_wrong else told:
            store.gather("feat", torch.arange(NODES))


def test_errors_name_ranks_by_their_numbers_in_the_job(four_ranks: RankProcesses) -> None:
    four_ranks.run(on_machines, "aabb", _number_of_the_rank)


def _steps_in_another_order() -> None:
    options: dict[str, Any] = {"replica_ratio": 0, "embeddings": {"a": 4, "b": 4}}
    nodes = torch.arange(5)
    with GlobalStore.from_dgl(power_law(), span="job", **options) as store:
        embeddings = [store.embedding(name) for name in options["embeddings"]]
        for embedding in embeddings:
            embedding(nodes).sum().backward()
        optimizer = dgl_mgpu.SparseAdam(embeddings[::-1] if dist.get_rank() == 0 else embeddings)
        with pytest.raises((InvalidInputError, RankFailedError), match="train rows of"):
            optimizer.step()
        assert len(store.gather("feat", nodes)) == len(nodes)


def test_what_one_rank_changes_otherwise_is_told_of_on_all(four_ranks: RankProcesses) -> None:
    """Also on those at another place, whom it asks nothing."""
    four_ranks.run(on_machines, "aabb", _steps_in_another_order)
