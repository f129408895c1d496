"""Plain data as bytes: what comes back, what is refused, and that nothing is run."""

from __future__ import annotations

import contextlib
import enum
import json
import pickle
import random
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dgl_mgpu.comm.serialization import NotPlainError, dumps, loads
from dgl_mgpu.distributed.exchange.cost import Rates
from dgl_mgpu.placement.plan import Tier

ARRAYS = [
    np.arange(12, dtype="<i4").reshape(3, 4)[:, ::2],
    np.array(2.5),
    np.zeros((0, 3), np.uint16),
    np.array([1 + 2j], np.complex64),
    np.array([True, False]),
    np.arange(3, dtype=">f8"),
]
TENSORS = [
    torch.arange(12.0).reshape(3, 4).t(),
    torch.tensor(7, dtype=torch.int8),
    torch.empty(0, 5, dtype=torch.float16),
    torch.randn(4).bfloat16(),
    torch.tensor([True, False]),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.randn(3, requires_grad=True),
]
VALUES: list[Any] = [
    None, True, 0, -1, 1 << 80, 0.1, 1e300, float("inf"), "", "ä\x00\ud83d\ude00".encode(
        "utf-16", "surrogatepass").decode("utf-16"), b"\x00\xff", 1 + 2j,
    (), (1, "a", None), [], [[1], (2,)], {1, 2}, frozenset({"a"}), {}, {(1, "a"): [b"x"], None: 0},
    {"tuple": [1]}, OrderedDict(b=[1], a=2), slice(1, None, 2), Path("/a/b"),
    np.dtype("float16"), np.float32(0.1), np.int64(3),
    torch.Size([1, 2]), torch.bfloat16, torch.device("cuda", 1),
]  # fmt: skip


class Foreign(enum.Enum):
    ONE = 1


@dataclass
class ForeignRecord:
    value: int = 0


class Trap:
    """What a pickle makes of it touches a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_were(value):
    found = loads(dumps(value))
    assert found == value and type(found) is type(value)


def test_not_a_number_comes_back():
    assert str(loads(dumps(float("nan")))) == "nan"


@pytest.mark.parametrize("array", ARRAYS, ids=lambda each: f"{each.dtype} {each.shape}")
def test_arrays_come_back_in_memory_of_their_own(array):
    found = loads(dumps({"a": [array]}))["a"][0]
    assert found.dtype == array.dtype and found.shape == array.shape
    assert np.array_equal(found, array)
    found[...] = 0  # it can be written


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda each: f"{each.dtype} {tuple(each.shape)}")
def test_tensors_come_back_in_memory_of_their_own(tensor):
    found = loads(dumps((tensor,)))[0]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert torch.equal(found, tensor.detach().resolve_conj())
    found.zero_()


def test_data_classes_and_named_tuples_of_this_package_come_back():
    tier = Tier(0, 5, "gpu", 2, ((0,), (1,)), ((0, 1), (0, 1)))
    rates = Rates(*map(float, range(len(Rates._fields))))
    found = loads(dumps([tier, rates]))
    assert found == [tier, rates] and type(found[1]) is Rates


@pytest.mark.parametrize(
    "value",
    [
        object(), Foreign.ONE, ForeignRecord(), Counter(a=1), np.array([object()]),
        np.array(["text"]), np.zeros(2, "i4,f4"), nn.Parameter(torch.zeros(1)), len, Tier,
        torch.zeros(2, 2).to_sparse(), torch.empty(1, device="meta"), [[Foreign.ONE]],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_nothing_else_is_written(value):
    with pytest.raises(NotPlainError):
        dumps(value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_not_written():
    with pytest.raises(NotPlainError):
        dumps(torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))


def written(tree: Any, *buffers: bytes) -> bytes:
    """What somebody who knows the layout may write."""
    head = json.dumps([tree, [len(each) for each in buffers]]).encode()
    return struct.pack("!Q", len(head)) + head + b"".join(buffers)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00" * 7, struct.pack("!Q", 1 << 60) + b"[]", written(1)[:-1],
        written({"record": [["os", "stat_result"], [1]]}),
        written({"record": [["subprocess", "Popen"], ["ls"]]}),
        written({"object": [["dgl_mgpu.placement.plan", "Tier"], None]}),
        written({"enum": [["dgl_mgpu.placement.plan", "Tier"], "x"]}),
        written({"record": [["dgl_mgpu.comm.serialization", "Path"], ["x"]]}),
        written({"record": [["dgl_mgpu.comm.serialization", "sys.modules"], []]}),
        written({"record": [["dgl_mgpu.placement.plan", "Tier"], [1]]}),
        written({"record": [["dgl_mgpu.not_loaded", "Tier"], [1]]}),
        written({"array": [0, "O", [1]]}, bytes(8)),
        written({"array": [0, "i4,O", [1]]}, bytes(16)),
        written({"array": [0, "<i8", [2]]}, bytes(8)),
        written({"array": [1, "<i8", [1]]}, bytes(8)),
        written({"tensor": [0, "torch.float32", [1 << 40]]}, bytes(8)),
        written({"tensor": [0, "torch.float32", [-1, -2]]}, bytes(8)),
        written({"tensor": [0, "float32", [2]]}, bytes(8)), written({"eval": "1"}),
        written({"tensor": [0, "torch.qint8", [8]]}, bytes(8)), written({"torch dtype": "quint8"}),
        written({"tuple": 1, "list": 2}), written({"dict": [[[], 1]]}),
    ],
)  # fmt: skip
def test_bytes_of_others_are_refused(data):
    with pytest.raises(NotPlainError):
        loads(data)


def test_a_pickle_is_not_run(tmp_path):
    data = pickle.dumps(Trap(tmp_path / "touched"))
    for each in (data, written({"bytes": 0}, data), struct.pack("!Q", len(data)) + data):
        with contextlib.suppress(NotPlainError):
            assert isinstance(loads(each), bytes)
    assert not list(tmp_path.iterdir())


def test_damaged_bytes_are_read_or_refused_and_nothing_else():
    draw = random.Random(0)
    plain = dumps({"a": [TENSORS[0], ARRAYS[0], (1, "text", b"bytes")], "b": Path("x")})
    for _ in range(3000):
        data = bytearray(plain)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            data[place : place + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 3))
        with contextlib.suppress(NotPlainError):
            loads(bytes(data))
