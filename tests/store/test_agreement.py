"""Ranks that build a store have to ask for the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu import EmbeddingSpec, GlobalStore
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data import Dataset
from dgl_mgpu.errors import ConfigError, InvalidInputError, RankFailedError
from dgl_mgpu.machine import preset
from dgl_mgpu.train.launch.launch import launch

pytestmark = pytest.mark.usefixtures("forked_ranks")

NODES, EDGES = 60, 300


def graph(seed: int = 0, **changes: Any) -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES, (2, EDGES), generator=draw)
    g = dgl.graph((ends[0], ends[1]), num_nodes=NODES, idtype=changes.get("idtype", torch.int64))
    g.ndata["feat"] = torch.zeros(NODES, changes.get("width", 4))
    g.edata["w"] = torch.zeros(EDGES, dtype=changes.get("dtype", torch.float32))
    return g


def other_order() -> dgl.DGLGraph:
    """The same edges, two of them numbered the other way round."""
    src, dst = graph().edges()
    numbers = torch.arange(EDGES)
    numbers[:2] = numbers[:2].flip(0)
    g = dgl.graph((src[numbers], dst[numbers]), num_nodes=NODES)
    g.ndata["feat"], g.edata["w"] = graph().ndata["feat"], graph().edata["w"]
    assert not torch.equal(g.edges()[0], src) or not torch.equal(g.edges()[1], dst)
    return g


def dataset(**changes: Any) -> Dataset:
    draw = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(draw.multinomial(EDGES, np.full(NODES, 1 / NODES)))])
    whole = Dataset(
        name="some",
        num_nodes=NODES,
        indptr=indptr.astype(np.int64),
        indices=draw.integers(0, NODES, EDGES),
        labels=np.zeros(NODES, np.int64),
        num_classes=2,
        train=np.arange(20),
        valid=np.arange(20, 40),
        test=np.arange(40, 60),
        node_features={"feat": np.zeros((NODES, 3), np.float32)},
    )
    return replace(whole, **changes)


OTHER_OPTIONS = {
    "gpu_memory": ({"gpu_memory": "1MiB"}, {"gpu_memory": "2MiB"}),
    "policy": ({}, {"policy": "host"}),
    "seed": ({"seed": 1}, {"seed": 2}),
    "edges": ({}, {"edges": True}),
    "fanouts": ({"fanouts": [3, 4]}, {"fanouts": [3, 5]}),
    "feature_dtypes": ({}, {"feature_dtypes": {"feat": "float16"}}),
    "topology": ({}, {"topology": "dgx1"}),
}


def _with_options(here: dict, there: dict, what: str) -> None:
    first = Communicator.of_this_machine().rank == 0
    with pytest.raises(ConfigError, match=f"{what} is .* on rank 1 of it; pass the same on every"):
        GlobalStore.from_dgl(graph() if first else None, device="cpu", **(here if first else there))


@pytest.mark.parametrize("what", OTHER_OPTIONS)
def test_other_options_are_told_on_all_ranks(what):
    launch(_with_options, 2, *OTHER_OPTIONS[what], what)


OTHER_DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "nodes": (lambda: dgl.rand_graph(NODES + 1, EDGES), "nodes of type '_N' is 60"),
    "edges": (lambda: graph(seed=1), "ends of edges of type"),
    "edges' order": (other_order, "ends of edges of type"),
    "ids": (lambda: graph(idtype=torch.int32), "the dtype of ids is torch.int64"),
    "width": (lambda: graph(width=5), "feature 'feat' of '_N' is torch.float32 of shape"),
    "type": (lambda: graph(dtype=torch.float64), "feature 'w' of .* is torch.float32 of shape"),
}


def _with_data(what: str) -> None:
    other, told = OTHER_DATA[what]
    g = graph() if Communicator.of_this_machine().rank == 0 else other()
    with pytest.raises(InvalidInputError, match=rf"{told}.* on rank 1 .*None on all but the mach"):
        GlobalStore.from_dgl(g, device="cpu")


@pytest.mark.parametrize("what", OTHER_DATA)
def test_another_graph_is_told_on_all_ranks(what):
    launch(_with_data, 2, what)


def _with_datasets() -> None:
    first = Communicator.of_this_machine().rank == 0
    turned = dataset().indices[::-1].copy()
    for changes, told in (
        ({"indices": turned}, "ends of edges of "),
        ({"node_features": {}}, "rows of .*feat is .* missing on rank 1"),
        ({"node_features": {"feat": np.zeros((NODES, 3), float)}}, "rows of .*32.* torch.float64"),
    ):
        given = dataset() if first else dataset(**changes)
        with pytest.raises(InvalidInputError, match=told):
            GlobalStore.from_dataset(given, device="cpu")
    for given in (dataset(), dataset() if first else None):
        with GlobalStore.from_dataset(given, device="cpu") as store:
            assert store.graph.num_edges() == EDGES


def test_another_data_set_is_told_on_all_ranks():
    launch(_with_datasets, 2)


def _with_embeddings() -> None:
    first = Communicator.of_this_machine().rank == 0
    for here, there in (
        ({"emb": 4}, {"emb": 5}),
        ({"emb": 4}, {"emb": EmbeddingSpec(4, "sgd")}),
        (None, {"emb": 4}),
        ({"_N": {"emb": 4}}, {"emb": 4, "other": 4}),
    ):
        with pytest.raises(InvalidInputError, match=r"embedding '.*on rank 1"):
            GlobalStore.from_dgl(graph(), device="cpu", embeddings=here if first else there)


def test_other_embeddings_are_told_on_all_ranks():
    launch(_with_embeddings, 2)


def _the_same() -> None:
    first = Communicator.of_this_machine().rank == 0
    machine = preset("cpu", 2)
    for here, there in (
        ({"gpu_memory": "1MiB"}, {"gpu_memory": 1 << 20}),
        ({"fanouts": [3, 4]}, {"fanouts": (3, 4)}),
        ({"feature_dtypes": {"feat": "float16"}}, {"feature_dtypes": {"feat": torch.float16}}),
        ({"topology": machine}, {"topology": preset("cpu", 2)}),
        ({"embeddings": {"emb": 4}}, {"embeddings": {"emb": EmbeddingSpec(4)}}),
        ({"embeddings": {"emb": 4}}, {}),
        # Where ranks begin to sample is counted together, or each would say its own.
        ({"seeds": torch.arange(5)}, {"seeds": torch.arange(5, 9)}),
    ):
        given = here if first else there
        for g in (graph(), graph() if first else None):
            with GlobalStore.from_dgl(g, device="cpu", **given) as store:
                assert store.graph.num_edges() == EDGES


def test_what_is_said_in_other_words_is_the_same():
    launch(_the_same, 2)


def _without_data() -> None:
    first = Communicator.of_this_machine().rank == 0
    with pytest.raises(InvalidInputError, match="the machine's first rank passed no graph"):
        GlobalStore.from_dgl(None if first else graph(), device="cpu")
    with pytest.raises(RankFailedError if first else InvalidInputError, match="a block"):
        block = dgl.to_block(graph(), torch.arange(NODES))
        GlobalStore.from_dgl(graph() if first else block, device="cpu")


def test_no_graph_is_told_on_all_ranks():
    launch(_without_data, 2)


def test_a_rank_alone_needs_a_graph():
    with pytest.raises(InvalidInputError, match="the machine's first rank passed no graph"):
        dgl_mgpu.GlobalStore.from_dgl(None, device="cpu")
