"""Message passing on graphs made of tensors, against DGL's C++ on the same inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl import _sparse_ops

from dgl_mgpu.graph import relation
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.originals import originals

BINARY = ("add", "sub", "mul", "div")
PLACES = ("cpu", "cuda")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """Where graphs made of tensors are: on the CPU everywhere, on a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@contextmanager
def tensors(place: str) -> Iterator[None]:
    with tensor_backed_graphs() if place == "cpu" else nullcontext():
        yield


def random_edges(num_src: int, num_dst: int, count: int, idtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(count)
    hub = torch.zeros(count // 4, dtype=torch.int64)
    src = torch.randint(0, num_src, (count,), generator=generator)
    dst = torch.randint(1, max(num_dst - 2, 2), (count,), generator=generator)
    dst[: hub.numel()] = hub
    return src.to(idtype), dst.to(idtype)


def homogeneous(device: str, idtype: torch.dtype, count: int = 200) -> dgl.DGLGraph:
    src, dst = random_edges(30, 30, count, idtype)
    return dgl.graph((src.to(device), dst.to(device)), num_nodes=30)


def bipartite(device: str, idtype: torch.dtype, count: int = 200) -> dgl.DGLGraph:
    src, dst = random_edges(20, 35, count, idtype)
    edges = {("a", "to", "b"): (src.to(device), dst.to(device))}
    return dgl.heterograph(edges, num_nodes_dict={"a": 20, "b": 35})


def heterogeneous(device: str, idtype: torch.dtype) -> dgl.DGLGraph:
    def edges(num_src: int, num_dst: int, count: int) -> Any:
        return tuple(end.to(device) for end in random_edges(num_src, num_dst, count, idtype))

    return dgl.heterograph(
        {
            ("user", "follows", "user"): edges(12, 12, 50),
            ("user", "likes", "item"): edges(12, 9, 40),
            ("user", "buys", "item"): edges(12, 9, 30),
            ("item", "rates", "user"): edges(9, 12, 20),
        },
        num_nodes_dict={"user": 12, "item": 9},
    )


def features(rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand((rows, *shape), dtype=torch.float64, generator=generator) + 0.5
    signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    return (values * signs).to(dtype)


def compare(run: Callable[[str], list[torch.Tensor]], place: str, tolerance: float) -> None:
    """`run` on DGL's C++ and on graphs made of tensors gives the same values and gradients."""
    expected = run("cpu")
    with tensors(place):
        found = run(place)
    assert len(expected) == len(found)
    for want, have in zip(expected, found, strict=True):
        torch.testing.assert_close(
            have.cpu().double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )


SHAPES = (
    ((), ()),
    ((8,), (8,)),
    ((5,), (1,)),
    ((4, 3), (4, 1)),
    ((4, 1), (3,)),
    ((2, 3), (2, 3)),
)


@pytest.mark.parametrize("graph", [homogeneous, bipartite])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_copies_are_reduced(graph, idtype, reduce, place):
    def run(device: str) -> list[torch.Tensor]:
        g = graph(device, idtype)
        assert isinstance(g._graph, TensorIndex) == (device != "cpu" or inside())
        results = []
        for shape in ((), (7,), (2, 3)):
            u = features(g.num_src_nodes(), shape, torch.float64, 1).to(device).requires_grad_()
            e = features(g.num_edges(), shape, torch.float64, 2).to(device).requires_grad_()
            with g.local_scope():
                g.srcdata["h"] = u
                g.edata["w"] = e
                g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
                g.update_all(fn.copy_e("w", "m"), getattr(fn, reduce)("m", "out_e"))
                outs = [g.dstdata["out"], g.dstdata["out_e"]]
            results += outs
            results += torch.autograd.grad(sum((o * o).sum() for o in outs), [u, e])
        return results

    compare(run, place, 1e-9)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_messages_of_nodes_and_edges(op, reduce, idtype, place):
    def run(device: str) -> list[torch.Tensor]:
        g = bipartite(device, idtype)
        results = []
        for u_shape, e_shape in SHAPES:
            u = features(g.num_src_nodes(), u_shape, torch.float64, 3).to(device).requires_grad_()
            e = features(g.num_edges(), e_shape, torch.float64, 4).to(device).requires_grad_()
            out = getattr(dgl.ops, f"u_{op}_e_{reduce}")(g, u, e)
            finite = torch.where(out.isinf(), torch.zeros_like(out), out)
            gradients: list[torch.Tensor] = []
            if reduce == "sum" or u_shape == e_shape:  # DGL's gradient of a broadcast max is wrong
                gradients = list(torch.autograd.grad((finite * finite).sum(), [u, e]))
            results += [out.detach(), *gradients]
        return results

    compare(run, place, 1e-9)


@pytest.mark.parametrize("op", [*BINARY, "dot"])
@pytest.mark.parametrize("lhs, rhs", list(itertools.permutations("uev", 2)))
def test_features_of_edges(op, lhs, rhs, place):
    def run(device: str) -> list[torch.Tensor]:
        g = bipartite(device, torch.int64)
        rows = {"u": g.num_src_nodes(), "e": g.num_edges(), "v": g.num_dst_nodes()}
        results = []
        for lhs_shape, rhs_shape in SHAPES:
            if op == "dot" and (lhs_shape[-1:] != rhs_shape[-1:]):
                continue
            x = features(rows[lhs], lhs_shape, torch.float64, 5).to(device).requires_grad_()
            y = features(rows[rhs], rhs_shape, torch.float64, 6).to(device).requires_grad_()
            out = getattr(dgl.ops, f"{lhs}_{op}_{rhs}")(g, x, y)
            results += [out.detach(), *torch.autograd.grad((out * out).sum(), [x, y])]
        return results

    compare(run, place, 1e-9)


@pytest.mark.parametrize("graph", [homogeneous, bipartite])
@pytest.mark.parametrize("kept", ["csc", "csr"])
def test_sums_over_a_graph_of_one_format_make_no_other(graph, kept, place, monkeypatch):
    def run(device: str) -> list[torch.Tensor]:
        g = graph(device, torch.int64)
        on_tensors = isinstance(g._graph, TensorIndex)
        if on_tensors:  # DGL's C++ refuses some of these
            g = g.formats([kept])
            monkeypatch.setattr(relation, "compress", no_other_format)
        results = []
        for u_shape, e_shape in (((), ()), ((5,), (1,)), ((4, 3), (4, 1))):
            u = features(g.num_src_nodes(), u_shape, torch.float64, 3).to(device).requires_grad_()
            e = features(g.num_edges(), e_shape, torch.float64, 4).to(device)
            sums = [(fn.copy_u("h", "m"), fn.sum), (fn.u_mul_e("h", "w", "m"), fn.sum)]
            if kept == "csc":  # the other does not tell in-degrees
                sums.append((fn.copy_u("h", "m"), fn.mean))
            for message, reduce in sums:
                with g.local_scope():
                    g.srcdata["h"], g.edata["w"] = u, e
                    g.update_all(message, reduce("m", "out"))
                    out = g.dstdata["out"]
                results += [out.detach(), *torch.autograd.grad((out * out).sum(), [u])]
            with g.local_scope():
                g.edata["w"] = e
                g.update_all(fn.copy_e("w", "m"), fn.sum("m", "out"))
                results.append(g.dstdata["out"])
        assert not on_tensors or g.formats()["created"] == [kept]
        return results

    def no_other_format(*arguments: object) -> None:
        raise AssertionError("a format was made")

    compare(run, place, 1e-9)


def test_deterministic_sums_over_a_graph_of_one_format(place):
    def run(device: str) -> list[torch.Tensor]:
        g = homogeneous(device, torch.int64)
        if isinstance(g._graph, TensorIndex):
            g = g.formats(["csr"])
        u = features(30, (4,), torch.float64, 3).to(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            first, second = (dgl.ops.copy_u_sum(g, u) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(first, second)
        return [first]

    compare(run, place, 1e-9)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_sums_and_means_of_neighbours_have_all_gradients(reduce, shape, place):
    with tensors(place):
        g = bipartite(place, torch.int64, 60)
        u = features(g.num_src_nodes(), shape, torch.float64, 8).to(place).requires_grad_()
        aggregate = getattr(dgl.ops, f"copy_u_{reduce}")
        assert torch.autograd.gradcheck(lambda x: aggregate(g, x), (u,))
        # Linear, so that a gradient of the gradient needs a function of it.
        assert torch.autograd.gradgradcheck(lambda x: aggregate(g, x**2), (u,))


@pytest.mark.parametrize("kept", [["coo", "csr"], ["coo", "csc"]])
def test_a_mean_without_the_format_for_it(kept, place):
    def run(device: str) -> list[torch.Tensor]:
        g = homogeneous(device, torch.int64)
        if isinstance(g._graph, TensorIndex):
            g.create_formats_()
            g = g.formats(kept)
        u = features(30, (4, 2), torch.float64, 3).to(device).requires_grad_()
        out = dgl.ops.copy_u_mean(g, u)
        return [out.detach(), *torch.autograd.grad((out * out).sum(), [u])]

    compare(run, place, 1e-12)


def test_a_mean_of_more_than_half_types_count_to(place):
    with tensors(place):
        count = 70_000
        src = torch.arange(count, device=place) % 2
        g = dgl.heterograph({("a", "to", "b"): (src, torch.zeros_like(src))})
        u = torch.tensor([[1.0], [3.0]], dtype=torch.float16, device=place, requires_grad=True)
        mean = dgl.ops.copy_u_mean(g, u)
        assert mean.tolist() == [[2.0]]
        mean.sum().backward()
        torch.testing.assert_close(u.grad, torch.full_like(u, 0.5), rtol=5e-3, atol=0)


@pytest.mark.parametrize("target", ["u", "v"])
def test_copies_to_edges(target, place):
    def run(device: str) -> list[torch.Tensor]:
        g = bipartite(device, torch.int32)
        rows = g.num_src_nodes() if target == "u" else g.num_dst_nodes()
        x = features(rows, (3, 2), torch.float64, 7).to(device).requires_grad_()
        out = getattr(dgl.ops, f"copy_{target}")(g, x)
        return [out.detach(), *torch.autograd.grad((out * out).sum(), [x])]

    compare(run, place, 1e-12)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("part", [False, True])
def test_edge_softmax(norm_by, part, place):
    def run(device: str) -> list[torch.Tensor]:
        g = homogeneous(device, torch.int64)
        eids = torch.arange(0, g.num_edges(), 3, device=device) if part else dgl.base.ALL
        rows = g.num_edges() if not part else len(eids)
        results = []
        for shape in ((), (1,), (4,), (4, 1)):
            scores = features(rows, shape, torch.float64, 8).to(device).requires_grad_()
            weights = features(rows, shape, torch.float64, 9).to(device)
            out = dgl.ops.edge_softmax(g, scores, eids, norm_by)
            (first,) = torch.autograd.grad((out * weights).sum(), [scores], create_graph=True)
            results += [out.detach(), first.detach()]
        return results

    compare(run, place, 1e-9)


def test_edge_softmax_has_a_second_gradient(place):
    with tensors(place):
        g = homogeneous(place, torch.int64, 40)
        scores = features(40, (2,), torch.float64, 8).to(place).requires_grad_()
        assert torch.autograd.gradgradcheck(lambda x: dgl.ops.edge_softmax(g, x), (scores,))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_types(dtype, tolerance, place):
    with tensors(place):
        g = bipartite(place, torch.int64)
        u = features(g.num_src_nodes(), (6,), dtype, 3).to(place)
        e = features(g.num_edges(), (1,), dtype, 4).to(place)
        found = dgl.ops.u_mul_e_sum(g, u, e)
        exact = dgl.ops.u_mul_e_sum(g, u.double(), e.double())
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
        )


@pytest.mark.parametrize("cross", ["sum", "max", "min", "mean", "stack"])
@pytest.mark.parametrize("reduce", ["sum", "max", "mean"])
def test_several_relations(cross, reduce, place):
    def run(device: str) -> list[torch.Tensor]:
        g = heterogeneous(device, torch.int64)
        h = {
            ntype: features(g.num_nodes(ntype), (4,), torch.float64, 10).to(device).requires_grad_()
            for ntype in g.ntypes
        }
        g.ndata["h"] = h
        passes = (fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
        g.multi_update_all(dict.fromkeys(g.canonical_etypes, passes), cross)
        outs = [g.nodes[ntype].data["out"] for ntype in g.ntypes]
        return outs + list(torch.autograd.grad(sum((o * o).sum() for o in outs), list(h.values())))

    compare(run, place, 1e-9)


def without_edges(device: str) -> dgl.DGLGraph:
    """Of two relations to one type, one has no edges."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    src, dst = torch.tensor([[0, 1], [1, 2]], device=device)
    g = dgl.heterograph(
        {("a", "t", "a"): (src, dst), ("b", "s", "a"): (none, none)}, {"a": 3, "b": 2}
    )
    for ntype in g.ntypes:
        g.nodes[ntype].data["h"] = torch.ones(g.num_nodes(ntype), 2, device=device)
    return g


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_highest_of_no_edges_at_all_is_0(reduce, place):
    def run(device: str) -> list[torch.Tensor]:
        g = without_edges(device)
        passes = (fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
        outs = []
        for order in (("t", "s"), ("s", "t")):
            for cross in ("sum", "mean", "max", "min", "stack"):
                g.multi_update_all({etype: passes for etype in order}, cross)
                outs.append(g.nodes["a"].data.pop("out"))
        none, h = g["s"], g.nodes["b"].data["h"]
        outs.append(getattr(dgl.ops, f"copy_u_{reduce}")(none, h))
        outs.append(getattr(dgl.ops, f"copy_e_{reduce}")(none, h[:0]))
        outs.append(getattr(dgl.ops, f"u_mul_e_{reduce}")(none, h, h[:0]))
        line = dgl.graph(tuple(torch.tensor([[0, 1], [1, 2]], device=device)), num_nodes=5)
        line.ndata["h"] = torch.ones(5, 2, device=device)
        line.pull(torch.tensor([3, 4], device=device), *passes)
        outs.append(line.ndata["out"])
        return outs

    compare(run, place, 0.0)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_no_edges_have_no_gradient(reduce, place):
    # DGL's is that of the first row, which has nothing to do with it, or an IndexError.
    with tensors(place):
        none = without_edges(place)["s"]
        h = torch.ones(2, 2, device=place, requires_grad=True)
        w = torch.ones(0, 2, device=place, requires_grad=True)
        for name, operands in (("copy_u", (h,)), ("copy_e", (w,)), ("u_mul_e", (h, w))):
            found = getattr(dgl.ops, f"{name}_{reduce}")(none, *operands)
            for gradient in torch.autograd.grad(found.sum(), operands):
                assert not gradient.any()


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
@pytest.mark.parametrize("message", ["copy_u", "copy_e"])
def test_all_relations_at_once(message, reduce, place):
    def run(device: str) -> list[torch.Tensor]:
        g = heterogeneous(device, torch.int64)
        rows = (
            {t: g.num_nodes(t) for t in g.ntypes}
            if message == "copy_u"
            else {t: g.num_edges(t) for t in g.canonical_etypes}
        )
        x = {
            key: features(count, (4,), torch.float64, 10 + i).to(device).requires_grad_()
            for i, (key, count) in enumerate(rows.items())
        }
        if message == "copy_u":
            g.ndata["h"] = x
        else:
            g.edata["h"] = x
        g.update_all(getattr(fn, message)("h", "m"), getattr(fn, reduce)("m", "out"))
        outs = [g.nodes[ntype].data["out"] for ntype in g.ntypes]
        outs = [torch.where(o.isinf(), torch.zeros_like(o), o) for o in outs]
        gradients = torch.autograd.grad(sum((o * o).sum() for o in outs), list(x.values()))
        return [o.detach() for o in outs] + list(gradients)

    compare(run, place, 1e-9)


def test_apply_edges_over_relations(place):
    def run(device: str) -> list[torch.Tensor]:
        g = heterogeneous(device, torch.int64)
        g.ndata["h"] = {
            t: features(g.num_nodes(t), (4,), torch.float64, 11).to(device) for t in g.ntypes
        }
        g.apply_edges(fn.u_dot_v("h", "h", "s"))
        scores = {t: g.edges[t].data["s"] for t in g.canonical_etypes}
        softmax = dgl.ops.edge_softmax(g, scores)
        return [*scores.values(), *(softmax[t] for t in g.canonical_etypes)]

    compare(run, place, 1e-9)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax_over_relations(norm_by, place):
    """Edges of all relations with one end are normalised together."""

    def run(device: str) -> list[torch.Tensor]:
        g = heterogeneous(device, torch.int64)
        scores = {
            t: features(g.num_edges(t), (3, 1), torch.float64, 12 + i).to(device).requires_grad_()
            for i, t in enumerate(g.canonical_etypes)
        }
        softmax = dgl.ops.edge_softmax(g, scores, norm_by=norm_by)
        out = [softmax[t] for t in g.canonical_etypes]
        gradients = torch.autograd.grad(sum((o * o).sum() for o in out), list(scores.values()))
        return [*(o.detach() for o in out), *gradients]

    compare(run, place, 1e-9)


def test_a_graph_without_edges(place):
    with tensors(place):
        empty = torch.empty(0, dtype=torch.int64, device=place)
        g = dgl.graph((empty, empty), num_nodes=5)
        x = torch.ones(5, 3, device=place)
        assert torch.equal(dgl.ops.copy_u_sum(g, x), torch.zeros(5, 3, device=place))
        g.ndata["h"] = x
        g.update_all(fn.copy_u("h", "m"), fn.max("m", "out"))
        assert torch.equal(g.ndata["out"], torch.zeros(5, 3, device=place))
        assert dgl.ops.u_add_v(g, x, x).shape == (0, 3)
        assert dgl.ops.edge_softmax(g, torch.empty(0, 2, device=place)).shape == (0, 2)


@pytest.mark.parametrize("op, reduce", [("copy_lhs", "sum"), ("mul", "sum"), ("add", "max")])
def test_c_functions_write_what_operators_return(op, reduce, place):
    """DGL's own Python, which calls the C functions that ours goes round."""
    with tensors(place):
        g = bipartite(place, torch.int64)
        u = features(g.num_src_nodes(), (4,), torch.float64, 3).to(place)
        e = None if op == "copy_lhs" else features(g.num_edges(), (4,), torch.float64, 4).to(place)
        arguments = g._graph, op, reduce, u, e
        written = originals["dgl._sparse_ops:_gspmm"](*arguments)
        returned = _sparse_ops._gspmm(*arguments)
        for have, want in zip((written[0], *written[1]), (returned[0], *returned[1]), strict=True):
            assert (have is None) == (want is None)
            if want is not None:
                assert torch.equal(have, want)


def test_c_functions_of_edge_softmax(place):
    with tensors(place):
        g = homogeneous(place, torch.int64)
        scores = features(200, (3,), torch.float64, 5).to(place).requires_grad_()
        weights = features(200, (3,), torch.float64, 6).to(place)
        out = dgl.ops.edge_softmax(g, scores)
        (gradient,) = torch.autograd.grad((out * weights).sum(), [scores])
        written = _sparse_ops._edge_softmax_forward(g._graph, scores.detach(), "copy_rhs")
        backward = _sparse_ops._edge_softmax_backward(g._graph, written, written * weights)
        torch.testing.assert_close(written, out.detach())
        torch.testing.assert_close(backward, gradient)


def test_different_dtypes_are_refused(place):
    with tensors(place):
        g = homogeneous(place, torch.int64)
        u, e = torch.ones(30, 2, device=place), torch.ones(200, 2, device=place).double()
        with pytest.raises(dgl.DGLError, match="don't match"):
            dgl.ops.u_mul_e_sum(g, u, e)
        with pytest.raises(dgl.DGLError, match="don't match"):
            dgl.ops.u_mul_e(g, u, e)


def inside() -> bool:
    from dgl_mgpu.graph import dispatch as ours

    return ours.is_passed_as_tensor(torch.zeros(0))
