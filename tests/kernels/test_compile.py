"""Every kernel compiles for every architecture that is supported, on a machine without a GPU."""

from __future__ import annotations

import re

import pytest

from dgl_mgpu.ops.device import source_text
from dgl_mgpu.utils.resources import resource_folder
from tests.kernels.instances import instances, representatives, sources

#: Instances of each kernel that are compiled for an architecture: for one, all types are tried.
#: Those between differ by less: they take their time in the long tests alone.
ARCHITECTURES = {"sm_75": 1, "sm_90": 100, "sm_100": 1, "sm_120": 1}
BETWEEN = ("sm_80", "sm_86", "sm_89", "sm_103", "sm_121")


@pytest.fixture(scope="module")
def core():
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings, to call the compiler")
    return pytest.importorskip("cuda.core", reason="needs cuda-core, to call the compiler")


@pytest.mark.parametrize(
    "architecture",
    [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in BETWEEN)],
)
@pytest.mark.parametrize("source", sources())
def test_kernels_compile(core, source, architecture):
    expressions = representatives(source, most=ARCHITECTURES.get(architecture, 1))
    options = core.ProgramOptions(std="c++17", arch=architecture)
    program = core.Program(source_text(source), "c++", options)
    code = program.compile("cubin", name_expressions=tuple(expressions))
    assert set(code.symbol_mapping) == set(expressions)


@pytest.mark.parametrize("source", sources())
def test_every_kernel_is_represented(source):
    text = (resource_folder("kernels") / source).read_text()
    compiled = set(representatives(source, most=1))
    assert compiled <= instances(source)
    assert len(compiled) == len(re.findall("^__global__", text, re.MULTILINE))


def test_a_mistake_does_not_compile(core):
    options = core.ProgramOptions(std="c++17", arch="sm_90")
    program = core.Program("__global__ void f() { here }", "c++", options)
    with pytest.raises(Exception, match="here"):
        program.compile("cubin")
