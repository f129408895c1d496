from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import dgl_mgpu

import dgl  # isort: skip  (the ranks' processes import nothing else before)
from dgl.nn import GraphConv  # isort: skip

from dgl_mgpu.errors import InvalidInputError, RankFailedError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.models.gcn import FullGraphGCN, passes
from dgl_mgpu.models.gcn.passes import drop_
from tests.distributed.graphs import homogeneous
from tests.ranks import RankProcesses

#: Shrinking, growing, growing by more than twice in between, of one width, a single layer.
WIDTHS = ((5, 4, 3, 2), (5, 6, 8), (5, 3, 8, 4), (5, 5, 5), (5, 2), (5, 9))
NORMS = ("both", "right", "left", "none")


class _Stack(torch.nn.Module):
    """What a user of DGL writes."""

    def __init__(self, widths: tuple[int, ...], norm: str = "both", bias: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            GraphConv(*ends, norm=norm, bias=bias, allow_zero_in_degree=True)
            for ends in pairwise(widths)
        )

    def forward(
        self,
        g: dgl.DGLGraph,
        x: torch.Tensor,
        between: Callable[[int, torch.Tensor], torch.Tensor] = lambda number, rows: rows,
    ) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number:
                x = between(number - 1, torch.relu(x))
            x = layer(g, x)
        return x


def _pair(
    widths: tuple[int, ...], norm: str = "both", bias: bool = True, **options: Any
) -> tuple[FullGraphGCN, _Stack]:
    """A GCN, and DGL's modules with the same parameters."""
    torch.manual_seed(1)
    stack = _Stack(widths, norm, bias).double()
    for parameter in stack.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    gcn = FullGraphGCN(widths, norm, bias=bias, allow_zero_in_degree=True, **options).double()
    gcn.load_state_dict(stack.state_dict())
    return gcn, stack


def _results(
    model: torch.nn.Module,
    g: dgl.DGLGraph,
    x: torch.Tensor,
    weights: torch.Tensor,
    *args: Any,
    of_input: bool = True,
) -> list[torch.Tensor]:
    """The output, the parameters' gradients, and the input's."""
    model.zero_grad()
    x = x.clone().requires_grad_(of_input)
    out = model(g, x, *args)
    (out * weights).sum().backward()
    found = [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return [*found, x.grad] if of_input else found


def _weights(g: dgl.DGLGraph, width: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(g.num_nodes(), width, generator=draw, dtype=torch.float64)


def _require_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_dgl_modules(
    widths: tuple[int, ...], norm: str, bias: bool
) -> None:
    g = homogeneous("isolated" if bias else "skewed")
    args = g, g.ndata["x"], _weights(g, widths[-1])
    _, stack = _pair(widths, norm, bias)
    wanted = {of_input: _results(stack, *args, of_input=of_input) for of_input in (False, True)}
    for options in ({}, {"keep_every": 2}, {"keep_every": 9}, {"keep_input_sums": True}):
        gcn, _ = _pair(widths, norm, bias, **options)
        for of_input, of_stack in wanted.items():
            _require_same(_results(gcn, *args, of_input=of_input), of_stack)
        with torch.no_grad():
            _require_same([gcn(g, g.ndata["x"])], of_stack[:1])


def test_graphs_of_tensors_give_the_same() -> None:
    gcn, stack = _pair((5, 7, 3))
    g = homogeneous("skewed")
    wanted = _results(stack, g, g.ndata["x"], _weights(g, 3))
    with tensor_backed_graphs():
        g = homogeneous("skewed")
        _require_same(_results(gcn, g, g.ndata["x"], _weights(g, 3)), wanted)


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
def test_a_partitioned_graph_of_one_rank_gives_the_same(exchange: str) -> None:
    gcn, stack = _pair((5, 7, 3))
    g = homogeneous("skewed")
    pg = dgl_mgpu.partition_graph(g, by="order", exchange=exchange)
    args = g.ndata["x"], _weights(g, 3)
    _require_same(_results(gcn, pg, *args), _results(stack, g, *args))


def test_graphs_without_edges_or_nodes() -> None:
    gcn, stack = _pair((5, 7, 3))
    for kind in ("no edges", "no sources", "one node"):
        g = homogeneous(kind if kind != "no sources" else "no edges")
        if kind == "no sources":
            g = dgl.graph(([], []), num_nodes=0)
            g.ndata["x"] = torch.empty(0, 5, dtype=torch.float64)
        args = g, g.ndata["x"], _weights(g, 3)
        _require_same(_results(gcn, *args), _results(stack, *args))


def test_parameters_are_those_of_dgl_modules() -> None:
    torch.manual_seed(4)
    stack = _Stack((5, 4, 3))
    torch.manual_seed(4)
    gcn = FullGraphGCN((5, 4, 3))
    assert gcn.state_dict().keys() == stack.state_dict().keys()
    for name, parameter in gcn.state_dict().items():
        assert torch.equal(parameter, stack.state_dict()[name])
    convolutions = [GraphConv(5, 4), GraphConv(4, 3)]
    gcn.layers.load_state_dict(torch.nn.ModuleList(convolutions).state_dict())
    assert torch.equal(gcn.layers[1].weight, convolutions[1].weight)


# -- input sums -----------------------------------------------------------------------------------


@contextmanager
def _counted_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Widths of the rows that are summed."""
    original, widths = passes._sums, []

    def counted(index: Any, rows: torch.Tensor) -> torch.Tensor:
        widths.append(rows.shape[1])
        return original(index, rows)

    with monkeypatch.context() as patch:
        patch.setattr(passes, "_sums", counted)
        yield widths


@pytest.mark.parametrize(
    ("widths", "options", "of_input", "expected"),
    [
        # Forward, then backward from the last layer to the first.
        ((8, 16, 4), {}, False, [8, 4, 4]),  # the first layer's sums stay
        ((8, 16, 4), {"keep_every": 2}, False, [8, 4, 8, 4, 8]),  # they are made again, as it is
        ((8, 9, 8), {}, False, [8, 8, 8, 8]),  # there is no room for them
        ((31, 16, 4), {}, False, [31, 4, 4]),  # wider ones, but once
        ((32, 16, 4), {}, False, [16, 4, 4, 16]),
        ((8, 16, 4), {}, True, [8, 4, 4, 16]),  # one for both gradients
        ((8, 17, 4), {}, True, [8, 4, 4, 8, 8]),  # two narrow ones cost less
        ((8, 4, 16), {}, False, [4, 4, 4, 4]),  # a hidden layer's sums stay, too
        (
            (8, 7, 8),
            {},
            False,
            [7, 7, 8, 7],
        ),  # there is no room: one sum of eight, not two of seven
        ((8, 3, 8, 8), {"keep_every": 2}, False, [3, 3, 8, 8, 3, 3, 3, 3]),
        ((8, 8, 8), {}, False, [8, 8, 8, 8]),
        ((8, 16, 4), {"keep_input_sums": True}, False, [8, 4, 4]),
        ((16, 8, 4), {"keep_input_sums": True}, False, [16, 4, 4]),
        ((16, 8, 4), {"keep_input_sums": True}, True, [8, 4, 4, 8]),
    ],
)
def test_sums_are_as_few_and_as_narrow_as_can_be(
    widths: tuple[int, ...],
    options: dict[str, bool],
    of_input: bool,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = homogeneous("skewed", width=widths[0])
    gcn, _ = _pair(widths, **options)
    with _counted_sums(monkeypatch) as found:
        _results(gcn, g, g.ndata["x"], _weights(g, widths[-1]), of_input=of_input)
    assert found == expected


def test_input_sums_are_kept_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    g, other = homogeneous("skewed"), dgl.add_self_loop(homogeneous("skewed"))
    gcn, stack = _pair((5, 4), keep_input_sums=True)
    x = g.ndata["x"]

    def sums() -> int:
        with _counted_sums(monkeypatch) as widths:
            found = gcn(g, x)
        torch.testing.assert_close(found, stack(g, x), rtol=1e-10, atol=1e-10)
        return len(widths)

    assert (sums(), sums()) == (1, 0)
    x.mul_(2)
    assert (sums(), sums()) == (1, 0)
    x = x + 1
    assert (sums(), sums()) == (1, 0)
    g = other
    assert (sums(), sums()) == (1, 0)
    for same in (copy.deepcopy(gcn), pickle.loads(pickle.dumps(gcn))):
        torch.testing.assert_close(same(g, x), gcn(g, x))


# -- dropout --------------------------------------------------------------------------------------


def test_dropout_is_of_elements_and_in_proportion() -> None:
    rows, nodes = torch.ones(300, 200, dtype=torch.float64), torch.arange(300) * 7
    drop_(rows, nodes, -5, 0.3)
    kept = rows > 0
    assert torch.allclose(rows[kept], torch.tensor(1 / 0.7, dtype=torch.float64))
    for share in (kept.double().mean(0), kept.double().mean(1)):
        # Each is a mean of 200 draws or more: 5 standard deviations.
        assert ((share - 0.7).abs() < 5 * (0.21 / 200) ** 0.5).all()
    # Independent rows agree in 0.58 of all elements, columns too.
    for one in (kept, kept.t()):
        same = (one[1:] == one[:-1]).double().mean()
        assert abs(same - 0.58) < 0.01
    again = torch.ones_like(rows)
    drop_(again, nodes, 5, 0.3)
    assert abs(((again > 0) == kept).double().mean() - 0.58) < 0.01
    some = torch.ones(10, 200, dtype=torch.float64)
    drop_(some, nodes[50:60], -5, 0.3)
    assert torch.equal(some, rows[50:60])


@pytest.mark.parametrize("keep_every", [1, 3])
def test_dropout_has_the_gradient_of_its_mask(keep_every: int) -> None:
    g = homogeneous("skewed")
    gcn, stack = _pair((5, 9, 6, 3), dropout=0.4, keep_every=keep_every)
    masks: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:

        def noting(rows: torch.Tensor, *args: Any) -> None:
            mask = torch.ones_like(rows)
            drop_(mask, *args)
            masks.append(mask)
            rows *= mask

        patch.setattr(passes, "drop_", noting)
        args = g, g.ndata["x"], _weights(g, 3)
        found = _results(gcn, *args)
    wanted = _results(stack, *args, lambda number, rows: rows * masks[number])
    _require_same(found, wanted)
    assert 0.2 < (masks[0] == 0).double().mean() < 0.6
    assert not torch.equal(masks[0][:, :6], masks[1])
    assert all(torch.equal(mask, masks[i % 2]) for i, mask in enumerate(masks))  # when made again


def test_dropout_follows_the_random_state_and_is_off_in_evaluation() -> None:
    g = homogeneous("skewed")
    gcn, stack = _pair((5, 9, 3), dropout=0.4)

    def out() -> torch.Tensor:
        return gcn(g, g.ndata["x"]).detach()

    torch.manual_seed(3)
    first, second = out(), out()
    torch.manual_seed(3)
    assert torch.equal(out(), first) and not torch.equal(first, second)
    gcn.eval()
    torch.testing.assert_close(out(), stack(g, g.ndata["x"]), rtol=1e-10, atol=1e-10)


# -- number formats -------------------------------------------------------------------------------


def test_half_activations_stay_close_to_exact_ones() -> None:
    with tensor_backed_graphs():
        g = homogeneous("skewed", torch.float32)
        exact, _ = _pair((5, 16, 3))
        args = g, g.ndata["x"].double(), _weights(g, 3)
        wanted = _results(exact, *args, of_input=True)
        half = FullGraphGCN((5, 16, 3), activation_dtype=torch.bfloat16, allow_zero_in_degree=True)
        half.load_state_dict(exact.state_dict())
        found = _results(half, g, g.ndata["x"], _weights(g, 3).float())
    assert {each.dtype for each in found} == {torch.float32}
    for one, other in zip(found, wanted, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert 0 < error < 0.02


def test_autocast_leaves_activations_alone() -> None:
    g = homogeneous("skewed")
    gcn, stack = _pair((5, 7, 3))
    args = g, g.ndata["x"], _weights(g, 3)
    wanted = _results(stack, *args)
    with torch.autocast("cpu", torch.bfloat16):
        _require_same(_results(gcn, *args), wanted)


# -- memory ---------------------------------------------------------------------------------------


class _Buffers(TorchDispatchMode):
    """How many tensors of so many bytes or more are there at a time, but for one.

    Attributes
    ----------
    most, most_bytes : int
        Of all of them together, the bytes.
    """

    def __init__(self, size: int, excepted: torch.Tensor) -> None:
        super().__init__()
        self._size = size
        self._excepted = excepted.untyped_storage()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if not isinstance(each, torch.Tensor):
                continue
            storage = each.untyped_storage()
            if storage.nbytes() >= self._size and storage._cdata != self._excepted._cdata:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.most = max(self.most, len(self._alive))
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._alive.values()))
        return found


def _loss(out: torch.Tensor) -> torch.Tensor:
    """It keeps its logarithms, as wide as the output, until the backward pass begins."""
    labels = torch.arange(len(out)) % out.shape[1]
    return torch.nn.functional.cross_entropy(out, labels)


def _most_buffers(
    make: Callable[[], torch.nn.Module],
    widths: tuple[int, ...],
    of_input: bool = False,
    training: bool = True,
) -> float:
    """Of the widest kind, of a forward and a backward pass and the loss between them, without the
    input."""
    with tensor_backed_graphs():
        torch.manual_seed(0)
        ends = torch.randint(500, (2, 4000))
        g = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=500))
        g.create_formats_()
    x = torch.randn(500, widths[0], requires_grad=of_input)
    model = make()
    asked = [*model.parameters(), x] if of_input else list(model.parameters())
    with torch.set_grad_enabled(training):
        model(g, x)  # what is found out once is no matter here
        with _Buffers(500 * min(widths) * 4, x) as buffers:
            if training:
                torch.autograd.grad(_loss(model(g, x)), asked)
            else:
                model(g, x)
    return buffers.most_bytes / (500 * max(widths) * 4)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_training_takes_two_buffers_more_than_layers(num_layers: int) -> None:
    growing = tuple(64 + 16 * number for number in range(num_layers + 1))
    for widths in ((64,) * (num_layers + 1), growing, growing[::-1]):
        most = _most_buffers(lambda widths=widths: FullGraphGCN(widths), widths)
        assert most <= num_layers + 2
        if num_layers > 1:
            stack = _most_buffers(lambda widths=widths: _Stack(widths), widths)
            spared = num_layers - 1  # half of it where sums of the input stay
            assert stack >= most + (spared if len(set(widths)) == 1 else spared / 2)
        dropping = _most_buffers(lambda widths=widths: FullGraphGCN(widths, dropout=0.5), widths)
        assert dropping <= num_layers + 2
        keeping = _most_buffers(
            lambda widths=widths: FullGraphGCN(widths, keep_input_sums=True), widths
        )
        assert keeping <= num_layers + 2  # what was made before is not counted
        assert (
            _most_buffers(lambda widths=widths: FullGraphGCN(widths), widths, True)
            <= num_layers + 2
        )


def test_recomputation_and_inference_take_fewer_buffers() -> None:
    widths = (64,) * 10
    assert _most_buffers(lambda: FullGraphGCN(widths), widths) == 9 + 2
    # Kept are layers 3 and 6; three more are made again at a time.
    assert _most_buffers(lambda: FullGraphGCN(widths, keep_every=3), widths) <= 2 + 2 + 4
    assert _most_buffers(lambda: FullGraphGCN(widths), widths, training=False) <= 3


def test_half_buffers_are_half_as_large() -> None:
    widths = (64, 64, 64)
    half = _most_buffers(lambda: FullGraphGCN(widths, activation_dtype=torch.bfloat16), widths)
    assert half <= 3  # those of the loss: output, logarithms and a gradient


# -- backward, once ---------------------------------------------------------------------------


def test_a_second_backward_raises() -> None:
    g = homogeneous("skewed")
    gcn, _ = _pair((5, 4, 3))
    for retain_graph in (False, True):
        out = gcn(g, g.ndata["x"]).sum()
        out.backward(retain_graph=retain_graph)
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_a_backward_pass_frees_the_sums_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the script has the loss, and with it what led there."""
    kept = []
    original = passes.Passes.with_input_sums

    def noted(self: passes.Passes, sums: torch.Tensor) -> passes.Passes:
        kept.append(StorageWeakRef(sums.untyped_storage()))
        return original(self, sums)

    monkeypatch.setattr(passes.Passes, "with_input_sums", noted)
    g = homogeneous("skewed")
    gcn, _ = _pair((5, 8, 3))
    loss = gcn(g, g.ndata["x"]).sum()
    (sums,) = kept
    assert not sums.expired()
    loss.backward(retain_graph=True)
    assert sums.expired()


def _check_second_derivatives(exchange: str) -> None:
    g = homogeneous()
    model = FullGraphGCN([5, 4, 3], allow_zero_in_degree=True).double()
    for graph in (g, dgl_mgpu.partition_graph(g, exchange=exchange)):
        model.to(graph.device)
        x = graph.ndata["x"].clone().requires_grad_()
        of_weights = list(model.parameters())
        for inputs in ([x], of_weights):
            (first,) = torch.autograd.grad(model(graph, x).sum(), x, create_graph=True)
            with pytest.raises(InvalidInputError, match="differentiate a GCN twice"):
                torch.autograd.grad((first**2).sum(), inputs, allow_unused=True)


def test_second_derivatives_are_refused(ranks: RankProcesses) -> None:
    for exchange in ranks.exchanges:
        ranks.run(_check_second_derivatives, exchange)


def test_a_changed_input_is_noticed() -> None:
    g = homogeneous("skewed")
    gcn, _ = _pair((5, 4, 4))
    x = g.ndata["x"].clone()
    out = gcn(g, x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    # Sums that stayed are of what the input was.
    gcn, stack = _pair((5, 8, 3))
    x = g.ndata["x"].clone()
    found, wanted = gcn(g, x), stack(g, x.clone())
    x.mul_(2)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for each, right in zip(gcn.parameters(), stack.parameters(), strict=True):
        torch.testing.assert_close(each.grad, right.grad, rtol=1e-10, atol=1e-10)


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "options", "found"),
    [
        ((5,), {}, "widths"),
        ((5, 0), {}, "widths"),
        ((5, 2.0), {}, "widths"),
        ((5, 2), {"norm": "middle"}, "norm"),
        ((5, 2), {"dropout": 1.0}, "dropout"),
        ((5, 2), {"dropout": -0.1}, "dropout"),
        ((5, 2), {"keep_every": 0}, "keep_every"),
        ((5, 2), {"activation_dtype": torch.int32}, "activation_dtype"),
    ],
)
def test_bad_options(widths: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidInputError, match=found):
        FullGraphGCN(widths, **options)


def test_bad_calls() -> None:
    g = dgl.add_self_loop(homogeneous("random"))
    x, gcn = g.ndata["x"], FullGraphGCN((5, 3)).double()
    gcn(g, x)
    for rows in (x[:-1], x[:, :-1], x[0]):
        with pytest.raises(InvalidInputError, match="the rows have shape"):
            gcn(g, rows)
    for rows in (x.float(), x.long()):
        with pytest.raises(InvalidInputError, match="the rows have dtype"):
            gcn(g, rows)
    hetero = dgl.heterograph({("a", "to", "b"): ([0], [0])})
    with pytest.raises(InvalidInputError, match="node types"):
        gcn(hetero, x)
    with pytest.raises(dgl.DGLError, match="have no in-edges"):
        gcn(homogeneous("isolated"), homogeneous("isolated").ndata["x"])


# -- several ranks --------------------------------------------------------------------------------


def _check_ranks(exchange: str, widths: tuple[int, ...]) -> None:
    for kind in ("skewed", "two nodes"):
        g = homogeneous(kind)
        pg = dgl_mgpu.partition_graph(g, exchange=exchange)
        ids = pg.ndata[dgl.NID]
        for norm in NORMS:
            for options in ({}, {"keep_input_sums": True}, {"keep_every": 2}):
                gcn, stack = _pair(widths, norm, **options)
                weights = _weights(g, widths[-1])
                wanted = _results(stack, g, g.ndata["x"], weights)
                found = _results(gcn, pg, pg.ndata["x"], weights[ids])
                for gradient in found[1:-1]:
                    dist.all_reduce(gradient)
                found[0], found[-1] = pg.gather(found[0]), pg.gather(found[-1])
                _require_same(found, wanted)


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
@pytest.mark.parametrize("widths", [(5, 4, 3), (5, 12, 7)])
def test_partitioned_graphs_give_the_same(
    exchange: str, widths: tuple[int, ...], ranks: RankProcesses
) -> None:
    ranks.run(_check_ranks, exchange, widths)


def _check_buffers(exchange: str, num_layers: int) -> list[int]:
    rows, width, size = 200, 64, dist.get_world_size()
    draw = torch.Generator().manual_seed(6)
    ends = torch.randint(rows * size, (2, 5000), generator=draw)
    g = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=rows * size))
    by = torch.arange(rows * size) // rows  # as many nodes on every rank
    pg = dgl_mgpu.partition_graph(g, by=by, exchange=exchange)
    x, widths, found = torch.randn(rows, width), (width,) * (num_layers + 1), []
    for model in (FullGraphGCN(widths), _Stack(widths)):
        model(pg, x)
        with _Buffers(rows * width * 3, x) as buffers:  # nearly all rows are in a halo
            torch.autograd.grad(_loss(model(pg, x)), list(model.parameters()))
        found.append(buffers.most)
    return found


@pytest.mark.parametrize(
    ("exchange", "more"),
    [
        # One may be what gloo has sent and not yet let go of.
        ("broadcast", 3 + 1),
        ("halo", 3 + 1 + 2),  # rows are copied together to be sent, those of two rounds
    ],
)
def test_with_an_exchange_there_are_hardly_more(
    exchange: str, more: int, ranks: RankProcesses
) -> None:
    for num_layers in (1, 3):
        for most, of_stack in ranks.run(_check_buffers, exchange, num_layers):
            assert most <= num_layers + more
            assert num_layers == 1 or of_stack > most


def _check_dropout() -> None:
    g = homogeneous("skewed")
    gcn, _ = _pair((5, 9, 3), dropout=0.5)
    torch.manual_seed(8)
    wanted = gcn(g, g.ndata["x"])
    pg = dgl_mgpu.partition_graph(g)
    torch.manual_seed(8)
    _require_same([pg.gather(gcn(pg, pg.ndata["x"]))], [wanted.detach()])


def test_dropout_is_the_same_on_any_number_of_ranks(ranks: RankProcesses) -> None:
    ranks.run(_check_dropout)


def _check_zero_in_degree() -> str:
    g = homogeneous("self-loops")
    g.remove_edges(torch.tensor([3]))
    pg = dgl_mgpu.partition_graph(g)
    gcn = FullGraphGCN((5, 3)).double()
    try:
        gcn(pg, pg.ndata["x"])
    except InvalidInputError:
        return "own"
    except RankFailedError:
        return "other"
    return "none"


def test_a_node_without_in_edges_on_one_rank_raises_on_all(ranks: RankProcesses) -> None:
    assert sorted(ranks.run(_check_zero_in_degree)) == ["other", "other", "own"]


def _check_optimizer() -> int:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

    g = homogeneous("skewed")
    pg = dgl_mgpu.partition_graph(g)
    ids, weights = pg.ndata[dgl.NID], _weights(g, 3)
    gcn, stack = _pair((5, 4, 3))
    whole = torch.optim.Adam(stack.parameters(), lr=0.1)
    shared = ZeroRedundancyOptimizer(gcn.parameters(), torch.optim.Adam, lr=0.1)
    for _ in range(3):
        whole.zero_grad()
        (stack(g, g.ndata["x"]) * weights).square().sum().backward()
        whole.step()
        shared.zero_grad()
        (gcn(pg, pg.ndata["x"]) * weights[ids]).square().sum().backward()
        for parameter in gcn.parameters():
            dist.all_reduce(parameter.grad)
        shared.step()
    _require_same(
        [parameter.detach() for parameter in gcn.parameters()],
        [parameter.detach() for parameter in stack.parameters()],
    )
    return sum(len(state) for state in shared.optim.state.values())


def test_optimizer_states_are_dealt_out_over_ranks(ranks: RankProcesses) -> None:
    states = ranks.run(_check_optimizer)
    assert sum(states) == 4 * 3 and max(states) < 4 * 3  # step and two moments of 4 parameters


def _check_data_parallel() -> None:
    g = homogeneous("skewed")
    pg = dgl_mgpu.partition_graph(g)
    weights = _weights(g, 3)
    gcn, stack = _pair((5, 4, 3))
    wanted = _results(stack, g, g.ndata["x"], weights)
    wrapped = torch.nn.parallel.DistributedDataParallel(gcn)
    _results(wrapped, pg, pg.ndata["x"], weights[pg.ndata[dgl.NID]])
    # It takes the mean over ranks, of what is here a sum over them.
    found = [parameter.grad * dist.get_world_size() for parameter in gcn.parameters()]
    _require_same(found, wanted[1:-1])


def test_data_parallel_adds_gradients_up(ranks: RankProcesses) -> None:
    ranks.run(_check_data_parallel)
