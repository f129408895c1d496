"""docs/private-names.md: all names that are not public are there, and all that are there exist."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import pytest
import torch

from dgl_mgpu.dgl.environment import VersionRange
from tests.docs.pages import ROOT
from tests.docs.private_names import INTERNAL, LIBRARIES, private_names

TABLE = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "private-names.md").read_text(), re.M)
LISTED = [name for cell in TABLE for name in re.findall(r"`(.*?)`", cell)]
USED = private_names(ROOT / "dgl_mgpu")


def test_the_page_lists_each_name_that_is_used_once():
    assert sorted(LISTED) == sorted(USED)


# What some of what is supported has not, and where there is no need of it.
ABSENT = {
    "argparse.ArgumentParser._check_help": sys.version_info < (3, 14),
    "torch.distributed._symmetric_memory": not VersionRange("torch", "2.6", "3").holds(
        torch.__version__
    ),
    "torch._C._cuda_getCurrentRawStream": torch.version.cuda is None,
    "torch._C._cuda_getDevice": torch.version.cuda is None,
}


@pytest.mark.parametrize("name", LISTED)
def test_what_is_installed_has_it(name):
    if ABSENT.get(name):
        pytest.skip("is not needed with what is installed")
    find(name)


def find(name: str) -> Any:
    """The object of a name, of which any part may be a module."""
    found = importlib.import_module(name.partition(".")[0])
    place = found.__name__
    for part in name.split(".")[1:]:
        place += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(place)
    return found


def test_a_name_that_has_gone_is_noticed():
    with pytest.raises(ModuleNotFoundError):
        find("torch._C._a_name_that_torch_never_had")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch\ntorch._C._nn.gelu(x)", {"torch._C._nn.gelu"}),
        ("from torch._utils import ExceptionWrapper", {"torch._utils.ExceptionWrapper"}),
        ("import numba.core.cgutils", {"numba.core.cgutils"}),
        ("if TYPE_CHECKING:\n    from torch._C import _Stream", set()),
        ("torch.nn.Module.__call__; dgl._ffi; x._version; torch.ops.a.b", set()),
    ],
)
def test_names_are_found_in_code(tmp_path, code, names):
    (tmp_path / "code.py").write_text(code)
    assert set(private_names(tmp_path)) == names
    assert all(name.startswith((*LIBRARIES, *INTERNAL)) for name in names)
