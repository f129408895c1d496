"""Partitioned tensors and graphs that look whole, against torch and DGL on whole ones."""

from __future__ import annotations

import copy

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dgl_mgpu.distributed.whole_view.graph import partition
from dgl_mgpu.distributed.whole_view.layout import RowLayout
from dgl_mgpu.distributed.whole_view.tensor import PartitionedTensor, align
from dgl_mgpu.errors import (
    IdOutOfRangeError,
    InvalidInputError,
    PartitionedRowsError,
)
from tests.distributed.both import random_rows, same, uneven
from tests.distributed.graphs import homogeneous
from tests.distributed.test_modules import _MODULES, _TRAINING

_SIZE = 23


def _layout(size: int = _SIZE, idle: bool = False) -> RowLayout:
    """Rows dealt out at random; the last rank has none if it is idle."""
    rank, ranks = dist.get_rank(), dist.get_world_size() - idle
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    mine = order[rank::ranks] if rank < ranks else order[:0]
    return RowLayout(size, mine)


def _whole(value):
    if isinstance(value, PartitionedTensor):
        return value.full_tensor()
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return value


def _numbers(value):
    return [x for item in value for x in _numbers(item)] if isinstance(value, list) else [value]


#: Of rows `x` (float), `i` (classes), `m` (bool), with weights `w` and `b`, all rows' numbers `s`.
_FUNCTIONS = {
    "linear": lambda x, i, m, w, b, s: F.linear(x, w, b),
    "matmul": lambda x, i, m, w, b, s: x @ w.t() + b,
    "bmm": lambda x, i, m, w, b, s: torch.bmm(x.unsqueeze(1), x.unsqueeze(2)).squeeze(2),
    "weights of all rows": lambda x, i, m, w, b, s: x * s.unsqueeze(1) + s.view(-1, 1),
    "broadcast": lambda x, i, m, w, b, s: (1 - x) * w[:1] / 2,
    "einsum": lambda x, i, m, w, b, s: torch.einsum("nk,ck->nc", x, w),
    "activations": lambda x, i, m, w, b, s: F.elu(F.leaky_relu(x, 0.2)) + F.gelu(x).sigmoid(),
    "softmax": lambda x, i, m, w, b, s: F.softmax(x, 1) + x.log_softmax(-1),
    "softmax of a column": lambda x, i, m, w, b, s: torch.softmax(x, 0),
    "layer norm": lambda x, i, m, w, b, s: F.layer_norm(x, (4,), w[0], w[1]),
    "normalize": lambda x, i, m, w, b, s: F.normalize(x, dim=1),
    "norm": lambda x, i, m, w, b, s: [x.norm(), x.norm(dim=1), torch.linalg.norm(x)],
    "sum": lambda x, i, m, w, b, s: [x.sum(), x.sum(0), x.sum(1), x.sum(-1, keepdim=True)],
    "mean": lambda x, i, m, w, b, s: [x.mean(), x.mean(0, keepdim=True), x.mean(dim=1)],
    "variance": lambda x, i, m, w, b, s: [x.var(), x.std(), x.var(0), x.std(1)],
    "extremes": lambda x, i, m, w, b, s: [x.max(), x.max(1)[0], x.amin(0), x.max(0).values],
    "extremes of integers": lambda x, i, m, w, b, s: [i.max(), i.min(), i.amax(0)],
    "truth": lambda x, i, m, w, b, s: [m.any(), m.all(), (x > 0).any(1), (x < 9).all(), m.sum()],
    "argmax": lambda x, i, m, w, b, s: [x.argmax(1), x.argmax(), (x.argmax(1) == i).sum()],
    "top": lambda x, i, m, w, b, s: [*x.topk(2, 1), *x[:, 0].sort(), *x[:, 0].topk(3)],
    "unique": lambda x, i, m, w, b, s: [i.unique(), i.bincount(minlength=9), m.nonzero()],
    "columns": lambda x, i, m, w, b, s: [x[:, 1], x[:, 1:3], x[..., 0], x[:, [2, 0]], x[:]],
    "mask": lambda x, i, m, w, b, s: [x[m], x[m][:, 0], x[m & (i > 1)], i[~m]],
    "mask of all rows": lambda x, i, m, w, b, s: [x[s > 0.5], s[m], s.view(-1, 1)[i > 1]],
    "ids": lambda x, i, m, w, b, s: [x[torch.tensor([5, -1, 5])], x[[0, 3]], x[7], x[2:9:3]],
    "partitioned ids": lambda x, i, m, w, b, s: [x[i], s[i], w[i % 3], F.embedding(i % 3, w)],
    "ids of masks": lambda x, i, m, w, b, s: x[m][torch.nonzero(i[m] > 1).squeeze(1)],
    "permuted": lambda x, i, m, w, b, s: x + x[torch.arange(22, -1, -1)],
    "a column of each": lambda x, i, m, w, b, s: [
        x[torch.arange(23), i % 4], x.gather(1, (i % 4).unsqueeze(1)), x[m, i[m] % 4],
    ],
    "index_select": lambda x, i, m, w, b, s: x.index_select(0, torch.tensor([1, 1, 4])),
    "shapes": lambda x, i, m, w, b, s: [
        x.view(-1, 2, 2), x.reshape(23, 2, -1).flatten(1), x.view(23, 2, 2).transpose(1, 2),
        x.unsqueeze(1).expand(-1, 3, -1), x.repeat(1, 2), x.unsqueeze(-1).squeeze(-1),
        x.view(23, 2, 2).permute(0, 2, 1).mean(1), x[:, 0].view(-1, 1), x.split(2, 1), x.unbind(1),
    ],
    "shapes of others": lambda x, i, m, w, b, s: [
        s.view(-1, 1).expand_as(x) + w[:1].expand_as(x), x[:, 0].view_as(s), s.view_as(x[:, 0]),
        x[:, 0][..., None], F.cosine_similarity(x, 2 * x + 1), F.pairwise_distance(x, x * x),
    ],
    "blocks": lambda x, i, m, w, b, s: (x.view(-1, 2) @ w[:2, :2]).view(-1, 4),
    "cat": lambda x, i, m, w, b, s: [torch.cat([x, 2 * x], 1), torch.cat([x, w, x[m]])],
    "stack": lambda x, i, m, w, b, s: [
        torch.stack([x, x + 1], 1), torch.stack([x, 2 * x]).mean(0), torch.stack([x, -x])[1],
        torch.stack([x, 2 * x], -1).sum(-1), torch.stack([x, 2 * x]).max(0)[0],
    ],
    "pad": lambda x, i, m, w, b, s: F.pad(x, (0, 2)),
    "where": lambda x, i, m, w, b, s: [torch.where(m.unsqueeze(1), x, 0.0), torch.where(m)[0]],
    "one hot": lambda x, i, m, w, b, s: F.one_hot(i),
    "written": lambda x, i, m, w, b, s: _written(x, i, m, s),
    "cross entropy": lambda x, i, m, w, b, s: [
        F.cross_entropy(x[m], i[m] % 4), F.cross_entropy(x, i % 4, reduction="sum"),
        F.cross_entropy(x, i % 4, w[0].detach().abs(), ignore_index=2, label_smoothing=0.1),
        F.cross_entropy(x, i % 4, reduction="none"), F.cross_entropy(x, x.detach().softmax(1)),
    ],
    "cross entropy of all rows' labels": lambda x, i, m, w, b, s: F.cross_entropy(
        x[m], (s > 0.5).long()[_whole(m)]
    ),
    "losses": lambda x, i, m, w, b, s: [
        F.nll_loss(x.log_softmax(1), i % 4), F.mse_loss(x[:, 0], s), F.l1_loss(x, 2 * x + 1),
        F.binary_cross_entropy_with_logits(x[:, 0][m], (i[m] > 1).to(x.dtype)),
        F.binary_cross_entropy(x[:, 0].sigmoid(), m.to(x.dtype), s.detach()),
        F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"),
    ],
    "batch norm": lambda x, i, m, w, b, s: F.batch_norm(x, None, None, w[0], w[1], True),
    "batch norm in evaluation": lambda x, i, m, w, b, s: F.batch_norm(
        x, w[0].detach(), w[1].detach() ** 2, w[2]
    ),
    "leaving": lambda x, i, m, w, b, s: [
        torch.tensor(i.tolist()), torch.from_numpy(np.asarray(x.detach())), len(x), x.shape[0],
        torch.from_numpy(x.detach().cpu().numpy()), x.mean().item(), float(x.sum()), str(i),
        sum(row[0] for row in x), copy.deepcopy(i), x.dtype, x.device, x.dim(), x.numel(),
    ],
}  # fmt: skip


def _written(x, i, m, s):
    y = x.clone()
    y[m] = 0.5
    y[:, 1] = s
    y[torch.tensor([3, 4])] = torch.arange(8.0, dtype=x.dtype).view(2, 4)
    y[i == 1, 2] += 3
    y *= 2
    y.relu_()
    return y


def _function(name: str, idle: bool) -> None:
    layout = _layout(idle=idle)
    draw = torch.Generator().manual_seed(9)
    x = torch.randn(_SIZE, 4, generator=draw, dtype=torch.float64)
    i = torch.randint(5, (_SIZE,), generator=draw)
    m = torch.rand(_SIZE, generator=draw) < 0.4
    s = torch.rand(_SIZE, generator=draw, dtype=torch.float64)
    w = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    b = torch.randn(3, generator=draw, dtype=torch.float64)
    results = []
    for cut in (lambda rows: rows, lambda rows: PartitionedTensor(align(rows, layout), layout)):
        leaves = [it.clone().requires_grad_() for it in (x, w, b, s)]
        out = _FUNCTIONS[name](cut(leaves[0]), cut(i), cut(m), *leaves[1:])
        out = _numbers(_whole([out]))
        weighted = [
            (it * torch.linspace(1, 2, it.numel(), dtype=it.dtype).view(it.shape)).sum()
            for it in out
            if isinstance(it, torch.Tensor) and it.requires_grad
        ]
        grads = [None] * 4
        if weighted:
            grads = torch.autograd.grad(sum(weighted), leaves, allow_unused=True)
        results.append((out, grads))
    (expected, of_whole), (found, of_rows) = results
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert type(one) is torch.Tensor
            same(one.detach(), other.detach(), name)
        elif isinstance(other, float):
            assert one == pytest.approx(other, rel=1e-12)
        else:
            assert one == other
    for one, other in zip(of_rows, of_whole, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            same(one, other, (name, "gradients"))


@pytest.mark.parametrize("idle", [False, True], ids=["all", "one idle"])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_of_torch(ranks, name, idle):
    ranks.run(_function, name, idle)


_REFUSED = {
    "rows elsewhere": (lambda x: x.unsqueeze(0), "rows would not be"),
    "transposed": (lambda x: x.transpose(0, 1), "rows would not be"),
    "over rows": (lambda x: torch.ones(3, _SIZE) @ x, "rows would not be"),
    "other rows": (lambda x: x + torch.ones(7, 4), "same rows"),
    "an outer sum": (lambda x: x[:, 0] + torch.ones(5, _SIZE), "same rows"),
    "all numbers in one row": (lambda x: x.view(-1), None),
    "unknown": (lambda x: torch.fft.fft(x), "torch.fft.fft with rows of a partitioned graph"),
    "rows twice": (lambda x: x.repeat(2, 1), "would not stay"),
    "an output given": (lambda x: torch.add(x, 1, out=torch.ones(_SIZE, 4)), "torch.add"),
    "learned rows": (lambda x: torch.nn.Parameter(x), "requires_grad_"),
    "a gradient of its own": (lambda x: _Double.apply(x), "_Double"),
    "weights that change": (
        lambda x: F.embedding(x[:, 0].long(), torch.ones(9, 2), max_norm=1.0), "max_norm"
    ),
    "over all rows": (lambda x: F.cosine_similarity(x, x, dim=0), "along the rows"),
    "memory": (lambda x: x.data_ptr(), "data_ptr"),
}  # fmt: skip


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.aten.mul(x, 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _refused(name: str) -> None:
    from dgl_mgpu.distributed.whole_view import reductions, script  # noqa: F401

    before = torch.autograd.Function.__dict__.get("apply")
    script._refuse_autograd_functions()
    layout = _layout()
    x = PartitionedTensor(torch.rand(layout.count, 4), layout)
    function, words = _REFUSED[name]
    try:
        if words is None:
            assert function(x).shape == (4 * _SIZE,)
            return
        with pytest.raises(PartitionedRowsError, match=words):
            function(x)
    finally:
        if before is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = before


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_not_known_to_be_right_is_refused(ranks, name):
    ranks.run(_refused, name)


def _bad_input() -> None:
    layout = _layout()
    x = PartitionedTensor(torch.rand(layout.count, 4), layout)
    with pytest.raises(IdOutOfRangeError, match="23"):
        x[torch.tensor([1, _SIZE])]
    with pytest.raises(InvalidInputError, match="mask has 7"):
        x[torch.ones(7, dtype=torch.bool)]
    mine = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    with pytest.raises(InvalidInputError, match="different values of a parameter"):
        x[:, :2] * mine


def test_bad_input(ranks):
    ranks.run(_bad_input)


def _random() -> list[torch.Tensor]:
    layout = RowLayout(600, torch.arange(200) + 200 * dist.get_rank())
    x = PartitionedTensor(torch.ones(200, 50), layout)
    torch.manual_seed(3)
    first = F.dropout(x, 0.25)
    state = torch.get_rng_state()
    second = F.dropout(x, 0.25)
    torch.manual_seed(3)
    again = F.dropout(x, 0.25)
    assert torch.equal(first.local, again.local) and not torch.equal(first.local, second.local)
    assert F.dropout(x, 0.25, training=False) is x
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(1.0) * (1 / 0.75))}
    assert abs(float(first.mean()) - 1) < 0.02
    normal = torch.randn_like(x)
    assert abs(float(normal.mean())) < 0.03 and abs(float(normal.std()) - 1) < 0.03
    return [first.local, state]


def test_random_numbers_are_a_ranks_own_and_repeatable(ranks):
    answers = ranks.run(_random)
    assert not torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])  # what is not partitioned draws the same


def _rows_of(view, rows: torch.Tensor, layout: RowLayout) -> PartitionedTensor:
    return PartitionedTensor(align(rows, layout), layout)


def _modules(name: str, of_last: str) -> None:
    g, by = (dgl.add_self_loop(homogeneous()), "random") if not of_last else uneven(of_last)
    make, call = _MODULES[name]
    results = []
    for graph in (g, partition(g, torch.device("cpu"), by)):
        torch.manual_seed(4)
        model = make().double().train(name in _TRAINING)
        if of_last == "no edges":
            model._allow_zero_in_degree = True
        leaves = {
            "x": random_rows(g.num_nodes(), 5),
            "w": random_rows(g.num_edges()).abs() + 0.5,
            "z": random_rows(g.num_edges(), 5),
        }
        leaves = {key: rows.detach().clone().requires_grad_() for key, rows in leaves.items()}
        given = leaves
        if graph is not g:
            index = graph._graph
            nodes, edges = index.nodes[0], index.edge_rows[0]
            layouts = {"x": nodes, "w": edges, "z": edges}
            given = {k: _rows_of(graph, rows, layouts[k]) for k, rows in leaves.items()}
        torch.manual_seed(8)
        out = call(model, graph, given)
        assert out.shape[0] == g.num_nodes() and isinstance(out, PartitionedTensor) != (graph is g)
        out = _whole(out)
        factors = random_rows(*out.shape)
        wanted = [*leaves.values(), *model.parameters()]
        grads = torch.autograd.grad((out * factors).sum(), wanted, allow_unused=True)
        results.append((out.detach(), grads))
    (expected, of_whole), (found, of_view) = results
    same(found, expected, name)
    for one, other in zip(of_view, of_whole, strict=True):
        assert (one is None) == (other is None) or not (one if other is None else other).any()
        if one is not None and other is not None:
            same(one, other, (name, "gradients"))


#: It has the rows in other dimensions than the first on the way.
_REFUSED_MODULES = {"AtomicConv"}


@pytest.mark.parametrize("of_last", ["", "no nodes"])
@pytest.mark.parametrize("name", sorted(set(_MODULES) - _REFUSED_MODULES))
def test_dgl_modules(ranks, name, of_last):
    ranks.run(_modules, name, of_last)
