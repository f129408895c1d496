"""Sums of rows that lie in several memories, against plain torch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.spmm_remote import DTYPES, Entries, Pairs, Pipeline, Sources, pair_up, spmm_remote

#: Rows of each rank; this one is the second, and the third has none.
COUNTS = (9, 13, 0, 20, 5)
RANK = 1

#: In-degrees of rows: by local entries, and by remote ones.
GRAPHS: dict[str, tuple[list[int], list[int]]] = {
    "empty": ([], []),
    "no entries": ([0, 0, 0], [0, 0, 0]),
    "one local entry": ([1], [0]),
    "one remote entry": ([0], [1]),
    "local entries alone": ([3, 0, 40, 2], [0, 0, 0, 0]),
    "remote entries alone": ([0, 0, 0, 0], [0, 70, 1, 33]),
    "hubs": ([2, 0, 500, 1, 0, 3], [5, 0, 900, 0, 700, 1]),
    "hub at the end": ([0, 1, 0], [3, 0, 2500]),
    "many rows": ([row % 5 for row in range(90)], [row * row % 11 for row in range(90)]),
}


class Case(NamedTuple):
    """A sum's arguments, and the matrices whose addresses are in them."""

    local: Entries
    remote: Entries
    sources: Sources
    parts: list[torch.Tensor]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums in float64, an edge after the other, and those of magnitudes."""
        every = torch.cat([self.sources.rows, *self.parts]).double()
        behind_own = len(self.sources.rows) - int(self.sources.starts[0])
        total = every.new_zeros(len(self.local.indptr) - 1, every.shape[1])
        size = torch.zeros_like(total)
        for entries, shift in ((self.local, 0), (self.remote, behind_own)):
            degrees = entries.indptr.diff().long()
            targets = torch.arange(len(degrees)).repeat_interleave(degrees)
            messages = every[entries.columns.long() + shift]
            if entries.weights is not None:
                per_weight = every.shape[1] // entries.weights.shape[1]
                messages = messages * entries.weights.double().repeat_interleave(per_weight, 1)
            total.index_add_(0, targets, messages)
            size.index_add_(0, targets, messages.abs())
        return total, size

    def assert_sums(self, found: torch.Tensor) -> None:
        """That ``found`` is what is expected."""
        dtype = self.sources.rows.dtype
        total, size = self.expected()
        assert found.dtype == dtype and found.shape == total.shape
        step = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        bound = 100 * step * size + torch.finfo(dtype).eps * total.abs() + 1e-300
        assert ((found.double() - total).abs() <= bound).all()


def case(
    name: str,
    width: int,
    dtype: torch.dtype = torch.float32,
    id_dtype: torch.dtype = torch.int64,
    num_weights: int = 0,
    offset: int = 0,
    first: int = 0,
) -> Case:
    """Sums over one of `GRAPHS`; each rank's rows are ``offset`` elements behind 64 bytes."""
    draw = torch.Generator().manual_seed(len(name) + width)

    def matrix(count: int) -> torch.Tensor:
        room = torch.zeros(offset + count * width, dtype=dtype)[offset:].view(count, width)
        return room.copy_(torch.randn(count, width, generator=draw))

    parts = [matrix(count) for count in COUNTS]
    starts = torch.tensor([0, *COUNTS[:-1]]).cumsum(0)
    own = range(int(starts[RANK]), int(starts[RANK]) + COUNTS[RANK])
    elsewhere = torch.tensor([row for row in range(sum(COUNTS)) if row not in own])

    def entries(degrees: list[int], choice: torch.Tensor) -> Entries:
        indptr = torch.tensor([0, *degrees], dtype=torch.int64).cumsum(0)
        count = int(indptr[-1])
        columns = choice[torch.randint(len(choice), (count,), generator=draw)]
        weights = torch.randn(count, num_weights, generator=draw).to(dtype) if num_weights else None
        return Entries(indptr.to(id_dtype), columns.to(id_dtype), weights)

    local, remote = GRAPHS[name]
    return Case(
        entries(local, torch.arange(COUNTS[RANK])),
        entries(remote, elsewhere + first),
        Sources(
            parts[RANK],
            torch.tensor([part.data_ptr() for part in parts]),
            starts + first,
            offset * dtype.itemsize or 64,
        ),
        parts,
    )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_graphs(name, id_dtype):
    for num_weights in (0, 2):
        given = case(name, 6, id_dtype=id_dtype, num_weights=num_weights)
        given.assert_sums(spmm_remote(*given[:3]))


@pytest.mark.parametrize("width", [1, 3, 16, 100, 602])
def test_widths(width):
    given = case("hubs", width)
    given.assert_sums(spmm_remote(*given[:3]))


def test_rows_of_no_width():
    given = case("many rows", 0)
    assert spmm_remote(*given[:3]).shape == (90, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    given = case("hubs", 10, dtype, num_weights=5)
    given.assert_sums(spmm_remote(*given[:3]))


def test_numbers_of_rows_beyond_32_bits():
    given = case("many rows", 4, first=1 << 40)
    given.assert_sums(spmm_remote(*given[:3]))


def test_operands_of_any_layout():
    given = case("many rows", 8)
    indptr, columns, _ = given.local
    strided = columns.repeat_interleave(2)[::2]
    rows = torch.empty(len(given.sources.rows), 16)[:, ::2].copy_(given.sources.rows)
    sources = given.sources._replace(rows=rows)
    given.assert_sums(spmm_remote(Entries(indptr, strided), given.remote, sources))


def test_pairs():
    local, remote = torch.tensor([0, 0, 7, 8, 8]), torch.tensor([0, 0, 4, 8, 21])
    pairs = pair_up(local, remote, 4)
    assert pairs.before.tolist() == [0, 1, 3, 4, 8] and pairs.total == 8
    given = case("hubs", 5)
    pairs = pair_up(given.local.indptr, given.remote.indptr, 3)
    given.assert_sums(spmm_remote(*given[:3], pairs=pairs, pipeline=Pipeline(ps=3)))
    for wrong in (pair_up(given.local.indptr, given.remote.indptr, 4), Pairs(local, 4, 3)):
        with pytest.raises(InvalidInputError, match="pairs was made for"):
            spmm_remote(*given[:3], pairs=wrong, pipeline=Pipeline(ps=3))


@pytest.mark.parametrize("bad", [{"ps": 0}, {"ps": 33}, {"dist": 17}, {"wpb": 2.5}, {"wpb": 17}])
def test_bad_pipelines(bad):
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        Pipeline(**bad)


def test_a_pipeline_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pipeline().ps = 3  # type: ignore[misc]


BAD = {
    "a vector of rows": (2, {"rows": torch.ones(4)}, "rows has dtype"),
    "rows of integers": (2, {"rows": torch.ones(4, 4).int()}, "torch.int32"),
    "rows elsewhere": (2, {"rows": torch.ones(4, 4, device="meta")}, "meta"),
    "addresses of 32 bits": (2, {"bases": torch.zeros(5, dtype=torch.int32)}, "torch.int32"),
    "too few starts": (2, {"starts": torch.zeros(4, dtype=torch.int64)}, r"\(4,\)"),
    "odd addresses": (2, {"alignment": 2}, "alignment is 2 bytes"),
    "no ranks": (
        2,
        {key: torch.zeros(0, dtype=torch.int64) for key in ("bases", "starts")},
        "0 addresses",
    ),
    "more rows": (1, {"indptr": torch.zeros(92, dtype=torch.int64)}, r"\(92,\)"),
    "two id dtypes": (1, {"indptr": torch.zeros(91, dtype=torch.int32)}, "torch.int32"),
    "columns of floats": (0, {"columns": torch.zeros(3)}, "torch.float32"),
    "an empty indptr": (0, {"indptr": torch.zeros(0, dtype=torch.int64)}, r"\(0,\)"),
    "local weights alone": (0, {"weights": torch.ones(180, 1)}, "same number of weights"),
    "too few weights": (0, {"weights": torch.ones(179, 1)}, r"\(179, 1\)"),
    "weights of another dtype": (0, {"weights": torch.ones(180, 1).double()}, "torch.float64"),
    "weights that do not divide": (0, {"weights": torch.ones(180, 3)}, r"\(180, 3\)"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs(what):
    place, changed, message = BAD[what]
    arguments = list(case("many rows", 4)[:3])
    spmm_remote(*arguments)
    arguments[place] = arguments[place]._replace(**changed)
    with pytest.raises(InvalidInputError, match=message):
        spmm_remote(*arguments)


def test_the_schema():
    local, remote, sources, _ = case("many rows", 4, num_weights=1)
    pairs = pair_up(local.indptr, remote.indptr, 16)
    torch.library.opcheck(
        torch.ops.dgl_mgpu.spmm_remote.default,
        (*local, *remote, *pairs, 8, 2, *sources),
        test_utils=("test_schema", "test_faketensor"),
    )
