"""Embeddings of a store against torch's and DGL's on one process."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import uuid
import weakref
from pathlib import Path

import dgl
import dgl.nn as dglnn
import numpy as np
import pytest
import torch
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler, NeighborSampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu import EmbeddingSpec, GlobalStore
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data import load
from dgl_mgpu.errors import (
    CheckpointError,
    ConfigError,
    IdOutOfRangeError,
    InvalidInputError,
    RankFailedError,
    StoreClosedError,
)
from dgl_mgpu.ops.philox import draw_blocks
from dgl_mgpu.store.embedding import files
from dgl_mgpu.store.embedding.tables import UniformRows
from dgl_mgpu.train.launch.launch import launch
from tests.store import embeddings
from tests.store.embeddings import DIM, NODES, every_row, every_table, make_store, ring


@pytest.fixture(autouse=True)
def _forked(forked_ranks: None) -> None:
    """Ranks are forked, which some tests here start."""


@pytest.fixture(autouse=True)
def _restored(monkeypatch) -> None:
    """A single rank's work runs in this process; what it replaces is put back."""
    monkeypatch.setattr(cuda_runtime, "find_runtime", cuda_runtime.find_runtime)


@pytest.fixture
def store() -> GlobalStore:
    return make_store("cpu", "adam")


# -- training -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("kind", "num_ranks"), [("cpu", 1), ("cpu", 3), ("fake", 3)])
def test_fifty_steps_are_torchs(kind, num_ranks):
    launch(embeddings.train_as_torch, num_ranks, kind)


def test_gradients_of_ranks_can_be_summed():
    launch(embeddings.trains_as_torch, 2, "cpu", "sgd", "sum")  # to which the scale matters


def test_in_distributed_data_parallel():
    launch(embeddings.trains_in_ddp, 3, "cpu")


def test_gradients_add_up_until_they_are_taken_or_forgotten(store):
    embedding = store.embedding("emb")
    assert embedding is store.embedding("emb", "_N")
    with torch.no_grad():
        assert not embedding(torch.arange(3)).requires_grad
    once, other = (
        embedding(torch.tensor([1, 2, 1])),
        embedding(torch.tensor([2], dtype=torch.int32)),
    )
    embedding(torch.tensor([5]))  # nothing comes back from here
    (2 * once.sum() + other.sum()).backward(retain_graph=True)
    once[0].sum().backward()
    ids, gradients = embedding.take_gradients()
    total = torch.zeros(NODES, DIM).index_add_(0, ids, gradients)
    expected = torch.zeros(NODES)
    expected[1], expected[2] = 2 + 2 + 1, 2 + 1
    assert torch.equal(total, expected[:, None].expand(-1, DIM))
    assert [len(each) for each in embedding.take_gradients()] == [0, 0]
    optimizer, before = dgl_mgpu.SparseAdam(embedding, lr=0.1), every_row(embedding)
    embedding(torch.arange(9)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(every_row(embedding), before)


def test_a_lookup_is_freed_with_what_was_made_of_it(store):
    embedding = store.embedding("emb")
    rows = embedding(torch.arange(3))
    freed = weakref.ref(rows)
    del rows
    gc.collect()
    assert freed() is None and [len(each) for each in embedding.take_gradients()] == [0, 0]


def test_rows_looked_up_before_a_step_stay(store):
    embedding = store.embedding("emb")
    ids = torch.arange(10)
    rows = embedding(ids)
    before = rows.detach().clone()
    rows.sum().backward()
    dgl_mgpu.SparseAdam([embedding], lr=0.1).step()
    assert torch.equal(rows, before)
    torch.testing.assert_close(embedding(ids).detach(), before - 0.1)
    # DGL's loaders and the store itself read the same rows.
    assert torch.equal(store.gather("emb", ids), embedding(ids))
    sampler = NeighborSampler([2], prefetch_node_feats=["emb"])
    inputs, _, (block,) = next(iter(DataLoader(store.graph, ids, sampler, batch_size=10)))
    assert torch.equal(block.srcdata["emb"], embedding(inputs))


def test_versions_count_changes(store):
    embedding = store.embedding("emb")
    tables = store._store.tables
    assert {table.version for table in tables.values()} == {0}
    optimizer = dgl_mgpu.SparseAdam([embedding])
    embedding(torch.arange(3)).sum().backward()
    assert embedding.version == 0
    optimizer.step()
    assert embedding.version == 1
    embedding.write(torch.tensor([4]), torch.full((1, DIM), 9.0))
    assert embedding.version == 2 and torch.equal(every_row(embedding)[4], torch.full((DIM,), 9.0))
    with pytest.raises(IdOutOfRangeError):
        embedding.write(torch.tensor([NODES]), torch.zeros(1, DIM))
    assert embedding.version == 2
    states = [table.version for name, table in tables.items() if name.startswith("state")]
    assert states == [1, 1] and tables["topology/_N:_E:_N"].version == 0


def _steps_apart() -> None:
    """Ranks that do not do the same are told so, and change nothing."""
    ranks = Communicator.of_this_machine()
    store = GlobalStore.from_dgl(ring(), embeddings={"a": DIM, "b": DIM}, device="cpu")
    a, b = store.embedding("a"), store.embedding("b")
    mine = [a, b] if ranks.rank == 0 else [b, a]
    apart = dgl_mgpu.SparseAdam(mine, lr=0.1)
    mine[0](torch.arange(5)).sum().backward()
    before = every_table(store)
    with pytest.raises(InvalidInputError, match=r"rank 0 has Adam.*'node/_N/a', but rank 1 .*/b'"):
        apart.step()
    together = dgl_mgpu.SparseAdam([a, b], lr=0.1)
    together.lr = 0.1 * (1 + ranks.rank)
    with pytest.raises(InvalidInputError, match=r"lr=0\.2"):
        together.step()
    assert all(torch.equal(rows, before[name]) for name, rows in every_table(store).items())
    assert (a.steps, b.steps, a.version, b.version) == (0, 0, 0, 0)
    together.lr = 0.1
    a(torch.arange(5)).sum().backward()
    together.step()
    assert (a.steps, b.steps) == (1, 1)
    ranks.all_gather(None)
    assert not torch.equal(every_row(a), before["node/_N/a"])


def test_ranks_that_step_apart_are_told():
    launch(_steps_apart, 2)


def _looks_up_what_is_not_there() -> None:
    ranks = Communicator.of_this_machine()
    store = make_store("cpu", "adam")
    embedding = store.embedding("emb")
    optimizer = dgl_mgpu.SparseAdam([embedding])
    if ranks.rank == 1:
        with pytest.raises(IdOutOfRangeError, match=f"id {NODES}"):
            embedding(torch.tensor([0, NODES]))
        with pytest.raises(IdOutOfRangeError, match="id -1"):
            embedding(torch.tensor([-1]))
    embedding(torch.arange(4)).sum().backward()
    before = every_row(embedding)
    if ranks.rank == 1:
        wrong = torch.arange(4), torch.zeros(4, DIM + 1)
        embedding.take_gradients = lambda: wrong
    with pytest.raises(InvalidInputError if ranks.rank == 1 else RankFailedError, match="values"):
        optimizer.step()
    assert torch.equal(every_row(embedding), before) and embedding.steps == 0


def test_a_mistake_on_one_rank_is_told_on_all():
    launch(_looks_up_what_is_not_there, 2)


# -- models ---------------------------------------------------------------------------------


class GraphSAGE(nn.Module):
    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [dglnn.SAGEConv(dim, 16, "mean"), dglnn.SAGEConv(16, classes, "mean")]
        )

    def forward(self, blocks, rows):
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            rows = layer(block, rows if number == 0 else rows.relu())
        return rows


@pytest.fixture(scope="module")
def cora(real_data) -> tuple[dgl.DGLGraph, torch.Tensor, torch.Tensor]:
    """Cora's topology, without features; its labels and training nodes."""
    data = load("cora", real_data)
    indptr, indices = (torch.from_numpy(each).long() for each in (data.indptr, data.indices))
    g = dgl.graph(("csc", (indptr, indices, torch.arange(0))), num_nodes=data.num_nodes)
    return g, torch.from_numpy(data.labels).long(), torch.from_numpy(data.train).long()


def test_a_featureless_graph_is_learned_as_with_dgls_embedding(cora):
    """With all neighbours every row is looked up once in each step, where the two Adams agree, but
    for ``eps``, which DGL's adds after the correction of the moments and torch's before."""
    g, labels, train = cora
    sampler = MultiLayerFullNeighborSampler(2)
    store = GlobalStore.from_dgl(g, embeddings={"emb": 16}, device="cpu", gpu_memory="100KiB")
    ours = store.embedding("emb")
    first = every_row(ours)
    theirs = dglnn.NodeEmbedding(
        g.num_nodes(), 16, f"emb-{uuid.uuid4()}", init_func=lambda rows: rows.copy_(first)
    )
    losses = {}
    for name, graph, embedding, sparse in (
        ("ours", store.graph, ours, dgl_mgpu.SparseAdam([ours], lr=0.02, eps=1e-14)),
        ("dgl", g, theirs, dgl.optim.SparseAdam([theirs], lr=0.02, eps=1e-14)),
    ):
        model = GraphSAGE(16, 7)
        dense = torch.optim.SGD(model.parameters(), lr=0.5)
        losses[name] = []
        for _ in range(25):
            for inputs, seeds, blocks in DataLoader(graph, train, sampler, batch_size=len(train)):
                loss = nn.functional.cross_entropy(model(blocks, embedding(inputs)), labels[seeds])
                dense.zero_grad()
                sparse.zero_grad()
                loss.backward()
                dense.step()
                sparse.step()
                losses[name].append(loss.item())
    found, expected = torch.tensor(losses["ours"]), torch.tensor(losses["dgl"])
    assert found[-1] < 0.5 * found[0]
    # float32 of numbers below 2, summed in another order, over 25 steps.
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    rows = every_row(ours)
    assert (rows != first).any(1).sum() > len(train)
    torch.testing.assert_close(rows, theirs.weight, rtol=0, atol=1e-4)


def _learns_cora(g: dgl.DGLGraph, labels: torch.Tensor, train: torch.Tensor, folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    store = GlobalStore.from_dgl(g, embeddings={"emb": 16}, device="cpu")
    embedding = store.embedding("emb")
    model = DistributedDataParallel(GraphSAGE(16, 7))
    dense = torch.optim.Adam(model.parameters(), lr=0.02)
    sparse = dgl_mgpu.SparseAdam([embedding], lr=0.02)
    loader = DataLoader(store.graph, train, NeighborSampler([5, 5]), batch_size=32, use_ddp=True)
    losses = []
    for _ in range(8):
        losses.append(0.0)
        for inputs, seeds, blocks in loader:
            loss = nn.functional.cross_entropy(model(blocks, embedding(inputs)), labels[seeds])
            dense.zero_grad()
            loss.backward()
            dense.step()
            sparse.step()
            losses[-1] += loss.item()
    assert losses[-1] < 0.7 * losses[0]
    embeddings.assert_same_on_all_ranks(store)
    (folder / f"{ranks.rank}").touch()


def test_ranks_learn_from_samples_together(cora, tmp_path):
    launch(_learns_cora, 2, *cora, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def citations() -> dgl.DGLGraph:
    rng = np.random.default_rng(0)

    def pairs(a: int, b: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(rng.integers(0, a, count)), torch.from_numpy(
            rng.integers(0, b, count)
        )

    written = pairs(40, 60, 200)
    return dgl.heterograph(
        {
            ("paper", "cites", "paper"): pairs(60, 60, 300),
            ("author", "writes", "paper"): written,
            ("paper", "written-by", "author"): written[::-1],
        },
        {"paper": 60, "author": 40},
    )


def test_relational_model_with_an_embedding_for_each_type_learns_as_torchs_do():
    g, labels = citations(), torch.arange(60) % 3
    sizes = {"paper": 8, "author": 8}
    store = GlobalStore.from_dgl(
        g, embeddings={ntype: {"emb": size} for ntype, size in sizes.items()}, device="cpu"
    )
    ours = {ntype: store.embedding("emb", ntype) for ntype in sizes}
    assert [each.name for each in ours.values()] == ["paper.emb", "author.emb"]
    theirs = {ntype: nn.Embedding(g.num_nodes(ntype), 8, sparse=True) for ntype in sizes}
    for ntype, table in theirs.items():
        table.weight = nn.Parameter(every_row(ours[ntype]))
    losses = []
    for kind, tables in (("ours", ours), ("torch's", theirs)):
        torch.manual_seed(0)
        layers = [
            dglnn.HeteroGraphConv({e: dglnn.GraphConv(8, out) for e in g.etypes}, "sum")
            for out in (8, 3)
        ]
        dense = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=0.02)
        sparse = (
            dgl_mgpu.SparseAdam(ours.values(), lr=0.02)
            if kind == "ours"
            else torch.optim.SparseAdam([each.weight for each in theirs.values()], lr=0.02)
        )
        losses.append([])
        store.graph.set_epoch(0)
        for epoch in range(12):
            store.graph.set_epoch(epoch)
            loader = DataLoader(
                store.graph, {"paper": torch.arange(60)}, NeighborSampler([3, 3]), batch_size=20
            )
            for inputs, seeds, blocks in loader:
                rows = {ntype: tables[ntype](ids) for ntype, ids in inputs.items()}
                for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
                    if number:
                        rows = {ntype: each.relu() for ntype, each in rows.items()}
                    rows = layer(block, rows)
                loss = nn.functional.cross_entropy(rows["paper"], labels[seeds["paper"]])
                dense.zero_grad()
                sparse.zero_grad()
                loss.backward()
                dense.step()
                sparse.step()
                losses[-1].append(loss.item())
    found, expected = torch.tensor(losses)
    assert found[-3:].mean() < 0.8 * found[:3].mean()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


# -- first rows -----------------------------------------------------------------------------


def _keeps_rows(folder: Path, options: dict) -> None:
    store = GlobalStore.from_dgl(ring(), embeddings={"emb": 7, "other": 7}, device="cpu", **options)
    rank = Communicator.of_this_machine().rank
    torch.save([every_row(store.embedding(name)) for name in ("emb", "other")], folder / f"{rank}")


def test_first_rows_depend_on_seed_and_name_alone(tmp_path):
    found = {}
    for number, (num_ranks, options) in enumerate([
        (1, {}),
        (1, {"gpu_memory": "3KiB"}),
        (3, {"gpu_memory": "2KiB"}),
        (1, {"seed": 8}),
    ]):  # fmt: skip
        folder = tmp_path / f"{number}"
        folder.mkdir()
        launch(_keeps_rows, num_ranks, folder, options)
        found[number] = [torch.load(path) for path in sorted(folder.iterdir())]
        assert len(found[number]) == num_ranks
    ((emb, other),) = found[0]
    for number in (1, 2):
        for rows in found[number]:
            assert torch.equal(rows[0], emb) and torch.equal(rows[1], other)
    unlike = [emb, other, *found[3][0]]
    assert len({each.numpy().tobytes() for each in unlike}) == 4
    bound = math.sqrt(6 / (NODES + 7))
    assert 0.97 * bound < emb.abs().max() <= bound


def test_first_rows_are_evenly_drawn_from_philox():
    bound, key, width = 0.3, 0xFEDCBA9876543210, 6
    rows = torch.from_numpy(UniformRows(40_000, width, bound, key)[np.arange(40_000)])
    # The same draws by torch: two of 64 bits a block, and two numbers of each.
    draws = draw_blocks(torch.arange(40_000)[:, None], torch.arange(2), 1 << 28, key - 2**64)
    words = torch.stack([draws[0], draws[0] >> 32, draws[1], draws[1] >> 32], -1)
    top = (words >> 8 & 0xFFFFFF).reshape(len(rows), -1)[:, :width]
    expected = ((top.double() / 2**23 - 1) * np.float32(bound)).float()
    assert torch.equal(rows, expected)
    # Means of uniform numbers: within 5 standard deviations.
    count = rows.numel()
    assert abs(rows.mean()) < 5 * bound / math.sqrt(3 * count)
    assert abs((rows**2).mean() - bound**2 / 3) < 5 * bound**2 * math.sqrt(4 / 45 / count)
    correlations = torch.corrcoef(rows.T) - torch.eye(width)
    assert correlations.abs().max() < 5 / math.sqrt(len(rows))


def test_rows_can_be_given():
    given = torch.randn(NODES, DIM)
    for init in (given, given.numpy()):
        store = GlobalStore.from_dgl(
            ring(), embeddings={"emb": EmbeddingSpec(DIM, init=init)}, device="cpu", gpu_memory=3000
        )
        assert torch.equal(every_row(store.embedding("emb")), given)
    zeros = GlobalStore.from_dgl(ring(), embeddings={"emb": EmbeddingSpec(DIM, init=0)})
    assert not every_row(zeros.embedding("emb")).any()


def test_of_a_data_set(real_data):
    data = load("cora", real_data)
    store = GlobalStore.from_dataset(data, embeddings={"emb": 4}, device="cpu")
    assert store.embedding("emb").num_embeddings == data.num_nodes


def test_state_is_beside_the_rows_and_no_feature(store):
    tables = store._store.tables
    tiers = {table.plan.tiers for name, table in tables.items() if not name.startswith("topo")}
    assert len(tiers) == 1 and len(next(iter(tiers))) > 1
    with pytest.raises(InvalidInputError, match=r"the store holds \['emb'\]"):
        store.gather("exp_avg", torch.arange(1))
    # What the plan counts on is what there is.
    assert set(store.plan.tables) == set(tables)
    held = sum(
        tier.num_rows * 4 * DIM
        for name, table in store.plan.tables.items()
        if not name.startswith("topo")
        for tier in table.tiers
        if tier.memory == "gpu"
    )
    assert 0.5 * 3 * NODES * 4 * DIM < held <= store.plan.gpu_bytes[0]


# -- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 2), (3, 3)])
def test_what_is_saved_is_restored_by_any_number_of_ranks(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1000)  # of rows of 20 bytes
    launch(embeddings.saves, before, "cpu", tmp_path)
    # As a plain archive.
    saved = torch.load(tmp_path / "saved.pt")
    with np.load(tmp_path / "emb.npz") as archive:
        assert sorted(archive) == ["exp_avg", "exp_avg_sq", "rows", "steps"]
        assert archive["steps"] == 10
        assert np.array_equal(archive["rows"], saved["node/_N/emb"].numpy())
    assert not list(tmp_path.glob("*.partial"))
    launch(embeddings.restores, after, "cpu", tmp_path, before == after)


def test_files_go_through_memory_in_chunks(store, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1000)
    sizes = []
    gather, write = files.gather_rows, files.write_rows
    monkeypatch.setattr(
        files,
        "gather_rows",
        lambda view, ids: sizes.append(len(ids)) or gather(view, ids),
    )
    monkeypatch.setattr(
        files,
        "write_rows",
        lambda t, ids, *rest: sizes.append(len(ids)) or write(t, ids, *rest),
    )
    embedding = store.embedding("emb")
    embedding.save(tmp_path / "emb")
    embedding.load(tmp_path / "emb")
    assert set(sizes) == {50, NODES % 50} and sum(sizes) == 2 * 3 * NODES


def test_rows_alone_can_be_loaded_for_another_optimizer(store, tmp_path):
    embedding = store.embedding("emb")
    embedding(torch.arange(5)).sum().backward()
    dgl_mgpu.SparseAdam([embedding]).step()
    embedding.save(tmp_path / "emb")
    other = make_store("cpu", "adagrad", seed=1).embedding("emb")
    with pytest.raises(CheckpointError, match="state_sum"):
        other.load(tmp_path / "emb")
    assert not torch.equal(every_row(other), every_row(embedding))
    other.load(tmp_path / "emb", rows_only=True)
    assert torch.equal(every_row(other), every_row(embedding)) and other.steps == 0


@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "flipped", "text", "empty", "narrow", "wide"]
)
def test_damaged_files_change_nothing(store, tmp_path, damage):
    embedding, path = store.embedding("emb"), tmp_path / "emb"
    dim = DIM + {"narrow": -1, "wide": 1}.get(damage, 0)
    make_store("cpu", "adam", dim=dim, seed=3).embedding("emb").save(path)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif damage == "text":
        path.write_text("rows")
    elif damage == "empty":
        path.write_bytes(b"")
    before = every_table(store)
    with pytest.raises(CheckpointError, match="load rows from"):
        embedding.load(path)
    assert all(torch.equal(rows, before[name]) for name, rows in every_table(store).items())
    assert embedding.steps == 0


def test_a_file_that_cannot_be_written_leaves_the_last_one(store, tmp_path, monkeypatch):
    embedding, path = store.embedding("emb"), tmp_path / "emb"
    embedding.save(path)
    content = path.read_bytes()
    embedding(torch.arange(5)).sum().backward()
    dgl_mgpu.SparseAdam([embedding]).step()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(os, "fsync", full)
        embedding.save(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]
    with pytest.raises(CheckpointError):
        embedding.save(path / "below a file")
    embedding.save(path)
    assert path.read_bytes() != content


def _loads_what_is_missing(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    embedding = make_store("cpu", "adam").embedding("emb")
    expected = CheckpointError if ranks.rank == 0 else RankFailedError
    with pytest.raises(expected, match="no such file"):
        embedding.load(folder / "emb")
    with pytest.raises(expected, match="save rows"):
        embedding.save(Path("/proc/none/emb"))


def test_all_ranks_are_told_of_a_bad_file(tmp_path):
    launch(_loads_what_is_missing, 2, tmp_path)


def _loads_what_goes_away(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    embedding, path = make_store("cpu", "adam").embedding("emb"), folder / "emb"
    embedding.save(path)
    check = files._checked

    def check_and_remove(*given) -> int:
        steps = check(*given)
        path.unlink()
        return steps

    files._checked = check_and_remove  # in this rank's process alone
    with pytest.raises(OSError if ranks.rank == 0 else RankFailedError, match="No such file"):
        embedding.load(path)


def test_all_ranks_are_told_of_a_file_that_goes_away(tmp_path):
    launch(_loads_what_goes_away, 2, tmp_path)


# -- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("embedded", "match"),
    [
        ({"emb": 0}, "dim is 0"),
        ({"emb": -3}, "dim is -3"),
        ({"emb": 2.5}, "dim is 2.5"),
        ({"emb": True}, "dim is True"),
        ({"paper": {"emb": 4}}, "node type 'paper'"),
        ({"feat": 4}, "a feature of this name"),
        ({"emb": lambda: EmbeddingSpec(4, "adamw")}, "there is no optimizer 'adamw'"),
        ({"emb": lambda: EmbeddingSpec(4, ["adam"])}, "there is no optimizer"),
        ({"emb": lambda: EmbeddingSpec(4, init="normal")}, "init='normal'"),
        ({"emb": lambda: EmbeddingSpec(4, init=-1.0)}, "init=-1.0"),
        ({"emb": lambda: EmbeddingSpec(4, init=math.inf)}, "init=inf"),
        ({"emb": EmbeddingSpec(4, init=torch.zeros(NODES, 5))}, r"shape \(211, 5\)"),
        ({"emb": EmbeddingSpec(4, init=torch.zeros(NODES, 4).double())}, "float64"),
        ({"emb": EmbeddingSpec(4, init=np.zeros((NODES - 1, 4), np.float32))}, r"\(210, 4\)"),
        (["emb"], "embeddings="),
    ],
)
def test_what_cannot_be_kept_is_refused(embedded, match):
    g = ring()
    g.ndata["feat"] = torch.zeros(NODES, 2)
    with pytest.raises(InvalidInputError, match=match):
        if isinstance(embedded, dict):
            embedded = {k: each() if callable(each) else each for k, each in embedded.items()}
        GlobalStore.from_dgl(g, embeddings=embedded, device="cpu")


def test_of_several_types_one_has_to_be_named():
    with pytest.raises(InvalidInputError, match="does not say of which it is"):
        GlobalStore.from_dgl(citations(), embeddings={"emb": 4})
    store = GlobalStore.from_dgl(citations(), embeddings={"author": {"emb": 4}})
    with pytest.raises(InvalidInputError, match=r"'emb' of 'paper'.*holds \[\]"):
        store.embedding("emb", "paper")
    with pytest.raises(InvalidInputError, match="find node type None"):
        store.embedding("emb")


def test_rows_on_disk_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="part of it goes to disk"):
        GlobalStore.from_dgl(
            ring(),
            embeddings={"emb": 32},
            device="cpu",
            gpu_memory="4KiB",
            host_memory="20KiB",
            disk_path=tmp_path,
        )


def test_wrong_arguments_are_refused(store):
    embedding = store.embedding("emb")
    with pytest.raises(InvalidInputError, match=r"the store holds \['emb'\]"):
        store.embedding("embedding")
    for ids in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), [1, 2]):
        with pytest.raises(InvalidInputError, match="look up rows of embedding 'emb'"):
            embedding(ids)
    with pytest.raises(InvalidInputError, match="built for the optimizer 'adam'"):
        dgl_mgpu.SparseSGD([embedding], lr=0.1)
    with pytest.raises(InvalidInputError, match="of type Embedding"):
        dgl_mgpu.SparseAdam([nn.Embedding(3, 3)])
    for params in ([], [embedding, embedding]):
        with pytest.raises(InvalidInputError, match="pass each one once"):
            dgl_mgpu.SparseAdam(params)
    for numbers in (
        {"lr": -1},
        {"lr": math.nan},
        {"eps": -1e-3},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"betas": 0.9},
        {"over_ranks": "max"},
    ):
        with pytest.raises(InvalidInputError, match=next(iter(numbers))):
            dgl_mgpu.SparseAdam([embedding], **numbers)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_there_is_no_copy(store, duplicate):
    model = nn.ModuleList([store.embedding("emb")])
    assert not model.state_dict()
    with pytest.raises(InvalidInputError, match=r"embedding\.save"):
        duplicate(model[0] if duplicate is copy.copy else model)


def test_a_closed_store_is_neither_trained_nor_saved(store, tmp_path):
    embedding = store.embedding("emb")
    optimizer = dgl_mgpu.SparseAdam([embedding])
    embedding(torch.arange(3)).sum().backward()
    store.close()
    with pytest.raises(StoreClosedError):
        optimizer.step()
    with pytest.raises(StoreClosedError):
        embedding(torch.arange(3))
    with pytest.raises(StoreClosedError):
        embedding.save(tmp_path / "emb")
    assert not list(tmp_path.iterdir())
