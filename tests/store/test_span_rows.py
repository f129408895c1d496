"""Rows of a store over machines in narrow types, and such as are written and learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import (
    CheckpointError,
    IdOutOfRangeError,
    RankFailedError,
)
from dgl_mgpu.store import row_updates
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.span_graphs import EDGES, NODES, WIDTH, equal, power_law


def _in_narrow_types() -> None:
    g = power_law()
    options = {"feature_dtypes": {"feat": "float8_e5m2"}, "span": "job", "replica_ratio": 0.1}
    with GlobalStore.from_dgl(g, **options) as store:
        rounded = g.ndata["feat"].to(torch.float8_e5m2).float()
        every = torch.arange(NODES, device=store.device)
        assert equal(store.gather("feat", every), rounded)
        sent = store.graph.traffic.take().nbytes["feat", "remote"]
        assert 0 < sent < NODES * WIDTH


@machines_on_gpus_too
def test_rows_are_sent_in_the_type_that_they_are_kept_in(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _in_narrow_types)


def _written(ratio: float) -> None:
    g, rank, size = power_law(), dist.get_rank(), dist.get_world_size()
    with GlobalStore.from_dgl(g, span="job", replica_ratio=ratio) as store:
        every = torch.arange(NODES, device=store.device)
        expected = g.ndata["feat"].clone()
        draw = torch.Generator().manual_seed(7)
        for _ in range(2):
            # Of all ranks; some have none, and the last of those for a node counts.
            changes = [
                (torch.randint(NODES, (80 * number,), generator=draw), number)
                for number in range(size)
            ]
            rows = torch.randn(NODES, WIDTH, generator=draw)
            for ids, number in changes:
                expected[ids] = rows[ids] + number
            mine = changes[rank][0]
            store.graph.ndata["feat"][mine.to(store.device)] = rows[mine].to(store.device) + rank
            assert equal(store.gather("feat", every), expected)
        store.graph.ndata["feat"] = rows
        assert equal(store.gather("feat", every), rows)
        weights = torch.rand(EDGES, 2, generator=draw)
        store.graph.edata["w"] = weights
        assert equal(store.graph.edata["w"][:], weights)
        is_wrong = rank == size - 1
        bad = every[:1] + NODES if is_wrong else every[:1]
        with pytest.raises(IdOutOfRangeError if is_wrong else RankFailedError):
            store.graph.ndata["feat"][bad] = rows[:1]
        assert equal(store.gather("feat", every), rows)


@machines_on_gpus_too
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_rows_are_written_on_all_machines(ranks: RankProcesses, ratio: float) -> None:
    ranks.run(on_machines, "abc", _written, ratio)


def _given_to_operators() -> None:
    """A row that other machines have is nowhere here: what is written there is in front of all."""
    given = []

    def noted(operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(rows: Any, ids: torch.Tensor, *arguments: Any) -> Any:
            given.append(ids)
            assert (rows.position[ids] >= 0).all()
            return operator(rows, ids, *arguments)

        return call

    options = {"span": "job", "replica_ratio": 0, "embeddings": {"emb": 4}}
    with (
        GlobalStore.from_dgl(power_law(), **options) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in "scatter_rows", "update_rows":
            operator = getattr(row_updates, name)
            patch.setattr(row_updates, name, noted(operator))
        every, embedding = torch.arange(NODES, device=store.device), store.embedding("emb")
        store.graph.ndata["feat"][every] = torch.zeros(NODES, WIDTH, device=store.device)
        embedding(every).sum().backward()
        dgl_mgpu.SparseAdam([embedding]).step()
        own = store.graph.own_nodes()
        assert [set(ids.tolist()) for ids in given] == [{*own}] * 2


def test_operators_change_rows_that_are_here_alone(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _given_to_operators)


def _learned(path: str) -> None:
    g, rank, size = power_law(), dist.get_rank(), dist.get_world_size()
    spec = {"emb": dgl_mgpu.EmbeddingSpec(6, optimizer="adam")}
    options = {"seed": 5, "span": "job", "replica_ratio": 0.3, "embeddings": spec}
    with GlobalStore.from_dgl(g, **options) as store:
        every, embedding = torch.arange(NODES, device=store.device), store.embedding("emb")
        weight = torch.nn.Parameter(embedding(every).detach().cpu().double())
        assert weight.unique().numel() > NODES
        expected = torch.optim.SparseAdam([weight], lr=0.1)
        optimizer = dgl_mgpu.SparseAdam([embedding], lr=0.1, over_ranks="sum")
        draw = torch.Generator().manual_seed(3)
        for _ in range(4):
            batches = [torch.randint(NODES, (30 * n,), generator=draw) for n in range(size)]
            factors = torch.randn(NODES, 6, generator=draw)
            mine = batches[rank]
            (embedding(mine.to(store.device)) * factors[mine].to(store.device)).sum().backward()
            optimizer.step()
            ids = torch.cat(batches)
            gradients = factors[ids].double()
            weight.grad = torch.sparse_coo_tensor(ids[None], gradients, weight.shape).coalesce()
            expected.step()
            found = embedding(every).detach()
            assert torch.allclose(found.cpu().double(), weight.detach(), atol=1e-5)
        embedding.save(path)
        if rank == 0:
            with np.load(path) as saved:
                assert np.array_equal(saved["rows"], found.cpu().numpy())
        mine = every[rank::size]
        embedding.write(mine, torch.zeros(len(mine), 6, device=store.device))
        assert not embedding(every).any()
        embedding.load(path)
        assert torch.equal(embedding(every), found)
        with pytest.raises(CheckpointError if rank == 0 else RankFailedError, match="save rows to"):
            embedding.save(f"{path}/below-a-file")
        assert torch.equal(embedding(every), found)
    with GlobalStore.from_dgl(g, **options | {"span": "machine"}) as store:
        embedding = store.embedding("emb")
        embedding.load(path)  # as any store has written it
        assert torch.equal(embedding(every), found) and embedding.steps == 4


@machines_on_gpus_too
def test_rows_are_learned_on_all_machines(ranks: RankProcesses, tmp_path: Path) -> None:
    ranks.run(on_machines, "abc", _learned, str(tmp_path / "rows.npz"))


def _learned_of_one_node(path: str) -> None:
    """One machine has all rows there are."""
    u = torch.arange(9)
    edges = {("user", "in", "country"): (u, u * 0), ("user", "knows", "user"): (u, u)}
    g = dgl.heterograph(edges, {"user": 9, "country": 1})
    options = {"span": "job", "replica_ratio": 0, "embeddings": {"country": {"emb": 4}}}
    with GlobalStore.from_dgl(g, **options) as store:
        embedding = store.embedding("emb", "country")
        node = torch.zeros(1, dtype=torch.int64, device=store.device)
        row = embedding(node).detach()
        embedding.save(path)
        mine = node[: dist.get_rank() == 0]
        embedding.write(mine, torch.zeros(len(mine), 4, device=store.device))
        embedding.load(path)
        assert row.any() and torch.equal(embedding(node), row)
        embedding(node).sum().backward()
        dgl_mgpu.SparseAdam([embedding], lr=0.1).step()
        assert torch.allclose(embedding(node), row - 0.1)


@machines_on_gpus_too
def test_rows_of_one_machine_are_saved_by_all(ranks: RankProcesses, tmp_path: Path) -> None:
    ranks.run(on_machines, "abc", _learned_of_one_node, str(tmp_path / "rows.npz"))
