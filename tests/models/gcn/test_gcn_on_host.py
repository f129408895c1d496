"""The lean GCN with its input in the host's memory, against DGL's modules and against a tensor."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import dgl_mgpu
from dgl_mgpu.distributed import host_features as host
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.models.gcn import FullGraphGCN
from dgl_mgpu.models.gcn.passes import dropped
from tests.distributed.graphs import homogeneous
from tests.models.gcn.test_gcn import NORMS, _counted_sums, _loss, _pair, _require_same, _weights
from tests.ranks import RankProcesses, on_gpus_too

#: Multiplying first, summing first, a single layer of each kind, and more layers.
WIDTHS = ((5, 4, 3), (5, 6, 8), (5, 2), (5, 9), (5, 3, 8, 4))
#: Of 5 columns: one that is no divisor, and all.
SLAB_WIDTHS = (2, 8)
LAYOUTS = ({}, {"keep_input_sums": True}, {"keep_every": 2})


def _results(
    model: torch.nn.Module, g: dgl.DGLGraph, x: Any, weights: torch.Tensor, *args: Any
) -> list[torch.Tensor]:
    """The output and the parameters' gradients."""
    model.zero_grad()
    out = model(g, x, *args)
    (out * weights).sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("slab_width", SLAB_WIDTHS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_outputs_and_gradients_are_those_of_dgl_modules(
    widths: tuple[int, ...], slab_width: int
) -> None:
    for kind in ("skewed", "isolated", "no edges"):
        g = homogeneous(kind)
        x, weights = HostRows(g.ndata["x"], "cpu", slab_width), _weights(g, widths[-1])
        for norm in NORMS:
            _, stack = _pair(widths, norm)
            wanted = _results(stack, g, g.ndata["x"], weights)
            for options in LAYOUTS:
                gcn, _ = _pair(widths, norm, **options)
                for _ in range(2):  # sums that are kept are read again
                    _require_same(_results(gcn, g, x, weights), wanted)
                with torch.no_grad():
                    _require_same([gcn(g, x)], wanted[:1])


def test_a_graph_without_nodes() -> None:
    for widths in WIDTHS:
        gcn, stack = _pair(widths)
        g = dgl.graph(([], []), num_nodes=0)
        rows = torch.empty(0, 5, dtype=torch.float64)
        args = g, HostRows(rows, "cpu", 2), _weights(g, widths[-1])
        _require_same(_results(gcn, *args), _results(stack, g, rows, args[2]))


def _trained(model: torch.nn.Module, g: dgl.DGLGraph, x: Any) -> list[torch.Tensor]:
    """Losses of some epochs, and the parameters after them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = _loss(model(g, x))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("keep_input_sums", [False, True])
@pytest.mark.parametrize("widths", [(5, 4, 3), (5, 9, 3)])
def test_epochs_are_those_of_dgl_modules(widths: tuple[int, ...], keep_input_sums: bool) -> None:
    g = homogeneous("skewed")
    gcn, stack = _pair(widths, keep_input_sums=keep_input_sums)
    wanted = _trained(stack, g, g.ndata["x"])
    _require_same(_trained(gcn, g, HostRows(g.ndata["x"], "cpu", 2)), wanted)
    assert wanted[0][-1] < wanted[0][0]


def test_sums_of_the_input_are_made_in_slabs_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    g = homogeneous("skewed")
    x, weights = HostRows(g.ndata["x"], "cpu", 2), _weights(g, 4)
    for keep, widths, expected in (
        (True, (5, 8, 4), ([2, 2, 1, 4, 4], [4, 4])),
        (True, (5, 3, 4), ([2, 2, 1, 3, 3], [3, 3])),
        # Those of the input once more in the backward pass, at its end.
        (False, (5, 8, 4), 2 * ([2, 2, 1, 4, 4, 2, 2, 1],)),
        (False, (5, 3, 4), 2 * ([3, 3, 3, 3],)),
    ):
        gcn, _ = _pair(widths, keep_input_sums=keep)
        for wanted in expected:
            with _counted_sums(monkeypatch) as found:
                _results(gcn, g, x, weights)
            assert found == wanted
    with _counted_sums(monkeypatch) as found:  # of other rows
        gcn = _pair((5, 8, 4), keep_input_sums=True)[0]
        for each in (x, x, HostRows(2 * g.ndata["x"], "cpu", 8)):
            torch.testing.assert_close(gcn(g, each), gcn(g, each.whole()))
    assert [width for width in found if width != 4] == [2, 2, 1, 5, 2, 2, 1, 5, 5, 5]


# -- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(5, 4, 3), (5, 9, 3)])
def test_dropout_between_layers_is_that_of_a_tensor(widths: tuple[int, ...]) -> None:
    g = homogeneous("skewed")
    gcn, _ = _pair(widths, dropout=0.5)
    found = []
    for x in (g.ndata["x"], HostRows(g.ndata["x"], "cpu", 2)):
        torch.manual_seed(3)
        found.append(_results(gcn, g, x, _weights(g, 3)))
    _require_same(*found)


@pytest.mark.parametrize("widths", [(5, 4, 3), (5, 9, 3)])
def test_the_input_is_dropped_out_alike_forward_and_backward(widths: tuple[int, ...]) -> None:
    g = homogeneous("skewed")
    gcn, stack = _pair(widths)
    x = g.ndata["x"]
    masks = []
    for slab_width in SLAB_WIDTHS:
        torch.manual_seed(3)
        masks.append(dropped(g, HostRows(torch.ones_like(x), "cpu", slab_width), 0.4).whole())
        torch.manual_seed(3)
        rows = dropped(g, HostRows(x, "cpu", slab_width), 0.4)
        wanted = _results(stack, g, x * masks[0], _weights(g, 3))
        _require_same(_results(gcn, g, rows, _weights(g, 3)), wanted)
    assert torch.equal(*masks)  # by column and node alone
    assert 0.2 < (masks[0] == 0).double().mean() < 0.6
    assert not torch.equal(masks[0][:, 0], masks[0][:, 2])  # the first columns of two slabs
    again = dropped(g, HostRows(torch.ones_like(x), "cpu", 2), 0.4).whole()
    assert not torch.equal(again, masks[0])


def test_half_activations_stay_close_to_exact_ones() -> None:
    with tensor_backed_graphs():
        g = homogeneous("skewed", torch.float32)
        for widths in ((5, 16, 3), (5, 4, 3)):
            exact, _ = _pair(widths)
            wanted = _results(exact, g, g.ndata["x"].double(), _weights(g, 3))
            for keep in (False, True):
                half = FullGraphGCN(
                    widths,
                    activation_dtype=torch.bfloat16,
                    keep_input_sums=keep,
                    allow_zero_in_degree=True,
                )
                half.load_state_dict(exact.state_dict())
                x = HostRows(g.ndata["x"], "cpu", 2)
                found = _results(half, g, x, _weights(g, 3).float())
                assert {each.dtype for each in found} == {torch.float32}
                for one, other in zip(found, wanted, strict=True):
                    error = (one.double() - other).norm() / other.norm()
                    assert 0 < error < 0.02


# -- memory ---------------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """The bytes of tensors that are made, and the most that there are at a time.

    Attributes
    ----------
    sizes : set of int
    most : int
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}
        self.sizes: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            each.untyped_storage()._cdata
            for each in [*args, *(kwargs or {}).values()]
            if isinstance(each, torch.Tensor)
        }
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in known:
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage)
                self._bytes[storage._cdata] = storage.nbytes()
                self.sizes.add(storage.nbytes())
        self._alive = {key: each for key, each in self._alive.items() if not each.expired()}
        self.most = max(self.most, sum(self._bytes[key] for key in self._alive))
        return found


NODES = 500


def _epoch(widths: tuple[int, ...], keep: bool, slab_width: int | None) -> _Made:
    """What an epoch makes; the input and what the model has found out once are there before."""
    with tensor_backed_graphs():
        ends = torch.randint(NODES, (2, 4000), generator=torch.Generator().manual_seed(0))
        g = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=NODES))
        g.create_formats_()
    rows = torch.randn(NODES, widths[0])
    x = rows if slab_width is None else HostRows(rows, "cpu", slab_width)
    model = FullGraphGCN(widths, keep_input_sums=keep)
    model(g, x)
    gc.collect()
    with _Made() as found:
        torch.autograd.grad(_loss(model(g, x)), list(model.parameters()))
    return found


@pytest.mark.parametrize(
    ("widths", "keep"),
    [((600, 16, 8), False), ((600, 16, 8), True), ((600, 640), False), ((600, 640), True)],
)
def test_of_the_input_and_its_sums_some_columns_are_there(
    widths: tuple[int, ...], keep: bool
) -> None:
    slab = NODES * 16 * 4
    found = _epoch(widths, keep, 16)
    buffer = NODES * max(widths[1:]) * 4
    # Two slabs that come, one that is changed, its sums and those of the one before.
    allowed = (len(widths) - 1 + 2) * buffer + 5 * slab
    gradients = 3 * 4 * (widths[0] + 1) * widths[1]
    assert found.most <= allowed + gradients
    as_input = range(NODES * 400 * 4, NODES * 640 * 4)
    assert not any(size in as_input for size in found.sizes)
    if widths == (600, 640) and not keep:  # of a tensor the sums are as wide as it is
        assert NODES * 600 * 4 in _epoch(widths, keep, None).sizes


# -- bad input ------------------------------------------------------------------------------------


def test_bad_calls() -> None:
    g = dgl.add_self_loop(homogeneous("random"))
    x, gcn = g.ndata["x"], FullGraphGCN((5, 3)).double()
    gcn(g, HostRows(x, "cpu", 8))
    for rows, found in (
        (HostRows(x[:-1], "cpu", 8), "the rows have shape"),
        (HostRows(x[:, :-1], "cpu", 8), "the rows have shape"),
        (HostRows(x.float(), "cpu", 8), "the rows have dtype"),
        (x.to("meta"), "rows are on 'meta', but the graph is on 'cpu'"),
    ):
        with pytest.raises(dgl.DGLError, match=found):
            gcn(g, rows)


# -- several ranks --------------------------------------------------------------------------------


@contextmanager
def _narrow_slabs() -> Iterator[None]:
    """Two columns each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_SLAB_BYTES", 1), ("_MIN_COLUMNS", 2), ("_ALIGNED_COLUMNS", 1)):
            patch.setattr(host, name, value)
        yield


def _check_ranks(exchange: str, widths: tuple[int, ...]) -> None:
    for kind in ("skewed", "two nodes", "no edges"):
        g = homogeneous(kind)
        pg = dgl_mgpu.partition_graph(g, exchange=exchange)
        with _narrow_slabs():
            x = HostRows.of_nodes(pg, pg.scatter(g.ndata["x"], device="cpu"))
        ids, device = pg.ndata[dgl.NID].long().cpu(), pg.device
        for norm in ("both", "right"):
            for options in LAYOUTS:
                gcn, stack = _pair(widths, norm, **options)
                weights = _weights(g, widths[-1])
                wanted = _results(stack, g, g.ndata["x"], weights)
                gcn.to(device)
                for _ in range(2):
                    found = _results(gcn, pg, x, weights[ids].to(device))
                    for gradient in found[1:]:
                        dist.all_reduce(gradient)
                    found[0] = pg.gather(found[0])
                    _require_same([each.cpu() for each in found], wanted)


@on_gpus_too
@pytest.mark.parametrize("widths", [(5, 4, 3), (5, 12, 7)])
def test_partitioned_graphs_give_the_same(ranks: RankProcesses, widths: tuple[int, ...]) -> None:
    for exchange in ranks.exchanges:
        ranks.run(_check_ranks, exchange, widths)


def _check_dropout() -> None:
    g = homogeneous("skewed")
    pg = dgl_mgpu.partition_graph(g)
    ones = torch.ones(40, 5)
    torch.manual_seed(8)
    wanted = dropped(g, HostRows(ones, "cpu", 2), 0.5).whole()
    torch.manual_seed(8)
    own = pg.scatter(ones, device="cpu")
    found = dropped(pg, HostRows(own, pg.device, 2), 0.5).whole()
    assert torch.equal(pg.gather(found).cpu(), wanted)


@on_gpus_too
def test_dropout_is_the_same_on_any_number_of_ranks(ranks: RankProcesses) -> None:
    ranks.run(_check_dropout)


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("widths", [(512, 16, 8), (512, 520)])
def test_a_gpu_has_little_of_the_input(widths: tuple[int, ...], keep: bool) -> None:
    nodes, slab_width = 100_000, 32
    draw = torch.Generator().manual_seed(4)
    ends = torch.randint(nodes, (2, 800_000), generator=draw)
    g = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=nodes)).to("cuda")
    # In float32 another order of additions gives some inputs of ReLU the other sign.
    rows = torch.randn(nodes, widths[0], generator=draw, dtype=torch.float64)
    x = HostRows(rows, g.device, slab_width)
    torch.manual_seed(5)
    gcn = FullGraphGCN(widths, keep_input_sums=keep).double().cuda()
    weights = torch.randn(nodes, widths[-1], generator=draw, dtype=torch.float64).cuda()

    def with_peak(run: Callable[[], Any]) -> tuple[Any, int]:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = run()
        torch.cuda.synchronize()
        return found, torch.cuda.max_memory_allocated() - before

    wanted = [each.cpu() for each in _results(copy.deepcopy(gcn), g, rows.cuda(), weights)]
    _, taken = with_peak(lambda: gcn(g, x).detach())  # with the sums that are kept
    for _ in range(2):
        found, most = with_peak(lambda: _results(gcn, g, x, weights))
        taken = max(taken, most)
        for one, other in zip(found, wanted, strict=True):
            assert (one.cpu() - other).norm() <= 1e-9 * other.norm()
        del found, one
    column = 8 * nodes
    # L + 2 buffers, what the test's product and its gradient take, and slabs.
    allowed = ((len(widths) - 1 + 4) * max(widths[1:]) + 6 * slab_width) * column + (64 << 20)
    assert taken <= allowed
    if widths[1] < widths[0]:
        assert taken < widths[0] * column
