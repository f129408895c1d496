"""DGLGraph's methods around message passing on graphs of tensors, against DGL's own graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.frame import Column, LazyFeature

from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex

Graph = Callable[[], dgl.DGLGraph]


def homogeneous() -> dgl.DGLGraph:
    return dgl.graph(([0, 1, 1, 3, 3], [1, 2, 2, 0, 1]), num_nodes=5)


def block() -> dgl.DGLGraph:
    seeds = torch.tensor([1, 2, 4])
    return dgl.to_block(dgl.in_subgraph(homogeneous(), seeds), seeds)


def bipartite() -> dgl.DGLGraph:
    return dgl.heterograph({("a", "to", "b"): ([0, 1, 1, 3], [1, 2, 0, 1])}, {"a": 4, "b": 5})


def filled(graph: Graph) -> dgl.DGLGraph:
    g = graph()
    for data, count in (
        (g.srcdata, g.num_src_nodes()),
        (g.dstdata, g.num_dst_nodes()),
        (g.edata, g.num_edges()),
    ):
        data["h"] = torch.arange(2.0 * count).view(count, 2) - count
        data["w"] = torch.arange(1.0 * count).view(count, 1) + 1
    return g


def on_both(graph: Graph, run: Callable[[dgl.DGLGraph], Any]) -> tuple[Any, Any]:
    """What `run` returns or raises on DGL's graph and on one of tensors."""
    results = []
    for on_tensors in (False, True):
        with tensor_backed_graphs(on_tensors):
            g = filled(graph)
            assert isinstance(g._graph, TensorIndex) == on_tensors
            try:
                results.append(run(g))
            except Exception as error:  # compared with the other
                results.append(error)
    return results[0], results[1]


def all_features(g: dgl.DGLGraph) -> dict[tuple[str, int, str], torch.Tensor]:
    return {
        (kind, number, name): column
        for kind, frames in (("n", g._node_frames), ("e", g._edge_frames))
        for number, frame in enumerate(frames)
        for name, column in frame.items()
    }


def assert_same_features(graph: Graph, change: Callable[[dgl.DGLGraph], object]) -> None:
    def run(g: dgl.DGLGraph) -> Any:
        change(g)
        return all_features(g)

    wanted, found = on_both(graph, run)
    assert not isinstance(wanted, Exception), wanted
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)


def assert_same_error(graph: Graph, run: Callable[[dgl.DGLGraph], object]) -> None:
    wanted, found = on_both(graph, run)
    assert isinstance(wanted, Exception)
    texts = [re.sub("0x[0-9a-f]+", "", str(error)) for error in (wanted, found)]
    assert type(found) is type(wanted) and texts[0] == texts[1]


GRAPHS = pytest.mark.parametrize("graph", [homogeneous, block, bipartite])


@GRAPHS
@pytest.mark.parametrize("reduce", [fn.sum, fn.mean, fn.max, fn.min])
@pytest.mark.parametrize(
    "message",
    [
        fn.copy_u("h", "m"),
        fn.copy_e("h", "m"),
        fn.u_mul_e("h", "w", "m"),
        fn.u_sub_e("w", "h", "m"),
        # What DGL has no operator for, together with a sum: messages first.
        fn.u_add_v("h", "h", "m"),
        fn.e_mul_u("h", "w", "m"),
        fn.e_dot_v("h", "h", "m"),
    ],
)
def test_update_all(graph, message, reduce):
    # Into a feature that there is already, too.
    assert_same_features(graph, lambda g: g.update_all(message, reduce("m", "out")))
    assert_same_features(graph, lambda g: g.update_all(message, reduce("m", "h")))


@GRAPHS
def test_update_all_with_functions_of_a_users(graph):
    ours, theirs = fn.copy_u("h", "m"), fn.sum("m", "out")

    def message(edges: Any) -> Any:
        return {"m": edges.src["h"] * edges.data["w"]}

    def reduce(nodes: Any) -> Any:
        return {"out": nodes.mailbox["m"].amax(1)}

    def apply(nodes: Any) -> Any:
        return {"applied": nodes.data["out"] + nodes.data["w"]}

    for arguments in ((message, theirs), (ours, reduce), (message, reduce), (ours, theirs, apply)):
        assert_same_features(graph, lambda g, a=arguments: g.update_all(*a))


@pytest.mark.parametrize(
    "run",
    [
        lambda g: g.update_all(fn.copy_u("h", "m"), fn.sum("other", "out")),
        lambda g: g.update_all(fn.copy_u("none", "m"), fn.sum("m", "out")),
        lambda g: g.update_all(fn.u_mul_e("h", "none", "m"), fn.sum("m", "out")),
        lambda g: g.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"), etype="none"),
        lambda g: g.apply_edges(fn.u_add_v("h", "none", "out")),
        lambda g: g.apply_edges(fn.copy_u("h", "out"), etype="none"),
        lambda g: g.apply_edges(fn.BinaryMessageFunction("pow", 0, 1, "h", "h", "out")),
        lambda g: g.dstdata.update({"h": torch.ones(77, 2)}),
        lambda g: g.edata.update({"h": torch.ones(77, 2)}),
        lambda g: g.srcdata.update({"h": torch.ones(g.num_src_nodes(), 2, device="meta")}),
        lambda g: g.edata.update({"h": torch.ones(g.num_edges(), 2, device="meta")}),
        lambda g: g.srcdata.update({"h": [1.0] * g.num_src_nodes()}),
        lambda g: g.edata.update({"h": torch.tensor(1.0)}),
    ],
)
@GRAPHS
def test_errors(graph, run):
    assert_same_error(graph, run)


@GRAPHS
@pytest.mark.parametrize(
    "function",
    [
        fn.copy_u("h", "out"),
        fn.copy_e("h", "out"),
        fn.u_add_v("h", "w", "out"),
        fn.v_div_e("h", "w", "h"),
        fn.e_dot_u("h", "h", "out"),
        lambda edges: {"out": edges.src["h"] - edges.dst["w"]},
    ],
)
def test_apply_edges(graph, function):
    assert_same_features(graph, lambda g: g.apply_edges(function))
    some = torch.tensor([0, 3])
    assert_same_features(graph, lambda g: g.apply_edges(function, edges=some))
    assert_same_features(graph, lambda g: g.apply_edges(function, etype=g.canonical_etypes[0]))


@GRAPHS
def test_rows_of_features_are_set(graph):
    rows = torch.tensor([1, 2])

    def change(g: dgl.DGLGraph) -> None:
        g._set_n_repr(len(g._node_frames) - 1, rows, {"h": torch.full((2, 2), 7.0)})
        g._set_e_repr(0, rows, {"h": torch.full((2, 2), 7.0)})

    assert_same_features(graph, change)


def test_a_local_scope_keeps_what_was_there():
    with tensor_backed_graphs():
        whole = filled(homogeneous)
        part = whole.subgraph([1, 2, 3])  # whose features are taken of the whole's when looked at
        part.ndata["later"] = LazyFeature("later")
        column = part._node_frames[0]._columns["h"]
        assert column.index is not None
        with part.local_scope():
            assert part._node_frames[0]._columns["later"].name == "later"
            assert torch.equal(part.ndata["h"], whole.ndata["h"][[1, 2, 3]])
            part.ndata["h"] = torch.zeros(3, 9)
            part.ndata["new"] = torch.zeros(3)
            part.edata["new"] = torch.zeros(part.num_edges())
            del part.ndata["w"]
        assert part._node_frames[0]._columns["h"] is column and column.index is not None
        assert set(part.ndata) == {"h", "w", "later", dgl.NID} and "new" not in part.edata
        assert torch.equal(part.ndata["h"], whole.ndata["h"][[1, 2, 3]])


def test_a_copied_column_has_what_is_to_be_done_and_is_not_pinned():
    column = Column(torch.arange(6.0).view(3, 2)).to(torch.device("cpu"))
    column.index, column.deferred_dtype, column.pinned_by_dgl = torch.tensor([2]), torch.half, True
    copy = column.clone()
    assert type(copy) is Column and not copy.pinned_by_dgl and copy._data_nd is None
    assert copy.storage is column.storage and copy.index is column.index
    assert copy.data.dtype == torch.half and copy.data.tolist() == [[4.0, 5.0]]
    assert column.index is not None and column.device is not None  # still to be done


SUMS = {
    "copy_u_mean": lambda g, u, e: dgl.ops.copy_u_mean(g, u),
    "u_mul_e_sum": lambda g, u, e: dgl.ops.u_mul_e_sum(g, u, e),
    "u_add_v": lambda g, u, e: dgl.ops.u_add_v(g, u, u),
    "u_dot_v": lambda g, u, e: dgl.ops.u_dot_v(g, u, u),
}


@pytest.mark.parametrize("name", ["u_mul_e_sum", "u_add_v", "u_dot_v"])
def test_gradients_of_gradients(name):
    with tensor_backed_graphs():
        g = homogeneous()
    u = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    e = torch.randn(5, 1, dtype=torch.float64, requires_grad=True)
    inputs = (u, e) if name == "u_mul_e_sum" else (u,)
    assert torch.autograd.gradgradcheck(lambda u, e=e: SUMS[name](g, u, e), inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("name", SUMS)
def test_forward_derivatives_and_transforms_are_refused_not_lost(name):
    with tensor_backed_graphs():
        g = homogeneous()
    u, e = torch.randn(5, 3), torch.randn(5, 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(u, torch.ones_like(u))
        with pytest.raises(NotImplementedError, match="forward"):
            SUMS[name](g, dual, e)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: SUMS[name](g, x, e).sum())(u)
