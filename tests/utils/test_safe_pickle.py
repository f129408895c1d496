"""NumPy's arrays of pickles, against what pickle makes of them; and what is no array of numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from dgl_mgpu.data.planetoid import _read_pickle
from dgl_mgpu.dgl.patches.ogb import load as load_of_ogb
from dgl_mgpu.errors import DataFormatError

_reconstruct = np.empty(0).__reduce__()[0]


class Built:
    """Pickled as a call, and the state that the object it makes is given."""

    def __init__(self, *how) -> None:
        self.how = how

    def __reduce__(self):
        return self.how


def dtype(code: str, state: tuple) -> Built:
    return Built(np.dtype, (code, False, True), state)


def array(of: object, content: object, shape: tuple = (1,)) -> Built:
    return Built(_reconstruct, (np.ndarray, (0,), b"b"), (1, shape, of, False, content))


STRUCT = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
FLOAT = (3, "<", None, None, None, -1, -1, 0)
ODD = {
    "structure with objects": array(dtype("V8", STRUCT), b"\x10" * 8),
    "number with the state of a structure": array(dtype("f8", STRUCT), b"\x10" * 8),
    "number with a subarray": array(
        dtype("f8", (3, "|", (np.dtype("O"), (1,)), None, None, 8, 8, 0)), b"\x10" * 8
    ),
    "objects": array(np.dtype("O"), [1]),
    "numbers in a list": array(dtype("f8", FLOAT), [Built(list, ())]),
    "text": np.array(["text"]),
    "times": np.array([0], "M8[s]"),
    "more than there is": array(dtype("f8", FLOAT), b"\x10" * 8, (10**15,)),
    "empty and large": Built(_reconstruct, (np.ndarray, (10**13,), b"b")),
    "made by itself": Built(np.ndarray, ((10**13,),)),
    "scalar of objects": Built(np.float32(1).__reduce__()[0], (np.dtype("O"), b"\x10" * 8)),
}


def of_planetoid(content: object, path, protocol: int) -> object:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return _read_pickle(path)


def of_ogb(content: object, path, protocol: int) -> object:
    torch.save(content, path, pickle_protocol=protocol)
    return load_of_ogb(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("read", [of_planetoid, of_ogb])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_what_is_no_array_of_numbers_is_refused(tmp_path, odd, read, protocol):
    """Before, some of these ended the process, as soon as an array was looked at or let go."""
    with pytest.raises(DataFormatError):
        read({"feat": [odd]}, tmp_path / "file", protocol)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("code", ["?", "i1", "<u2", ">i4", "<i8", "f2", "<f4", ">f8", "c8"])
def test_numbers_come_back_as_they_were(tmp_path, code, protocol):
    rows = np.arange(12).reshape(3, 4).astype(code)
    content = {"c": rows, "fortran": np.asfortranarray(rows), "nested": [(rows[0], rows[0, 1])]}
    content["empty"] = rows[:0]
    found = of_ogb(content, tmp_path / "file", protocol)
    expected = pickle.loads(pickle.dumps(content, protocol=protocol))
    one, scalar = found["nested"][0]
    for name in ("c", "fortran", "empty"):
        assert type(found[name]) is np.ndarray and found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], content[name])
        assert found[name].flags.writeable or protocol == 5
    np.testing.assert_array_equal(one, rows[0])
    assert scalar == rows[0, 1] and type(scalar) is type(rows[0, 1])
    assert pickle.loads(pickle.dumps(found["c"])).tolist() == rows.tolist()


class Program(torch.nn.Module):
    """Writes a line when torch reads it."""

    @torch.jit.export
    def __getstate__(self):
        return (self.training,)

    @torch.jit.export
    def __setstate__(self, state: tuple[bool]):
        print("it ran")
        self.training = state[0]


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_a_program_is_not_run(tmp_path, capfd):
    torch.jit.script(Program()).save(tmp_path / "file")
    with pytest.raises(DataFormatError, match="it is a TorchScript program"):
        load_of_ogb(tmp_path / "file")
    assert "it ran" not in capfd.readouterr().out


def test_a_matrix_that_is_far_larger_than_its_file(tmp_path):
    from scipy import sparse

    from dgl_mgpu.data.planetoid import _matrix

    path = tmp_path / "ind.cora.allx"
    path.write_bytes(pickle.dumps(sparse.csr_matrix((3, 10**9))))
    with pytest.raises(DataFormatError, match="3 x 1000000000 values in"):
        _matrix(path)
