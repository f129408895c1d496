"""How operators are called: without torch's dispatcher, but only where nobody would notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dgl_mgpu.ops import library, spmm

INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 2])


def total(u: torch.Tensor) -> torch.Tensor:
    return spmm(INDPTR, INDICES, None, u, None, "copy_lhs", "sum")[0]


def expected(u: torch.Tensor) -> torch.Tensor:
    return torch.stack([u[1] + u[0], u[2]])


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU's operator is called directly, as the GPU's is; with a note of every such call."""
    calls = []

    def noted(*arguments):
        calls.append("direct")
        return torch.ops.dgl_mgpu.spmm.default(*arguments)

    monkeypatch.setitem(library._direct, ("spmm", "cpu"), noted)
    return calls


class Tensor(torch.Tensor):
    """A class of a user's."""


def test_plain_tensors_go_directly(direct):
    u = torch.rand(3, 2)
    torch.testing.assert_close(total(u), expected(u))
    with torch.no_grad():
        torch.testing.assert_close(total(torch.nn.Parameter(u)), expected(u))
    with torch.inference_mode():
        torch.testing.assert_close(total(u), expected(u))
    assert len(direct) == 3


def test_who_would_notice_sees_every_call(direct):
    u = torch.rand(3, 2)
    total(u.as_subclass(Tensor))
    total(torch.nn.Parameter(u))  # autograd says that the operator has no gradient
    with torch.profiler.profile() as profile:
        total(u)
    assert "dgl_mgpu::spmm" in [event.key for event in profile.key_averages()]
    with torch.device("cpu"):  # a mode that sees functions
        total(u)
    assert direct == []


def test_transforms(direct):
    def norm(x: torch.Tensor) -> torch.Tensor:
        total(torch.ones(3, 2))
        return (x * x).sum()

    torch.testing.assert_close(torch.func.grad(norm)(torch.ones(3)), torch.full((3,), 2.0))
    assert direct == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(direct, monkeypatch, device):
    monkeypatch.setitem(library._direct, ("spmm", "cuda"), lambda *_: direct.append("cuda"))
    with FakeTensorMode() as mode:
        ids, u = torch.empty(4, dtype=torch.int64, device=device), torch.empty(3, 2, device=device)
        inside = spmm(ids, ids, None, u, None, "copy_lhs", "max")
    outside = spmm(ids, ids, None, u, None, "copy_lhs", "max")
    for out, arg_u, arg_e in (inside, outside):
        assert arg_e is None
        for found, dtype in ((out, torch.float32), (arg_u, torch.int64)):
            assert found.fake_mode is mode and found.device.type == device
            assert found.shape == (3, 2) and found.dtype == dtype
    assert direct == []


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(direct, fullgraph):
    def layer(u: torch.Tensor) -> torch.Tensor:
        return total(u * 2).relu() + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=fullgraph)
    for rows in (3, 5):
        u = torch.randn(rows, 2)
        torch.testing.assert_close(compiled(u), expected(u * 2).relu() + 1)
    assert direct == []


def test_a_profiler_sees_what_goes_past_the_dispatcher(monkeypatch):
    monkeypatch.setitem(library._direct, ("double", "cpu"), lambda tensor: 2 * tensor)
    three = torch.tensor(3)
    assert library.direct("double", (three,)) is not None
    with torch.profiler.profile() as profile:
        assert library.direct("double", (three,)) is None
        double = library.direct("double", (three,), even_profiled=True)
        assert double(three) == 6
    (mine,) = [event for event in profile.events() if event.name == "dgl_mgpu::double"]
    assert [child.name for child in mine.cpu_children] == ["aten::mul"]


class Pair(NamedTuple):
    first: torch.Tensor
    size: library.Size = 3


class Output(NamedTuple):
    out: library.Written
    scale: float


def scaled_op(
    values: torch.Tensor, pair: Pair, fanouts: Sequence[int] = (), output: Output | None = None
) -> torch.Tensor:
    return values.new_empty(pair.size)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[library.Operator]:
    """An operator of this test's namespace."""
    own = torch.library.Library("dgl_mgpu_test", "FRAGMENT")
    monkeypatch.setattr(library, "library", own)
    monkeypatch.setattr(library, "NAMESPACE", "dgl_mgpu_test")
    yield library.Operator(scaled_op)
    own._destroy()


def test_a_schema_has_the_fields_of_groups(operator):
    assert operator.schema == (
        "scaled(Tensor values, Tensor first, SymInt size=3, int[] fanouts=[], Tensor(a!)? out=None,"
        " float? scale=None) -> Tensor"
    )


def test_an_implementation_gets_groups(operator):
    calls = []

    @operator.cpu
    def scaled(values, pair, fanouts, output):
        calls.append((pair, list(fanouts), output))
        return values.new_zeros(pair.size)

    ones = torch.ones(2)
    call = torch.ops.dgl_mgpu_test.scaled.default
    assert call(ones, ones).shape == (3,)
    assert scaled(ones, ones, 4, [2], ones, 2.0).shape == (4,)
    (pair, fanouts, output), (other, other_fanouts, given) = calls
    assert isinstance(pair, Pair) and pair.size == 3 and fanouts == [] and output is None
    assert other.size == 4 and other_fanouts == [2]
    assert isinstance(given, Output) and given.out is ones and given.scale == 2.0
    with FakeTensorMode():
        assert call(torch.empty(2), torch.empty(2), 5).shape == (5,)


def test_an_implementation_has_the_parameters_of_the_specification(operator):
    with pytest.raises(TypeError, match="other parameters than the operator scaled"):
        operator.cpu(lambda values, pair, fanouts: values)
