"""Embeddings of a store on GPUs against torch's on one process; with one GPU, ranks share it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import dgl_mgpu
from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.train.launch.launch import launch
from tests.store import embeddings
from tests.store.embeddings import NODES, every_row, make_store

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fifty_steps_are_torchs(num_ranks):
    launch(embeddings.train_as_torch, num_ranks, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
def test_in_distributed_data_parallel():
    launch(embeddings.trains_in_ddp, 2, "cuda")


@pytest.mark.parametrize(("before", "after"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_saved_is_restored_on_every_device(tmp_path, num_ranks, before, after):
    launch(embeddings.saves, num_ranks, before, tmp_path)
    # The optimizers' kernels do the same on both, bit for bit; the loss's are torch's.
    launch(embeddings.restores, num_ranks, after, tmp_path, before == after)


def test_first_rows_are_those_of_the_cpu():
    on_cpu, on_gpu = (make_store(kind, "sgd").embedding("emb") for kind in ("cpu", "cuda"))
    assert on_gpu(torch.arange(3).cuda()).is_cuda
    assert torch.equal(every_row(on_gpu), every_row(on_cpu))


def test_rows_come_where_they_are_wanted_and_gradients_go_back():
    """A store in host memory feeds a model on the GPU, and one on the GPU takes ids from a CPU."""
    for kind in ("cpu", "cuda"):
        store = make_store(kind, "sgd")
        embedding = store.embedding("emb")
        before = every_row(embedding)
        optimizer = dgl_mgpu.SparseSGD([embedding], lr=0.5)
        for ids, device in (
            (torch.tensor([1, 2, 1]), "cuda"),
            (torch.tensor([2]).cuda(), "cpu"),
            (torch.tensor([3]), None),
        ):
            rows = embedding(ids, device)
            assert rows.device.type == (device or kind)
            rows.sum().backward()
        optimizer.step()
        expected = before.clone()
        for row, count in ((1, 2), (2, 2), (3, 1)):
            expected[row] -= 0.5 * count
        assert torch.equal(every_row(embedding), expected)
        store.close()


def test_a_bad_id_is_told_by_the_step_at_the_latest():
    embedding = make_store("cuda", "adam").embedding("emb")
    optimizer = dgl_mgpu.SparseAdam([embedding])
    before = every_row(embedding)
    with pytest.raises(IdOutOfRangeError, match=f"id {NODES}"):
        embedding(torch.tensor([1, NODES]).cuda()).sum().backward()
        optimizer.step()
    assert torch.equal(every_row(embedding), before) and embedding.steps == 0
    embedding(torch.tensor([1]).cuda()).sum().backward()
    optimizer.step()
    assert (every_row(embedding) != before).any(1).nonzero().flatten().tolist() == [1]


def slow_loss(rows: torch.Tensor, orthogonal: torch.Tensor) -> torch.Tensor:
    """Half the sum of the squared sums of rows, and 20 detours that take a GPU a while."""
    size = len(orthogonal)
    sums = rows.sum(1)[:, None].expand(-1, size)
    for _ in range(20):
        sums = orthogonal @ (orthogonal.T @ sums)
    return (sums**2).sum() / (2 * size)


def test_a_step_waits_for_gradients_of_another_stream():
    """A backward pass is on the streams of its forward pass, whichever stream it is called on."""
    embedding = make_store("cuda", "sgd").embedding("emb")
    optimizer = dgl_mgpu.SparseSGD([embedding], lr=0.01)
    before = every_row(embedding)
    ids = torch.arange(2048, device="cuda") % NODES
    orthogonal = torch.linalg.qr(torch.randn(2048, 2048, device="cuda"))[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = slow_loss(embedding(ids), orthogonal)
    loss.backward()
    optimizer.step()
    expected = before - 0.01 * ids.cpu().bincount()[:, None] * before.sum(1, keepdim=True)
    torch.testing.assert_close(every_row(embedding), expected, rtol=1e-3, atol=1e-4)
