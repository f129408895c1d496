"""Rows changed by several ranks in all their copies, against torch on one tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    RankFailedError,
    StoreClosedError,
)
from dgl_mgpu.ops import device, gather_rows, scatter
from dgl_mgpu.placement import HOST, Tier
from dgl_mgpu.store import row_updates as optimizer_module
from dgl_mgpu.store.memory import Blueprint, FeatureSource, Store, TopologySource, build
from dgl_mgpu.store.row_updates import SparseAdagrad, SparseAdam, SparseSGD, write_rows
from dgl_mgpu.train.launch.launch import launch
from tests.kernels.conftest import emulated  # noqa: F401  (a fixture)
from tests.store.memory.gpu_runtimes import KINDS, make_runtime
from tests.store.memory.layouts import partitioned, plan_of, replicated, single

ROWS, WIDTH = 211, 5
TABLES = ["weight", "first", "second"]


def half_replicated(start: int, stop: int, num_ranks: int) -> Tier:
    """Even ranks hold it; odd ones read a copy of the rank before, the last a host copy."""
    sources = [rank - rank % 2 for rank in range(num_ranks)]
    if num_ranks > 1:
        sources[-1] = HOST
    holders = tuple(range(0, num_ranks, 2))
    return Tier(start, stop, "gpu", 1, (holders,), tuple((source,) for source in sources))


def tiers(num_ranks: int) -> list[Tier]:
    return [
        replicated(0, 40, num_ranks),
        half_replicated(40, 80, num_ranks),
        partitioned(80, 150, num_ranks),
        single(150, ROWS, "host", num_ranks),
    ]


def first_weights() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def make_store(ranks: Communicator, kind: str = "shared") -> Store:
    blueprint = None
    if ranks.rank == 0:
        weights = first_weights()
        rows = dict(zip(TABLES, (weights, *[torch.zeros_like(weights)] * 2), strict=True))
        sources = {name: FeatureSource(table, "node") for name, table in rows.items()}
        order = np.random.default_rng(1).permutation(ROWS)
        plan = plan_of(ranks.size, {name: tiers(ranks.size) for name in sources})
        blueprint = Blueprint(sources, {"node": order}, plan)
    return build(blueprint, ranks, None if kind == "shared" else make_runtime(kind, ranks))


def gradients_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Skewed ids with repeats; at some steps some ranks have none."""
    random = np.random.default_rng((rank, step))
    count = 0 if (rank + step) % 3 == 0 else 90
    ids = torch.from_numpy((ROWS * random.random(count) ** 2).astype(np.int64))
    gradients = torch.from_numpy(random.standard_normal((count, WIDTH), np.float32))
    return (ids.int() if rank == 1 else ids), gradients


def given(store: Store, step: int) -> tuple[torch.Tensor, ...]:
    """This rank's gradients; some ranks have them on the host, whatever their store is on."""
    changes = gradients_of(store.rank, step)
    return changes if store.rank == 2 else tuple(each.to(store.device) for each in changes)


def every_row(store: Store, name: str) -> torch.Tensor:
    return gather_rows(store.tables[name].view, torch.arange(ROWS, device=store.device)).cpu()


def train(store: Store, name: str, steps: int = 3) -> None:
    ranks = Communicator.of_this_machine()
    weights = torch.nn.Parameter(first_weights())
    weight, first, second = (store.tables[table] for table in TABLES)
    if name == "sgd":
        ours, theirs = SparseSGD(weight, lr=0.1), torch.optim.SGD([weights], lr=0.1)
    elif name == "adagrad":
        ours = SparseAdagrad(weight, first, lr=0.1)
        theirs = torch.optim.Adagrad([weights], lr=0.1)
    else:
        ours = SparseAdam(weight, first, second, lr=0.1, betas=(0.8, 0.95))
        theirs = torch.optim.SparseAdam([weights], lr=0.1, betas=(0.8, 0.95))
    for step in range(steps):
        ours.step(*given(store, step))
        every = [gradients_of(rank, step) for rank in range(ranks.size)]
        weights.grad = torch.sparse_coo_tensor(
            torch.cat([ids.long() for ids, _ in every])[None],
            torch.cat([gradients for _, gradients in every]),
            weights.shape,
            check_invariants=True,
        )
        theirs.step()
        found = every_row(store, "weight")
        torch.testing.assert_close(found, weights.detach(), rtol=1e-4, atol=1e-5)
        # Copies are equal bit for bit, and nobody begins the next step before all have looked.
        for table in TABLES:
            mine = every_row(store, table).numpy().tobytes()
            assert all(other == mine for other in ranks.all_gather(mine))


def write(store: Store) -> None:
    ranks = Communicator.of_this_machine()
    expected = first_weights()
    for rank in range(ranks.size):
        ids, rows = gradients_of(rank, 1)
        for row, value in zip(ids.tolist(), rows, strict=True):
            expected[row] = value
    write_rows(store.tables["weight"], *given(store, 1))
    assert torch.equal(every_row(store, "weight"), expected)
    assert not every_row(store, "first").any()


def _writes_and_trains(kind: str) -> None:
    ranks = Communicator.of_this_machine()
    for work in (write, *(partial(train, name=name) for name in ("sgd", "adagrad", "adam"))):
        store = make_store(ranks, kind)
        work(store)
        store.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("kind", ["shared", KINDS[1]])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_write_in_turn_and_train_as_torch_does(kind, num_ranks):
    launch(_writes_and_trains, num_ranks, kind)


def _one_rank_has_a_bad_id(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    store = make_store(ranks)
    optimizer = SparseSGD(store.tables["weight"], lr=0.1)
    ids = torch.tensor([3, ROWS if ranks.rank == 1 else 4])
    with pytest.raises(IdOutOfRangeError if ranks.rank == 1 else RankFailedError, match="id 211"):
        optimizer.step(ids, torch.ones(2, WIDTH))
    with pytest.raises(RankFailedError if ranks.rank == 1 else InvalidInputError, match="values"):
        optimizer.step(ids[:1], torch.ones(1, WIDTH + (ranks.rank != 1)))
    assert torch.equal(every_row(store, "weight"), first_weights())
    ranks.all_gather(None)
    optimizer.step(ids[:1], torch.ones(1, WIDTH))
    assert not torch.equal(every_row(store, "weight"), first_weights())
    (folder / f"{ranks.rank}").touch()


def test_a_mistake_on_one_rank_is_told_on_all_and_changes_nothing(tmp_path):
    launch(_one_rank_has_a_bad_id, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def _changes_differ(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    store = make_store(ranks)
    ids, rows = torch.arange(3), torch.ones(3, WIDTH)
    mine = store.tables[TABLES[ranks.rank]]
    with pytest.raises(InvalidInputError, match=r"in table 'weight', but rank 1 .*'first'"):
        write_rows(mine, ids, rows)
    optimizer = SparseSGD(store.tables["weight"], lr=0.1 * (1 + ranks.rank))
    with pytest.raises(InvalidInputError, match=r"lr=0\.1\).*rank 1 .*lr=0\.2"):
        optimizer.step(ids, rows)
    with pytest.raises(InvalidInputError, match=r"rank 0 has SGD.*rank 1 new rows"):
        if ranks.rank == 0:
            optimizer.step(ids, rows)
        else:
            write_rows(store.tables["weight"], ids, rows)
    assert torch.equal(every_row(store, "weight"), first_weights())
    assert not every_row(store, "first").any()
    assert optimizer.steps == 0
    assert [table.version for table in store.tables.values()] == [0] * len(TABLES)
    (folder / f"{ranks.rank}").touch()


def test_ranks_that_change_different_things_are_told(tmp_path):
    launch(_changes_differ, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_versions_count_what_may_have_changed(monkeypatch):
    store = make_store(Communicator())
    weight, first, second = (store.tables[table] for table in TABLES)
    optimizer = SparseAdagrad(weight, first)
    ids, rows = torch.arange(3), torch.ones(3, WIDTH)
    optimizer.step(ids, rows)
    write_rows(weight, ids, rows)
    assert (weight.version, first.version, second.version) == (2, 1, 0)
    with pytest.raises(InvalidInputError):
        optimizer.step(ids, rows[:, 1:])
    assert (weight.version, first.version) == (2, 1)

    def breaks_off(*_: object) -> None:
        raise RuntimeError("some rows are written")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="some rows"):
        patch.setattr(optimizer_module, "update_rows", breaks_off)
        optimizer.step(ids, rows)
    assert (weight.version, first.version) == (3, 2)


def _trains_a_closed_store(kind: str, folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    store = make_store(ranks, kind)
    weight, first, second = (store.tables[table] for table in TABLES)
    optimizer = SparseAdam(weight, first, second)
    # Their owner closes them on one rank first: no rank may write then.
    if ranks.rank == 0:
        for table in store.tables.values():
            table.close()
    ids, rows = torch.arange(3), torch.ones(3, WIDTH)
    expected = StoreClosedError if ranks.rank == 0 else RankFailedError
    with pytest.raises(expected, match="closed"):
        optimizer.step(ids.to(store.device), rows.to(store.device))
    with pytest.raises(expected, match="closed"):
        write_rows(weight, ids.to(store.device), rows.to(store.device))
    assert optimizer.steps == 0
    if ranks.rank != 0:
        assert torch.equal(every_row(store, "weight"), first_weights())
    ranks.all_gather(None)
    store.close()
    with pytest.raises(StoreClosedError):
        optimizer.step(ids, rows)
    (folder / f"{ranks.rank}").touch()


@pytest.mark.parametrize("kind", ["shared", *KINDS])
def test_a_closed_store_is_not_trained(kind, tmp_path):
    launch(_trains_a_closed_store, 2, kind, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("optimizer_of", [None, SparseAdam])
def test_a_bad_id_of_another_thread_leaves_no_rank_behind(emulated, monkeypatch, optimizer_of):  # noqa: F811
    """As on a GPU, whose kernels report what they find without being waited for."""
    where = torch.device("cpu")
    for name in ("scatter_rows", "update_rows"):
        monkeypatch.setattr(torch.ops.dgl_mgpu, name, getattr(scatter, f"_{name}_cuda"))
    store = make_store(Communicator())
    ids, rows = torch.arange(7), torch.ones(7, WIDTH)
    # Found by another thread's gather when this one's ids had been checked.
    device.fault_record(where).copy_(torch.tensor([1, 999, 10]))
    if optimizer_of is None:
        write_rows(store.tables["weight"], ids, rows)
    else:
        optimizer = optimizer_of(*(store.tables[table] for table in TABLES))
        optimizer.step(ids, rows)
        assert optimizer.steps == 1
    changed = (every_row(store, "weight") != first_weights()).any(1)
    assert changed[:7].all() and not changed[7:].any()
    with pytest.raises(IdOutOfRangeError, match="id 999 is not among the 10 rows"):
        device.raise_faults(where, wait=True)


def test_steps_that_failed_are_not_counted(monkeypatch):
    store = make_store(Communicator())
    optimizer = SparseAdam(*(store.tables[table] for table in TABLES))

    def fails(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("no room to sort")

    with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
        patch.setattr(optimizer_module, "update_rows", fails)
        optimizer.step(torch.tensor([0]), torch.ones(1, WIDTH))
    assert optimizer.steps == 0
    optimizer.step(torch.tensor([0]), torch.ones(1, WIDTH))
    assert optimizer.steps == 1


def test_what_cannot_be_trained_is_refused(tmp_path):
    rows = np.zeros((ROWS, WIDTH), np.float32)
    graph = TopologySource(np.zeros(ROWS + 1, np.int64), np.zeros(0, np.int64), None, ROWS,
                           torch.int64)  # fmt: skip
    sources = {
        "weight": FeatureSource(rows),
        "elsewhere": FeatureSource(rows),
        "on disk": FeatureSource(rows),
        "half": FeatureSource(rows.astype(np.float16)),
        "graph": graph,
    }
    whole = [partitioned(0, ROWS, 1)]
    places = dict.fromkeys(sources, whole)
    places["elsewhere"] = [single(0, ROWS, "host", 1)]
    places["on disk"] = [single(0, ROWS, "disk", 1)]
    tables = build(Blueprint(sources, {}, plan_of(1, places), tmp_path), Communicator()).tables
    with pytest.raises(InvalidInputError, match="'elsewhere' are placed differently"):
        SparseAdagrad(tables["weight"], tables["elsewhere"])
    with pytest.raises(InvalidInputError, match="211 rows of table 'on disk' are on disk"):
        SparseSGD(tables["on disk"], 0.1)
    with pytest.raises(InvalidInputError, match="float16"):
        SparseSGD(tables["half"], 0.1)
    with pytest.raises(InvalidInputError, match="'graph' is a graph's topology"):
        write_rows(tables["graph"], torch.arange(1), torch.zeros(1, WIDTH))
