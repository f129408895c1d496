"""Which graphs loaders with ``use_uva=True`` share, and the stores that they share.

Stores and what is refused are as in ``test_uva.py``.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from pathlib import Path

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import (
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    Sampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
)

from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.runner_options import RunnerOptions
from dgl_mgpu.dgl.shared_graphs import SharedGraph, share
from dgl_mgpu.dgl.shared_graphs.columns import stored_of
from dgl_mgpu.errors import (
    ConfigError,
    InvalidInputError,
    UnavailableError,
    UnsupportedByStoreError,
)
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.pinning import pinning
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.train.launch.launch import launch
from tests.sampling.loaders import FEATURES, assert_blocks_are_right, load, node_graph, typed_graph

pytestmark = [
    pytest.mark.usefixtures("without_gpu"),
    pytest.mark.filterwarnings("ignore:Dataloader CPU affinity"),
]


class Ours(Sampler):
    def sample(self, g, indices):
        return g.in_subgraph(indices)


def test_dgl_pins_what_is_not_shared(told, monkeypatch):
    sampler = NeighborSampler([2])

    def is_pinned(**options) -> bool:
        g = node_graph("cpu")
        try:
            loader = load(g, torch.arange(9), options.pop("sampler", sampler), **options)
        except UnavailableError:
            return True
        assert isinstance(loader.graph, SharedGraph)
        return False

    assert not is_pinned()
    with pytest.warns(UserWarning, match=r"Ours may need more") as warned:
        assert is_pinned(sampler=Ours())
    # Where the DataLoader is made.
    assert warned.pop(UserWarning).lineno == load.__code__.co_firstlineno + 1
    told()
    monkeypatch.delenv(runner_options.VARIABLE)
    assert is_pinned()
    runner_options.hand_on(RunnerOptions({}, uses_store=False, captures=False))
    assert is_pinned()
    monkeypatch.setenv(runner_options.VARIABLE, "{")
    with pytest.raises(ConfigError, match="unset it"):
        is_pinned()


def test_options_that_do_nothing_are_told(told):
    g = node_graph("cpu")

    def warned(graph=g, **options) -> list[int]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            load(graph, torch.arange(9), NeighborSampler([2]), **options)
        return [each.lineno for each in seen if "do nothing" in str(each.message)]

    assert warned(use_uva=False) == [load.__code__.co_firstlineno + 1]
    assert not warned()  # the graph is in a store from now on
    assert not warned(use_uva=False)
    runner_options.hand_on(RunnerOptions({}, uses_store=False, captures=False))
    assert not warned(node_graph("cpu"), use_uva=False)
    runner_options.hand_on(RunnerOptions(captures=False))
    assert not warned(node_graph("cpu"), use_uva=False)


@pytest.mark.usefixtures("told")
def test_dgls_own_checks_are_made():
    g = node_graph("cpu")
    for options in ({"num_workers": 1}, {"pin_prefetcher": True}, {"use_prefetch_thread": True}):
        with pytest.raises(ValueError, match=r"must be 0|only effective"):
            load(g, torch.arange(9), NeighborSampler([2]), **options)
    assert stored_of(g) is None
    loader = load(g, torch.arange(9), NeighborSampler([2]))
    assert "csr" not in g.formats()["created"]  # which pinning makes, and nothing here needs
    assert loader.use_prefetch_thread is loader.pin_prefetcher is False
    block = next(iter(loader))[2][0]
    with pytest.raises((UnavailableError, dgl.DGLError)):  # a block is none that is sampled
        load(block, torch.arange(1), NeighborSampler([2]))


@pytest.mark.usefixtures("told")
def test_a_loader_that_is_made_of_anothers_parts():
    """As PyTorch Lightning does."""
    loader = load(node_graph("cpu"), torch.arange(90), NeighborSampler([2], **FEATURES))
    again = DataLoader(
        loader.graph, loader.indices, loader.graph_sampler, loader.device, batch_size=None,
        use_uva=True, collate_fn=loader.collate_fn, dataset=loader.dataset,
    )  # fmt: skip
    assert again.graph is loader.graph
    assert sorted(torch.cat([batch[1] for batch in again]).tolist()) == list(range(90))


def test_options_of_the_runner_place_the_graph(told, tmp_path):
    told(gpu_memory="8KiB", host_memory="24KiB", disk_path=str(tmp_path))
    g = node_graph("cpu")
    loader = load(g, torch.arange(300), NeighborSampler([3, 4], **FEATURES))
    plan = loader.graph._stored.store.plan
    used = {tier.memory for table in plan.tables.values() for tier in table.tiers}
    assert used == {"gpu", "host", "disk"}
    for _, _, blocks in loader:
        assert_blocks_are_right(g, blocks, fetched=True)
    told(gpu_memory="8KiB", host_memory="1KiB")
    with pytest.raises(MemoryError, match=r"store\.host_memory"):
        load(g.clone(), torch.arange(3), NeighborSampler([1]))


def test_a_script_has_rows_of_its_features_types_that_are_kept_in_others(told):
    told(feature_dtypes={"feat": "float16"})
    g = node_graph("cpu")
    expected = g.ndata["feat"].half().float()
    for inputs, _, blocks in load(g, torch.arange(300), NeighborSampler([3], **FEATURES)):
        assert torch.equal(blocks[0].srcdata["feat"], expected[inputs])
    # What the script itself reads is its own.
    assert not torch.equal(g.ndata["feat"], expected)
    prefetched = {"prefetch_node_feats": ["feat"]}
    for sampler in (LaborSampler([3], **prefetched), ShaDowKHopSampler([3], **prefetched)):
        for inputs, _, sampled in load(g, torch.arange(300), sampler):
            rows = sampled.ndata if isinstance(sampler, ShaDowKHopSampler) else sampled[0].srcdata
            assert torch.equal(rows["feat"], expected[inputs])
    told(feature_dtypes={"fear": "float16"})
    with pytest.raises(InvalidInputError, match="did you mean 'feat'"):
        load(g.clone(), torch.arange(3), NeighborSampler([1]))


def test_a_script_has_its_graph_on_each_machine(told):
    told(span="job")
    with pytest.raises(UnsupportedByStoreError, match=r"--store\.span=job has all ranks read"):
        load(node_graph("cpu"), torch.arange(3), NeighborSampler([1]))


def test_a_store_is_planned_for_the_loaders_batches(told, monkeypatch):
    seen = []
    build = GlobalStore.from_dgl
    monkeypatch.setattr(
        GlobalStore,
        "from_dgl",
        lambda g, **options: seen.append(options) or build(g, **options),
    )
    ids = torch.arange(40)
    load(node_graph("cpu"), ids, NeighborSampler([3, 2]), batch_size=8)
    told(fanouts=[7], hotness="presample")
    load(node_graph("cpu"), ids, MultiLayerFullNeighborSampler(3), batch_size=9)
    by_type = {"user": ids, "item": ids[:5]}
    load(typed_graph("cpu"), by_type, NeighborSampler([2]))
    load(node_graph("cpu"), ids.tolist(), NeighborSampler([2]))
    pairs = as_edge_prediction_sampler(NeighborSampler([{("_N", "_E", "_N"): 2}]))
    told(hotness="presample")
    load(node_graph("cpu"), ids, pairs)
    first, second, third, fourth, last = seen
    assert (first["batch_size"], first["fanouts"], first["edges"]) == (8, [3, 2], False)
    assert (second["batch_size"], second["fanouts"]) == (9, [7])
    assert torch.equal(second["seeds"], ids) and third["seeds"] == by_type
    assert fourth["seeds"] is None
    assert last["edges"] and "fanouts" not in last and "seeds" not in last


@pytest.mark.usefixtures("told")
def test_a_store_is_where_its_loaders_are():
    g = node_graph("cpu")
    loader = load(g, torch.arange(3), NeighborSampler([1]))
    loader.device = torch.device("meta")
    with pytest.raises(ConfigError, match="store is on cpu"):
        share(loader, g, torch.arange(3), 1)


# -- one store for a graph, as long as it lives ----------------------------------------------------


def mapped() -> int:
    """Segments of stores that this process has mapped; nothing else keeps them, without a name."""
    gc.collect()
    return sum("/dev/shm/#" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.usefixtures("told", "both_kinds")
def test_all_loaders_of_a_graph_share_a_store_which_goes_with_it():
    before = mapped()
    g = node_graph("cpu")
    train, valid = (load(g, ids, NeighborSampler([2])) for ids in torch.arange(300).split(200))
    with g.local_scope():
        g.ndata["h"] = torch.ones(300)
        inner = load(g, torch.arange(9), NeighborSampler([2], prefetch_node_feats=["h"]))
        assert next(iter(inner))[2][0].srcdata["h"].sum() > 0
    variant = g.local_var()
    variant.ndata["feat"] = torch.zeros(300, 5)
    other = load(variant, torch.arange(9), NeighborSampler([2], **FEATURES))
    assert next(iter(other))[2][0].srcdata["feat"].sum() == 0
    assert next(iter(train))[2][0].srcdata["feat"].sum() > 0
    stored = {id(each.graph._stored) for each in (train, valid, other)}
    assert len(stored) == 1
    assert mapped() > before
    store = weakref.ref(train.graph._stored.store)
    batch = next(iter(valid))
    del g, variant, train, valid, inner, other
    gc.collect()
    assert store() is not None  # the batch has features that are not read yet
    assert batch[2][0].srcdata["feat"].sum() > 0 and batch[2][0].dstdata["label"].sum() > 0
    del batch
    gc.collect()
    assert store() is None and mapped() == before


@pytest.mark.usefixtures("told")
def test_a_store_does_not_keep_what_the_script_gives_up():
    g = node_graph("cpu")
    loader = load(g, torch.arange(9), NeighborSampler([2], **FEATURES))
    list(loader)
    feature = weakref.ref(g.ndata.pop("feat"))
    gc.collect()
    assert feature() is None
    g.ndata["feat"] = torch.zeros(300, 5)
    assert next(iter(loader))[2][0].srcdata["feat"].sum() == 0


@pytest.mark.usefixtures("told")
def test_a_graph_that_got_more_edges_is_refused():
    g = node_graph("cpu")
    loader = load(g, torch.arange(9), NeighborSampler([2]))
    g.add_edges([0], [1])
    with pytest.raises(InvalidInputError, match="have changed"):
        iter(loader)
    assert load(g, torch.arange(9), NeighborSampler([2])).graph.num_edges() == 3001


# -- ranks -----------------------------------------------------------------------------------------


def _layer(block: dgl.DGLGraph, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with block.local_scope():
        block.srcdata["x"] = x
        block.update_all(dgl.function.copy_u("x", "m"), dgl.function.mean("m", "y"))
        return (block.dstdata["y"] + x[: block.num_dst_nodes()]) @ weight


def _trains(folder: Path, with_tensors: bool) -> None:
    """As DGL's examples do it: loaders for training and validation, then inference layer-wise."""
    cuda_runtime.find_runtime = pinning.find_runtime = lambda: None  # this is a process of its own
    with tensor_backed_graphs(with_tensors):
        before = mapped()
        g = node_graph("cpu")
        y = torch.from_file(str(folder / "y"), shared=True, size=2 * 300 * 5).view(2, 300, 5)
        sampler = NeighborSampler([3, 3], **FEATURES)
        loaders = [
            load(g, ids, sampler, use_ddp=True, shuffle=True, batch_size=20)
            for ids in torch.arange(300).split(203)
        ]
        seen = {}
        for (number, loader), epoch in itertools.product(enumerate(loaders), range(2)):
            for _, outputs, blocks in loader:
                assert_blocks_are_right(g, blocks, fetched=True)
                seen.setdefault((number, epoch), []).extend(outputs.tolist())
        stores = {id(loader.graph._stored) for loader in loaders}
        g.ndata["h"] = g.ndata["feat"]
        full = MultiLayerFullNeighborSampler(1, prefetch_node_feats=["h"])
        for layer, weight in enumerate(torch.eye(5).mul(2).expand(2, 5, 5)):
            loader = load(g, torch.arange(300), full, use_ddp=True, batch_size=64)
            stores.add(id(loader.graph._stored))
            storage = loader.graph.get_node_storage("h")
            assert isinstance(storage, TableStorage) == (layer == 0)
            for _, outputs, blocks in loader:
                y[layer, outputs] = _layer(blocks[0], blocks[0].srcdata["h"], weight)
            dist.barrier()
            g.ndata["h"] = y[layer]
        g.ndata.pop("h")
        assert len(stores) == 1
        # On one rank alone.
        if dist.get_rank() == 1:
            alone = load(g, torch.arange(100), sampler)
            assert id(alone.graph._stored) in stores
            assert sum(len(outputs) for _, outputs, _ in alone) == 100
            with pytest.raises((UnavailableError, dgl.DGLError), match=r"[Pp]in"):
                load(node_graph("cpu"), torch.arange(100), sampler)
            del alone
        torch.save(seen, folder / f"{dist.get_rank()}.pt")
        dist.barrier()
        del g, loaders, loader, storage, blocks
        assert mapped() == before


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("with_tensors", [False, True])
def test_ranks_share_a_store(tmp_path, with_tensors):
    (tmp_path / "y").write_bytes(bytes(4 * 2 * 300 * 5))
    launch(_trains, 2, tmp_path, with_tensors)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for number, ids in enumerate((range(203), range(203, 300))):
        for epoch in range(2):
            mine, others = (share[number, epoch] for share in shares)
            assert set(mine) | set(others) == set(ids)
            assert len(mine) == len(others) == -(-len(ids) // 2)
    g = node_graph("cpu")
    x = g.ndata["feat"]
    for layer in torch.from_file(str(tmp_path / "y"), size=2 * 300 * 5).view(2, 300, 5):
        x = _layer(g, x, 2 * torch.eye(5))
        assert torch.allclose(layer, x)


def _reads_other_data(what: str) -> None:
    cuda_runtime.find_runtime = lambda: None
    g = node_graph("cpu")
    if dist.get_rank() == 1:
        if what == "nodes":
            g.add_nodes(1)
        elif what == "a feature":
            g.ndata["more"] = torch.zeros(300)
        else:
            g.ndata["feat"] = g.ndata["feat"].double()
    with pytest.raises(InvalidInputError, match="load the same graph on all ranks") as error:
        load(g, torch.arange(100), NeighborSampler([2]), use_ddp=True)
    assert {
        "nodes": "nodes of type '_N' is 300 on the machine's first rank, but 301 on rank 1",
        "a feature": "'more' of '_N' is missing on",
        "a dtype": "torch.float32 of shape (300, 5) on the machine's first rank, but torch.float64",
    }[what] in str(error.value)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("what", ["nodes", "a feature", "a dtype"])
def test_ranks_with_different_graphs_are_told(what):
    launch(_reads_other_data, 2, what)
