"""What ranks do with embeddings of a store, against torch's on one process: on CPUs and GPUs."""

from __future__ import annotations

from pathlib import Path

import dgl
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu import EmbeddingSpec, GlobalStore, StoreEmbedding
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import gather_rows
from tests.store.memory.fake_gpu import FakeRuntime

NODES, DIM, STEPS = 211, 5, 50
OURS = {
    "sgd": dgl_mgpu.SparseSGD,
    "adagrad": dgl_mgpu.SparseAdagrad,
    "adam": dgl_mgpu.SparseAdam,
}
#: Each with the number of tables that it needs beside the rows.
THEIRS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}
#: Of each table, so that rows lie in every kind of memory but the disk.
SHARE_ON_GPUS = 0.6


def ring(num_nodes: int = NODES) -> dgl.DGLGraph:
    """A graph whose nodes are not equally hot, so that they are kept in another order."""
    nodes = torch.arange(num_nodes)
    return dgl.graph((torch.cat([nodes, nodes**2 % num_nodes]), nodes.repeat(2)))


def make_store(kind: str, optimizer: str, dim: int = DIM, **options) -> GlobalStore:
    """On a ``kind`` of device: 'cpu', 'cuda', or 'fake', GPUs that are not there."""
    ranks = Communicator.of_this_machine()
    if kind == "fake":
        runtime = FakeRuntime(ranks.rank, ranks.size)
        cuda_runtime.find_runtime = lambda: runtime  # the caller puts it back
    shares = {"graph_ratio": SHARE_ON_GPUS, "feature_ratio": SHARE_ON_GPUS}
    options = shares | {"sms": 0} | options
    return GlobalStore.from_dgl(
        ring() if ranks.rank == 0 else None,
        embeddings={"emb": EmbeddingSpec(dim, optimizer, init=0.5)},
        device="cpu" if kind == "cpu" else "cuda",
        **options,
    )


def every_row(embedding: StoreEmbedding) -> torch.Tensor:
    with torch.no_grad():
        return embedding(torch.arange(embedding.num_embeddings, device=embedding.device)).cpu()


def every_table(store: GlobalStore) -> dict[str, torch.Tensor]:
    """All rows of what is trained or its optimizer's, as this rank reads them."""
    ids = torch.arange(NODES, device=store.device)
    return {
        name: gather_rows(table.view, ids).cpu()
        for name, table in store._store.tables.items()
        if not name.startswith("topology")
    }


def assert_same_on_all_ranks(store: GlobalStore) -> None:
    mine = {name: rows.numpy().tobytes() for name, rows in every_table(store).items()}
    versions = [table.version for table in store._store.tables.values()]
    for other in Communicator.of_this_machine().all_gather((mine, versions)):
        assert other == (mine, versions)


def lookups(rank: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids, skewed and repeated, and what to multiply their rows by: of a mini-batch's lookups.

    At some steps a rank has none, and sometimes nobody has.
    """
    random = np.random.default_rng((rank, step))
    if (rank + step) % 4 == 0 or step == 7:
        return []
    found = []
    for _ in range(1 + step % 3):
        ids = (NODES * random.random(40) ** 2).astype(np.int32 if rank == 1 else np.int64)
        found.append((torch.from_numpy(ids), torch.from_numpy(random.standard_normal((40, DIM)))))
    return found


def loss_of(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Its gradient depends on the rows."""
    return (rows * factors.to(rows)).sum() + 0.1 * (rows**2).sum()


def train(
    embedding: StoreEmbedding, optimizer: dgl_mgpu.SparseAdam, rank: int, steps: range
) -> None:
    for step in steps:
        losses = [
            loss_of(embedding(ids.to(embedding.device)), factors)
            for ids, factors in lookups(rank, step)
        ]
        if step % 2:
            for loss in losses:
                loss.backward()
        elif losses:
            torch.stack(losses).sum().backward()
        optimizer.step()


def train_as_torch(kind: str) -> None:
    """Each of the optimizers, in one job."""
    for name in OURS:
        trains_as_torch(kind, name)


def trains_as_torch(kind: str, name: str, over_ranks: str = "mean") -> None:
    """50 steps of all ranks are 50 steps of one process with all ranks' batches, in float64.

    Rows are kept and trained in float32, of numbers around 1: each step rounds by 1e-7 of them,
    and of the step, which is at most some 0.1; after 50 steps that is less than 1e-5.
    """
    ranks = Communicator.of_this_machine()
    store = make_store(kind, name)
    embedding = store.embedding("emb")
    memories = set(embedding._rows.memories)
    assert memories & {"device", "peer"} and "host" in memories
    assert embedding.device == store.device and store.device.type == (
        "cuda" if kind == "cuda" else "cpu"
    )
    reference = nn.Embedding(NODES, DIM, sparse=name == "adam", dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(every_row(embedding))
    ours = OURS[name]([embedding], lr=0.05, over_ranks=over_ranks)
    theirs = THEIRS[name](reference.parameters(), lr=0.05)
    ranks.all_gather(None)  # nobody trains what another still reads
    train(embedding, ours, ranks.rank, range(STEPS))
    for step in range(STEPS):
        theirs.zero_grad()
        losses = [
            loss_of(reference(ids), factors)
            for rank in range(ranks.size)
            for ids, factors in lookups(rank, step)
        ]
        losses.append(reference(torch.arange(0)).sum())  # a step without gradients is one, too
        (torch.stack(losses).sum() / (ranks.size if over_ranks == "mean" else 1)).backward()
        theirs.step()
    found = every_row(embedding).double()
    torch.testing.assert_close(found, reference.weight.detach(), rtol=1e-5, atol=1e-5)
    assert embedding.steps == STEPS
    assert embedding.version == STEPS
    assert_same_on_all_ranks(store)
    store.close()


class Classifier(nn.Module):
    """A linear layer on an embedding of a store, or on torch's."""

    def __init__(self, embedding: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = embedding
        self.linear = nn.Linear(DIM, 3, dtype=dtype)
        with torch.no_grad():
            weights = torch.randn(self.linear.weight.shape, generator=torch.manual_seed(5))
            self.linear.weight.copy_(weights)
            self.linear.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids))


def trains_in_ddp(kind: str) -> None:
    """Within DistributedDataParallel, embeddings and parameters are trained as on one process."""
    ranks = Communicator.of_this_machine()
    store = make_store(kind, "sgd")  # unlike the others it tells a gradient from its multiple
    embedding = store.embedding("emb")
    reference = Classifier(nn.Embedding(NODES, DIM, sparse=True, dtype=torch.float64),
                           torch.float64)  # fmt: skip
    with torch.no_grad():
        reference.embedding.weight.copy_(every_row(embedding))
    ranks.all_gather(None)
    model = Classifier(embedding).to(store.device)
    assert {name for name, _ in model.named_parameters()} == {"linear.weight", "linear.bias"}
    assert set(model.state_dict()) == {"linear.weight", "linear.bias"}
    ddp = DistributedDataParallel(model)
    dense, sparse = torch.optim.SGD(ddp.parameters(), 0.1), dgl_mgpu.SparseSGD([embedding], 0.05)
    theirs = (
        torch.optim.SGD(reference.linear.parameters(), 0.1),
        torch.optim.SGD(reference.embedding.parameters(), 0.05),
    )

    def loss_on(model: nn.Module, where: torch.device, rank: int, step: int) -> torch.Tensor:
        # The last rank's batches are empty now and then.
        size = 0 if rank == ranks.size - 1 and step % 3 == 0 else 30
        ids = torch.arange(size) * 7 % (NODES - rank) + rank
        return nn.functional.cross_entropy(
            model(ids.to(where)), (ids % 3).to(where), reduction="sum"
        )

    for step in range(10):
        dense.zero_grad()
        loss_on(ddp, store.device, ranks.rank, step).backward()
        dense.step()
        sparse.step()
        for each in theirs:
            each.zero_grad()
        losses = [loss_on(reference, torch.device("cpu"), r, step) for r in range(ranks.size)]
        torch.stack(losses).mean().backward()
        for each in theirs:
            each.step()
    torch.testing.assert_close(
        model.linear.weight.cpu().double(), reference.linear.weight, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        every_row(embedding).double(), reference.embedding.weight, rtol=1e-4, atol=1e-5
    )
    assert_same_on_all_ranks(store)
    store.close()


def saves(kind: str, folder: Path) -> None:
    """Train, save, train on; what is saved and what comes of it goes to files."""
    ranks = Communicator.of_this_machine()
    store = make_store(kind, "adam")
    embedding = store.embedding("emb")
    optimizer = dgl_mgpu.SparseAdam([embedding], lr=0.05)
    train(embedding, optimizer, ranks.rank, range(10))
    embedding.save(folder / "emb.npz")
    if ranks.rank == 0:
        torch.save(every_table(store), folder / "saved.pt")
    ranks.all_gather(None)
    train(embedding, optimizer, ranks.rank, range(10, 20))
    if ranks.rank == 0:
        torch.save(every_table(store), folder / "trained.pt")
    store.close()


def restores(kind: str, folder: Path, same_ranks: bool, **options) -> None:
    """Load what another number of ranks saved, and with the same one train on to the same bits."""
    ranks = Communicator.of_this_machine()
    store = make_store(kind, "adam", seed=99, **options)
    embedding = store.embedding("emb")
    saved = torch.load(folder / "saved.pt")
    assert not torch.equal(every_row(embedding), saved["node/_N/emb"])
    version = embedding.version
    ranks.all_gather(None)
    # A gradient from before is forgotten.
    embedding(torch.arange(3, device=embedding.device)).sum().backward()
    embedding.load(folder / "emb.npz")
    assert embedding.steps == 10 and embedding.version > version
    assert_equal(every_table(store), saved)
    assert_same_on_all_ranks(store)
    if same_ranks:
        train(embedding, dgl_mgpu.SparseAdam([embedding], lr=0.05), ranks.rank, range(10, 20))
        assert_equal(every_table(store), torch.load(folder / "trained.pt"))
        ranks.all_gather(None)
    store.close()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) == 3
    for name, rows in expected.items():
        assert torch.equal(found[name], rows), name
