"""Features kept in narrower types, against rows that torch has rounded."""

from __future__ import annotations

from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl.nn import SAGEConv

import dgl_mgpu
from dgl_mgpu.cli import main
from dgl_mgpu.data import load
from dgl_mgpu.errors import ConfigError, InvalidInputError, RankFailedError
from dgl_mgpu.report import read_metrics
from dgl_mgpu.store.memory import FeatureSource
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.minibatch import run as minibatch_run
from tests.store.narrow_features import NARROW, NUM_NODES, assert_right, graph, rounded

pytestmark = pytest.mark.usefixtures("in_shared_memory", "forked_ranks")


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rows_are_rounded_once_and_of_the_type_that_they_had(given, dtype):
    g = graph(given)
    for named in (dtype, str(dtype).removeprefix("torch.")):
        with dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes={"feat": named}) as store:
            assert_right(store, g, dtype)


def _on_ranks(folder: Path) -> None:
    g = graph()
    memory = {"gpu_memory": "8KiB", "host_memory": "24KiB", "disk_path": folder}
    for dtype in (torch.float16, torch.float8_e5m2):
        named = {"feat": dtype}
        with dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes=named, **memory) as store:
            tiers = {tier.memory for plan in store.plan.tables.values() for tier in plan.tiers}
            assert tiers >= {"gpu", "disk"}
            assert_right(store, g, dtype)
    g.ndata["feat"][7, 2] = 1e5
    told = InvalidInputError if dist.get_rank() == 0 else RankFailedError
    with pytest.raises(told, match=r"keep node feature 'feat' as torch.float16: it holds 100000, "):
        dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes={"feat": "float16"}, device="cpu")


def test_ranks_read_them_from_every_memory(tmp_path):
    launch(_on_ranks, 2, tmp_path)


def test_their_memory_is_that_of_the_narrow_type():
    g = graph()

    def nbytes(**options) -> int:
        with dgl_mgpu.GlobalStore.from_dgl(g, policy="host", **options) as store:
            store.gather("feat", torch.arange(10))
            assert sum(store.graph.traffic.take().nbytes.values()) == 10 * options_bytes
            return int(store.plan.host_bytes)

    options_bytes = 28
    whole = nbytes()
    for dtype, options_bytes in (("float16", 14), ("float8_e4m3fn", 7)):
        assert whole - nbytes(feature_dtypes={"feat": dtype}) == NUM_NODES * (28 - options_bytes)


def test_all_node_types_that_have_a_feature():
    edges = (torch.arange(9) % 4, torch.arange(9) % 5)
    g = dgl.heterograph({("user", "buys", "item"): edges, ("item", "of", "kind"): edges[::-1]})
    for ntype in ("user", "item"):
        g.nodes[ntype].data["x"] = torch.randn(g.num_nodes(ntype), 3)
    with dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes={"x": "bfloat16"}) as store:
        for ntype in ("user", "item"):
            rows = g.nodes[ntype].data["x"]
            found = store.gather("x", torch.arange(len(rows)), ntype)
            assert torch.equal(found, rounded(rows, torch.bfloat16))


def test_inference_reads_them():
    g = graph()
    model = SAGEConv(7, 4, "mean").eval()
    with torch.no_grad():
        expected = model(g, rounded(g.ndata["feat"], torch.float16))
    with dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes={"feat": "float16"}) as store:
        for options in ({}, {"batch_size": 90}):
            found = dgl_mgpu.inference(_OnBlocks(model), store.graph, num_layers=1, **options)
            torch.testing.assert_close(found, expected)


class _OnBlocks(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, blocks, x):
        return self.layer(blocks[0], x)


def test_runs_train_on_rounded_rows(tmp_path, monkeypatch):
    size = {"num_nodes": 600, "num_edges": 5000}
    words = [
        "train", f"data.root={tmp_path}", "model.hidden=12", "trainer.epochs=2",
        "trainer.batch_size=100", *(f"data.options.{key}={value}" for key, value in size.items()),
    ]  # fmt: skip

    def losses(name: str, *more: str) -> list[float]:
        assert main([*words, f"hydra.run.dir={tmp_path / name}", *more]) == 0
        reports, _ = read_metrics(tmp_path / name / "metrics.jsonl")
        return [report.loss for report in reports]

    plain = losses("plain")
    narrow = losses("narrow", "store.feature_dtypes.feat=float8_e4m3fn")
    data = load("generated", tmp_path, **size)
    rows = rounded(torch.tensor(np.array(data.node_features["feat"])), torch.float8_e4m3fn)
    data.node_features["feat"] = rows.numpy()
    monkeypatch.setattr(minibatch_run, "load_dataset", lambda config: data)
    assert narrow == losses("rounded") != plain


@pytest.mark.parametrize(
    ("named", "error", "found"),
    [
        (
            {"fear": "float16"},
            InvalidInputError,
            "'fear' as torch.float16: .* has no such.*'feat'",
        ),
        (
            {"label": "float16"},
            InvalidInputError,
            r"'label' .*: .* dtype torch\.int64.*; name",
        ),
        ({"feat": "float16", "other": "int8"}, ConfigError, "'other' cannot be kept as int8"),
        ({"feat": "float32"}, ConfigError, "'feat' cannot be kept as float32"),
        ({3: "float16"}, InvalidInputError, "'3' as torch.float16: the graph has no such feature"),
        ("float16", ConfigError, "does not give types by name; write them like {feat: float16}"),
    ],
)
def test_what_cannot_be_kept_so_is_told(named, error, found):
    with pytest.raises(error, match=found):
        dgl_mgpu.GlobalStore.from_dgl(graph(), feature_dtypes=named)


def test_nodes_without_features_are_told():
    with pytest.raises(InvalidInputError, match="no such feature; leave it out: the nodes have"):
        dgl_mgpu.GlobalStore.from_dgl(dgl.rand_graph(5, 9), feature_dtypes={"feat": "float16"})


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16])
def test_rows_that_are_no_wider_are_told(given):
    with pytest.raises(InvalidInputError, match=f"dtype {given}, .* name features of a wider"):
        dgl_mgpu.GlobalStore.from_dgl(graph(given), feature_dtypes={"feat": "bfloat16"})


@pytest.mark.parametrize("number", [500.0, -500.0, float("inf"), 3e38])
@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_numbers_beyond_a_types_range_are_told(number, kind):
    rows = kind(np.array([[1.0, 2.0], [3.0, number]], np.float32))
    source = FeatureSource(rows, stored=torch.float8_e4m3fn)
    assert len(source.bytes_of(np.array([0, 0, 0]))) == 6
    with pytest.raises(
        InvalidInputError, match=r"e4m3fn: it holds .*, and the largest torch.float8_e4m3fn is 448"
    ):
        source.bytes_of(np.array([0, 1]))


def test_what_bfloat16_does_not_hold_is_not_to_be_kept_so():
    source = FeatureSource(np.full((1, 1), 3.4e38, np.float32), stored=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="scale them, or leave them as they are"):
        source.bytes_of(np.array([0]))


def test_numbers_that_are_none_stay():
    g = graph()
    g.ndata["feat"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    with dgl_mgpu.GlobalStore.from_dgl(g, feature_dtypes={"feat": "float16"}) as store:
        found = store.gather("feat", torch.arange(2))[0, :3]
    assert found[0].isnan() and found[1:].tolist() == [torch.inf, -torch.inf]
