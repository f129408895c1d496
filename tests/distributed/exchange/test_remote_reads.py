"""Sums by remote reads.

On the CPU ranks' rows are in files that all of them have mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.peer_memory import PeerChunks
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.exchange.schedule import Sum
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.ops.spmm_remote import Pipeline
from tests.distributed.exchange.test_exchange import _Whole
from tests.distributed.graphs import KINDS
from tests.ranks import on_gpus_too


class _Counting:
    """A window that counts the exchanges it serves."""

    def __init__(self, window: Window | None) -> None:
        self._window = window
        self.turns = 0

    def turn(self, nbytes: int) -> Sequence[torch.Tensor]:
        assert self._window is not None
        self.turns += 1
        return self._window.turn(nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)


def _remote(whole: _Whole, pipeline: Pipeline | None = None) -> tuple[RemoteReads, _Counting]:
    window = _Counting(whole.window())
    halo = Chunks(whole.part, whole.group, 2)
    return RemoteReads(halo, window, pipeline), window  # type: ignore[arg-type]


def _sums(kind: str, strategy: str, idtype: torch.dtype) -> None:
    whole = _Whole(kind, strategy, idtype)
    remote, window = _remote(whole)
    num_src, num_dst = whole.of_src.num_nodes, whole.of_dst.num_nodes
    for weighted in (False, True):
        weights = whole.rows(len(whole.src)) if weighted else None
        matrix = whole.matrix(weights)
        mine = None if weights is None else whole.own_edges(weights)
        for shape in ((), (0,), (1,), (3,), (2, 3), (602,)):
            given = None if mine is None else mine.view(-1, *[1] * len(shape))
            x, y = whole.rows(num_src, *shape), whole.rows(num_dst, *shape)
            before = window.turns
            found = remote.sums(whole.own_src(x), given)
            assert window.turns == before + (0 not in shape and len(whole.parts) > 1)
            assert torch.equal(found, whole.own_dst(torch.tensordot(matrix, x, 1)))
            found = remote.transposed_sums(whole.own_dst(y), given)
            assert torch.equal(found, whole.own_src(torch.tensordot(matrix.t(), y, 1)))


@on_gpus_too
@pytest.mark.parametrize("strategy", ["shuffled", "order", "one rank has all"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_products_with_the_matrix(ranks, kind, strategy):
    ranks.run(_sums, kind, strategy, torch.int64)


@on_gpus_too
def test_sums_with_ids_of_32_bits(ranks):
    ranks.run(_sums, "bipartite", "shuffled", torch.int32)


@pytest.mark.parametrize("kind", ["random", "bipartite", "no edges"])
def test_sums_on_one_rank(kind):
    _sums(kind, "shuffled", torch.int64)


def _over_peers(read_all: bool) -> None:
    whole = _Whole("random", "shuffled")
    window = whole.window()
    assert window is not None
    remote = RemoteReads(PeerChunks(whole.part, window, 1, read_all), window)
    matrix = whole.matrix()
    x, y = whole.rows(whole.of_src.num_nodes, 3), whole.rows(whole.of_dst.num_nodes, 3)
    for _ in range(2):
        assert torch.equal(remote.sums(whole.own_src(x)), whole.own_dst(matrix @ x))
        found = remote.transposed_sums(whole.own_dst(y))
        assert torch.equal(found, whole.own_src(matrix.t() @ y))


@on_gpus_too
@pytest.mark.parametrize("read_all", [False, True])
def test_rows_that_are_given_back_may_be_lent_wholly(ranks, read_all):
    ranks.run(_over_peers, read_all)


def _weights() -> None:
    whole = _Whole("random", "shuffled")
    remote, window = _remote(whole)
    chunks = Chunks(whole.part, whole.group)
    x = whole.own_src(whole.rows(whole.of_src.num_nodes, 2, 3))
    # Weights of heads are of whole columns, others are not.
    for shape, reads in (((2, 1), 1), ((2, 3), 1), ((1, 1), 1), ((1, 3), 0)):
        weights = whole.own_edges(whole.rows(len(whole.src), *shape))
        before = window.turns
        assert torch.equal(remote.sums(x, weights), chunks.sums(x, weights))
        assert window.turns == before + reads


@on_gpus_too
def test_weights_of_columns(ranks):
    ranks.run(_weights)


def _gradients() -> None:
    whole = _Whole("skewed", "shuffled")
    weights = whole.own_edges(whole.rows(len(whole.src), 1))
    rows = whole.own_src(whole.rows(whole.of_src.num_nodes, 4))
    found = []
    for rounds in (_remote(whole)[0], Chunks(whole.part, whole.group)):
        x = rows.clone().requires_grad_()
        total = Sum.apply(rounds, False, weights, x)
        (first,) = torch.autograd.grad((total**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * rows).sum(), x)
        found.append((total, first, second))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@on_gpus_too
def test_gradients_are_those_of_the_halo_in_chunks(ranks):
    ranks.run(_gradients)


def _pipelines() -> None:
    whole = _Whole("skewed", "shuffled")
    remote, _ = _remote(whole, Pipeline(ps=1))
    x = whole.rows(whole.of_src.num_nodes, 2, 2)
    expected = whole.own_dst(torch.tensordot(whole.matrix(), x, 1))
    for pipeline in (remote.pipeline, Pipeline(ps=32), Pipeline(ps=32, dist=1), Pipeline()):
        remote.pipeline = pipeline
        assert torch.equal(remote.sums(whole.own_src(x)), expected)


@on_gpus_too
def test_another_pipeline_may_be_set(ranks):
    ranks.run(_pipelines)


def _dtypes() -> None:
    whole = _Whole("skewed", "shuffled")
    remote, _ = _remote(whole)
    x = whole.rows(whole.of_src.num_nodes, 5)
    expected = whole.own_dst(whole.matrix() @ x)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # Of small whole numbers sums in float32 are exact, and are rounded once.
        found = remote.sums(whole.own_src(x).to(dtype))
        assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


@on_gpus_too
def test_sums_of_other_element_types(ranks):
    ranks.run(_dtypes)
