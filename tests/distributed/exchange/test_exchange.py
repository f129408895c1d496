from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange.by_machine import HaloByMachine, Machines
from dgl_mgpu.distributed.exchange.collectives import Broadcast, Chunks, WholeHalo
from dgl_mgpu.distributed.exchange.halo import Halo
from dgl_mgpu.distributed.exchange.peer_memory import PeerChunks
from dgl_mgpu.distributed.exchange.schedule import CommSchedule, Gather, Sum
from dgl_mgpu.distributed.exchange.window import Window
from dgl_mgpu.distributed.local_part import Part, cut
from dgl_mgpu.distributed.partition import Ownership, assigned, ranges, shuffled
from tests.distributed.exchange.windows import window_of
from tests.distributed.graphs import KINDS, edges
from tests.ranks import on_gpus_too

_CASES = [
    *((kind, "shuffled") for kind in KINDS),
    *(("skewed", strategy) for strategy in ("order", "one rank has all")),
]


def _dealt(strategy: str, num_nodes: int, in_degrees: torch.Tensor, num_ranks: int) -> Ownership:
    if strategy == "one rank has all":
        return assigned(torch.full((num_nodes,), num_ranks - 1), num_ranks)
    order = shuffled(num_nodes, 1) if strategy == "shuffled" else None
    return ranges(order, in_degrees, num_ranks)


_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


class _Whole:
    """A graph of which every rank knows all: the parts of all ranks, and its matrix.

    Parts are on the rank's device, and so is what `own_src`, `own_dst` and `own_edges` give; all
    else is on the CPU.
    """

    def __init__(self, kind: str, strategy: str, idtype: torch.dtype = torch.int64) -> None:
        self.group = dist.group.WORLD if dist.is_initialized() else None
        on_gpu = self.group is not None and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.rank, size = (dist.get_rank(), dist.get_world_size()) if self.group else (0, 1)
        num_src, num_dst, self.src, self.dst = edges(kind)
        degrees = torch.bincount(self.dst, minlength=num_dst)
        self.of_dst = _dealt(strategy, num_dst, degrees, size)
        same = num_src == num_dst
        self.of_src = self.of_dst if same else _dealt(strategy, num_src, torch.ones(num_src), size)
        ends = [end.to(self.device, idtype) for end in (self.src, self.dst)]
        self.parts = [cut(*ends, self.of_src, self.of_dst, r) for r in range(size)]
        self.draw = torch.Generator().manual_seed(9)

    @property
    def part(self) -> Part:
        return self.parts[self.rank]

    def halo_nodes(self, rank: int) -> torch.Tensor:
        everyone = torch.cat([self.of_src.nodes(r) for r in range(len(self.parts))])
        return everyone[self.parts[rank].halo.cpu()]

    def own_src(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.of_src.nodes(self.rank)].to(self.device)

    def own_dst(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.of_dst.nodes(self.rank)].to(self.device)

    def own_edges(self, weights: torch.Tensor) -> torch.Tensor:
        return weights[self.part.edges.cpu()].to(self.device)

    def window(self) -> Window | None:
        """What these ranks lend each other, if they can."""
        return None if self.group is None else window_of(self.group, self.device)

    def rows(self, count: int, *shape: int) -> torch.Tensor:
        """Whole numbers, of which sums are exact in any order."""
        return torch.randint(-8, 9, (count, *shape), generator=self.draw).double()

    def matrix(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Destinations by sources, the numbers of edges or sums of their weights."""
        values = torch.ones(len(self.src), dtype=torch.float64) if weights is None else weights
        size = self.of_dst.num_nodes, self.of_src.num_nodes
        empty = torch.zeros(size, dtype=torch.float64)
        return empty.index_put_((self.dst, self.src), values, accumulate=True)


def _every_way(whole: _Whole) -> list[tuple[str, CommSchedule]]:
    strategies: list[tuple[str, CommSchedule]] = [
        ("broadcast", Broadcast(whole.part, whole.group)),
        ("halo at first", WholeHalo(Chunks(whole.part, whole.group, 1))),
    ]
    for chunks in sorted({1, 2, max(1, len(whole.parts) - 1), 7}):
        strategies.append((f"{chunks} chunks", Chunks(whole.part, whole.group, chunks)))
    machines = None if whole.group is None else Machines.of_job()
    if machines is not None and whole.group is not None:
        by_machine = HaloByMachine(whole.part, whole.group, machines)
        strategies.append(("halo by machine", by_machine))
    window = whole.window()
    if window is not None:
        for chunks in (1, 2):
            for read_all in (True, False):
                shared_rows = PeerChunks(whole.part, window, chunks, read_all)
                strategies.append((f"{chunks} lent chunks, {read_all=}", shared_rows))
        halo = PeerChunks(whole.part, window, 1, read_all=False)
        strategies.append(("lent halo at first", WholeHalo(halo)))
    return strategies


def _halos(whole: _Whole) -> list[Halo]:
    halos = [Halo(whole.part, whole.group)]
    window = whole.window()
    if window is not None:
        halos.append(Halo(whole.part, whole.group, window))
    return halos


# -- the halo -----------------------------------------------------------------------------------


def _fetches(kind: str, strategy: str) -> None:
    whole = _Whole(kind, strategy)
    cases = [(torch.float64, shape) for shape in ((), (0,), (1,), (2, 0), (2, 3))]
    halos = _halos(whole)
    for dtype, shape in [*cases, *((dtype, (3,)) for dtype in _DTYPES)]:
        rows = whole.rows(whole.of_src.num_nodes, *shape).to(dtype)
        for halo in halos:
            found = halo.fetch(whole.own_src(rows))
            assert found.dtype == dtype
            assert torch.equal(found.cpu(), rows[whole.halo_nodes(whole.rank)]), (shape, dtype)


@on_gpus_too
@pytest.mark.parametrize(("kind", "strategy"), _CASES)
def test_the_halo_is_fetched(ranks, kind, strategy):
    ranks.run(_fetches, kind, strategy)


def _gives_back(kind: str, strategy: str) -> None:
    whole = _Whole(kind, strategy)
    halos = _halos(whole)
    for shape in ((), (0,), (1,), (2, 3)):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            total = torch.zeros(whole.of_src.num_nodes, *shape)
            highest = torch.full_like(total, -torch.inf)
            for rank, part in enumerate(whole.parts):
                given = whole.rows(len(part.halo), *shape).float()
                if rank == whole.rank:
                    mine = given.to(whole.device, dtype)
                nodes = whole.halo_nodes(rank)
                total.index_add_(0, nodes, given)
                highest[nodes] = torch.maximum(highest[nodes], given)
            for reduce, expected in (("sum", total), ("max", highest)):
                for halo in halos:
                    found = halo.give_back(mine, reduce)
                    assert found.dtype == dtype
                    own = whole.own_src(expected.to(dtype))
                    assert torch.equal(found, own), (shape, dtype, reduce)


@on_gpus_too
@pytest.mark.parametrize(("kind", "strategy"), _CASES)
def test_rows_are_given_back(ranks, kind, strategy):
    ranks.run(_gives_back, kind, strategy)


def _strided() -> None:
    whole = _Whole("random", "shuffled")
    halo = Halo(whole.part, whole.group)
    rows = whole.rows(whole.of_src.num_nodes, 3)
    own = whole.own_src(rows).t().contiguous().t()
    found = halo.fetch(own)
    assert torch.equal(found.cpu(), rows[whole.halo_nodes(whole.rank)])
    turned = found.t().contiguous().t()
    assert torch.equal(halo.give_back(turned), halo.give_back(found))


@on_gpus_too
def test_rows_need_not_be_contiguous(ranks):
    ranks.run(_strided)


# -- sums in rounds -----------------------------------------------------------------------------


def _sums(kind: str, strategy: str, idtype: torch.dtype) -> None:
    whole = _Whole(kind, strategy, idtype)
    num_src, num_dst = whole.of_src.num_nodes, whole.of_dst.num_nodes
    for name, rounds in _every_way(whole):
        for weighted in (False, True):
            weights = whole.rows(len(whole.src)) if weighted else None
            matrix = whole.matrix(weights)
            mine = None if weights is None else whole.own_edges(weights)
            for shape in ((), (0,), (1,), (3,), (2, 3), (16, 1)):
                given = None if mine is None else mine.view(-1, *[1] * len(shape))
                x, y = whole.rows(num_src, *shape), whole.rows(num_dst, *shape)
                found = rounds.sums(whole.own_src(x), given)
                expected = torch.tensordot(matrix, x, 1)
                assert torch.equal(found, whole.own_dst(expected)), (name, weighted, shape)
                found = rounds.transposed_sums(whole.own_dst(y), given)
                expected = torch.tensordot(matrix.t(), y, 1)
                assert torch.equal(found, whole.own_src(expected)), (name, weighted, shape)
                assert found.untyped_storage().nbytes() == found.nbytes  # and no other rank's rows


@on_gpus_too
@pytest.mark.parametrize(("kind", "strategy"), _CASES)
def test_sums_are_products_with_the_matrix(ranks, kind, strategy):
    ranks.run(_sums, kind, strategy, torch.int64)


@on_gpus_too
def test_sums_with_ids_of_32_bits(ranks):
    ranks.run(_sums, "bipartite", "shuffled", torch.int32)


@pytest.mark.parametrize("kind", ["random", "bipartite", "no edges"])
def test_sums_on_one_rank(kind):
    _sums(kind, "shuffled", torch.int64)
    _fetches(kind, "shuffled")
    _gives_back(kind, "shuffled")


def _dtypes() -> None:
    whole = _Whole("skewed", "shuffled")
    x, y = whole.rows(whole.of_src.num_nodes, 4), whole.rows(whole.of_dst.num_nodes, 4)
    matrix = whole.matrix()
    for name, rounds in _every_way(whole):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rows, found, expected in (
                (x, rounds.sums(whole.own_src(x).to(dtype)), whole.own_dst(matrix @ x)),
                (
                    y,
                    rounds.transposed_sums(whole.own_dst(y).to(dtype)),
                    whole.own_src(matrix.t() @ y),
                ),
            ):
                assert found.dtype == dtype
                # Half types are rounded once a round.
                limit = torch.finfo(dtype).eps * 4 * 8 * len(whole.src) ** 0.5
                assert (found - expected).abs().max() <= limit, (name, dtype, rows.shape)


@on_gpus_too
def test_sums_of_other_element_types(ranks):
    ranks.run(_dtypes)


def _weights_of_columns() -> None:
    whole = _Whole("random", "shuffled")
    heads = whole.rows(len(whole.src), 2, 1)
    x = whole.rows(whole.of_src.num_nodes, 2, 3)
    expected = torch.stack(
        [whole.matrix(heads[:, head, 0]) @ x[:, head] for head in range(2)], dim=1
    )
    for _, rounds in _every_way(whole):
        found = rounds.sums(whole.own_src(x), whole.own_edges(heads))
        assert torch.equal(found, whole.own_dst(expected))


@on_gpus_too
def test_weights_of_several_heads(ranks):
    ranks.run(_weights_of_columns)


def _adjoint() -> None:
    whole = _Whole("skewed", "shuffled")
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(whole.of_src.num_nodes, 3, generator=draw, dtype=torch.float64)
    y = torch.randn(whole.of_dst.num_nodes, 3, generator=draw, dtype=torch.float64)
    weights = torch.rand(len(whole.src), 1, generator=draw, dtype=torch.float64)
    x, y, weights = whole.own_src(x), whole.own_dst(y), whole.own_edges(weights)
    for name, rounds in _every_way(whole):
        products = torch.stack(
            [
                (rounds.sums(x, weights) * y).sum(),
                (x * rounds.transposed_sums(y, weights)).sum(),
            ]
        )
        dist.all_reduce(products)
        torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=1e-12, msg=name)


@on_gpus_too
def test_the_transpose_is_one(ranks):
    ranks.run(_adjoint)


def _sum_gradients() -> None:
    whole = _Whole("random", "shuffled")
    weights = whole.rows(len(whole.src), 1)
    matrix = whole.matrix(weights[:, 0])
    all_x = whole.rows(whole.of_src.num_nodes, 2).requires_grad_()
    cubes = ((matrix @ all_x) ** 3).sum()
    (expected,) = torch.autograd.grad(cubes, all_x, create_graph=True)
    (expected_second,) = torch.autograd.grad((expected * all_x.detach()).sum(), all_x)
    for name, rounds in _every_way(whole):
        x = whole.own_src(all_x.detach()).requires_grad_()
        total = Sum.apply(rounds, False, whole.own_edges(weights), x)
        (first,) = torch.autograd.grad((total**3).sum(), x, create_graph=True)
        assert torch.equal(first, whole.own_src(expected)), name
        (second,) = torch.autograd.grad((first * x.detach()).sum(), x)
        assert torch.equal(second, whole.own_src(expected_second)), name


@on_gpus_too
def test_sums_are_differentiable_twice(ranks):
    ranks.run(_sum_gradients)


def _weight_gradients(shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> None:
    whole = _Whole("random", "shuffled")
    all_x = whole.rows(whole.of_src.num_nodes, *shape).requires_grad_()
    all_weights = whole.rows(len(whole.src), *weight_shape).requires_grad_()
    empty = torch.zeros(whole.of_dst.num_nodes, *shape, dtype=torch.float64)

    def derivatives(total, x, weights):
        first = torch.autograd.grad((total**2).sum(), (x, weights), create_graph=True)
        second = torch.autograd.grad(sum((each**2).sum() for each in first), (x, weights))
        return total.detach(), *(each.detach() for each in first), *second

    messages = all_x[whole.src] * all_weights
    expected = derivatives(empty.index_add(0, whole.dst, messages), all_x, all_weights)
    for name, rounds in _every_way(whole):
        x = whole.own_src(all_x.detach()).requires_grad_()
        weights = whole.own_edges(all_weights.detach()).requires_grad_()
        found = derivatives(Sum.apply(rounds, False, weights, x), x, weights)
        own = (whole.own_dst, *(whole.own_src, whole.own_edges) * 2)
        for mine, of_all, taken in zip(found, expected, own, strict=True):
            assert torch.equal(mine, taken(of_all)), name


@on_gpus_too
@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [((), ()), ((3,), (1,)), ((3,), (3,)), ((2, 3), (2, 1)), ((2, 3), (1, 3)), ((2, 3), (1, 1))],
)
def test_learned_weights_have_gradients(ranks, shape, weight_shape):
    ranks.run(_weight_gradients, shape, weight_shape)


def _weights_of_reversed_edges() -> None:
    whole = _Whole("skewed", "shuffled")
    all_y = whole.rows(whole.of_dst.num_nodes, 2).requires_grad_()
    all_weights = whole.rows(len(whole.src), 1).requires_grad_()
    empty = torch.zeros(whole.of_src.num_nodes, 2, dtype=torch.float64)
    total = empty.index_add(0, whole.src, all_y[whole.dst] * all_weights)
    expected = torch.autograd.grad((total**2).sum(), (all_y, all_weights))
    for name, rounds in _every_way(whole):
        y = whole.own_dst(all_y.detach()).requires_grad_()
        weights = whole.own_edges(all_weights.detach()).requires_grad_()
        mine = Sum.apply(rounds, True, weights, y)
        assert torch.equal(mine, whole.own_src(total.detach())), name
        found = torch.autograd.grad((mine**2).sum(), (y, weights))
        assert torch.equal(found[0], whole.own_dst(expected[0])), name
        assert torch.equal(found[1], whole.own_edges(expected[1])), name


@on_gpus_too
def test_learned_weights_of_sums_back_to_sources(ranks):
    ranks.run(_weights_of_reversed_edges)


def _rows_of_edges(shape: tuple[int, ...]) -> None:
    whole = _Whole("skewed", "shuffled")
    all_x = whole.rows(whole.of_src.num_nodes, *shape).requires_grad_()
    of_edges = all_x[whole.src]
    (expected,) = torch.autograd.grad((of_edges**3).sum(), all_x, create_graph=True)
    (expected_second,) = torch.autograd.grad((expected * all_x.detach()).sum(), all_x)
    for name, rounds in _every_way(whole):
        x = whole.own_src(all_x.detach()).requires_grad_()
        found = Gather.apply(rounds, x)
        assert torch.equal(found, whole.own_edges(of_edges.detach())), name
        (first,) = torch.autograd.grad((found**3).sum(), x, create_graph=True)
        assert torch.equal(first, whole.own_src(expected.detach())), name
        (second,) = torch.autograd.grad((first * x.detach()).sum(), x)
        assert torch.equal(second, whole.own_src(expected_second)), name
        for dtype in _DTYPES:
            ids = all_x.detach().to(dtype)
            assert torch.equal(rounds.gather(whole.own_src(ids)), whole.own_edges(ids[whole.src]))


@on_gpus_too
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_edges_get_their_sources_rows(ranks, shape):
    ranks.run(_rows_of_edges, shape)


def _input_changes() -> None:
    whole = _Whole("skewed", "shuffled")
    x = whole.rows(whole.of_src.num_nodes, 64)
    expected = whole.own_dst(whole.matrix() @ x)
    for name, rounds in _every_way(whole):
        for _ in range(20):
            own = whole.own_src(x)
            found = rounds.sums(own)
            own.fill_(torch.nan)
            assert torch.equal(found, expected), name


@on_gpus_too
def test_rows_may_be_overwritten_once_sums_are_there(ranks):
    """Also those that other ranks have yet to be sent."""
    ranks.run(_input_changes)
