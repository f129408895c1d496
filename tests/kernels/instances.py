"""Which instances of the kernels' templates operators launch."""

from __future__ import annotations

import functools
import itertools
import re

from dgl_mgpu.utils.resources import resource_folder

_IDS = ("int", "dgl_mgpu::int64")
_SMALL = ("unsigned short", "unsigned char")
_OPERANDS = tuple(f"dgl_mgpu::{name}" for name in ("Absent", "Vectors", "Scalars", "EntryScalar"))
_FLOATS = ("float", "double", "dgl_mgpu::Float16", "dgl_mgpu::BFloat16")
#: What may stand for a template's parameter, by its name; first for all files.
_ARGUMENTS = {
    "": dict.fromkeys(
        ("Id", "Neighbor", "Node", "Position", "Seed", "Sent", "Sorted", "Source", "Start"), _IDS
    ),
    "attention.cu": {
        "Element": _FLOATS,
        "Score": tuple(f"dgl_mgpu::{name}" for name in ("Additive", "GATv2", "DotOfValues", "Dot")),
        "Pass": tuple(f"dgl_mgpu::{name}" for name in ("Forward", "Destinations", "Sources")),
        "kDropout": ("false", "true"),
        "kTerms": ("false", "true"),
        "kVector": ("4", "8", "2", "1"),
        "kVectors": ("1", "2", "4"),
        "kLanes": ("32", "16", "8", "4", "2", "1"),
        "kHeads": ("1", "2", "4", "8", "16", "32"),
    },
    "attention_rows.cu": {
        "Element": _FLOATS,
        "Result": ("float", "double"),
        "kVector": ("4", "8", "2", "1"),
        "kLanes": ("32", "16", "8", "4", "2", "1"),
    },
    "copy_list.cu": {"kItems": ("16", "48")},
    "extremes.cu": {"Element": _FLOATS, "kHighest": ("false", "true")},
    "gather.cu": {
        "Vector": ("dgl_mgpu::Vector16", "dgl_mgpu::uint64", "dgl_mgpu::uint32", *_SMALL),
        "Stored": (
            "double",
            "float",
            "dgl_mgpu::Float16",
            "dgl_mgpu::BFloat16",
            "dgl_mgpu::Float8E4M3",
            "dgl_mgpu::Float8E5M2",
            "signed char",
            "unsigned char",
            "short",
            "int",
            "dgl_mgpu::int64",
        ),
        "Wanted": ("float", "dgl_mgpu::Float16", "dgl_mgpu::BFloat16", "double"),
        "kElements": ("16", "8", "4", "2", "1"),
        "kUnroll": ("8",),
    },
    "edge_softmax.cu": {
        "Score": _FLOATS,
        "kColumns": ("1", "2", "4", "8"),
        "kGradient": ("false", "true"),
    },
    "sample.cu": {"kPadded": ("true", "false"), "kOrdered": ("true", "false")},
    "sddmm.cu": {
        "Element": _FLOATS,
        "kElements": ("1", "2", "4", "8"),
        "kRepeats": ("1", "2", "4", "8"),
    },
    "unique.cu": {"kAmple": ("true", "false")},
    "scatter.cu": {
        "Vector": ("uint4", "uint2", "unsigned int", *_SMALL),
        "Rule": ("dgl_mgpu::SGD", "dgl_mgpu::Adagrad", "dgl_mgpu::Adam"),
    },
    "spmm.cu": {
        "Element": _FLOATS,
        "Operation": tuple(f"dgl_mgpu::{name}" for name in ("Copy", "Add", "Sub", "Mul", "Div")),
        "Left": ("dgl_mgpu::Vectors", "dgl_mgpu::Scalars"),
        "Right": (*_OPERANDS, "dgl_mgpu::EntryShare"),
        "Reduction": tuple(
            f"dgl_mgpu::{name}" for name in ("Total", "Added", "Mean", "Largest", "Smallest")
        ),
        "kVector": ("4", "8", "2", "1"),
        "kLanes": ("32", "16", "8", "4", "2", "1"),
        "kRepeats": ("1", "2", "4", "8"),
    },
    "spmm_remote.cu": {
        "Element": _FLOATS,
        "kWeighted": ("false", "true"),
        "kVector": ("4", "8", "2", "1"),
        "kLanes": ("32", "16", "8", "4", "2", "1"),
        "kWarps": tuple(str(warps) for warps in range(1, 17)),
    },
    "spmm_transposed.cu": {
        "Element": _FLOATS,
        "Left": _OPERANDS[:3],
        "Right": _OPERANDS,
        "kVector": ("4", "8", "2", "1"),
        "kLanes": ("32", "16", "8", "4", "2", "1"),
    },
}
_KERNEL = re.compile(
    r"(?:template <(?P<parameters>[^>]*)>\s*)?"
    r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(?P<name>\w+)\("
)


def sources() -> list[str]:
    """The files with kernels."""
    return sorted(path.name for path in resource_folder("kernels").glob("*.cu"))


def _kernels(source: str) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Each kernel's name and what may stand for its parameters."""
    found = _KERNEL.findall((resource_folder("kernels") / source).read_text())
    if not found:
        raise LookupError(f"{source} has no kernel")
    known = _ARGUMENTS[""] | _ARGUMENTS.get(source, {})
    kernels = []
    for parameters, name in found:
        names = [parameter.split()[-1] for parameter in parameters.split(",") if parameter]
        if unknown := sorted(set(names) - known.keys()):
            raise LookupError(f"{source}, {name}: tests/kernels/instances.py lacks {unknown}")
        kernels.append((name, [known[parameter] for parameter in names]))
    return kernels


def _expression(name: str, arguments: tuple[str, ...]) -> str:
    return f"dgl_mgpu::{name}" + (f"<{', '.join(arguments)}>" if arguments else "")


@functools.cache
def instances(source: str) -> frozenset[str]:
    """Every instance of the kernels in a file, as expressions.

    Raises
    ------
    LookupError
        If the file has no kernel, or a template's parameter has a name unknown here.
    """
    return frozenset(
        _expression(name, arguments)
        for name, choices in _kernels(source)
        for arguments in itertools.product(*choices)
    )


def representatives(source: str, most: int) -> list[str]:
    """Few of the instances, at most ``most`` of each kernel.

    Unless that is too few, everything that may stand for a parameter is in one of them.
    Neighbouring parameters begin at different places of their lists: ids of different types
    meet, which is where types are mistaken for each other.
    """
    return [
        _expression(
            name, tuple(choice[(i + place) % len(choice)] for place, choice in enumerate(choices))
        )
        for name, choices in _kernels(source)
        for i in range(min(most, max(map(len, choices), default=1)))
    ]
