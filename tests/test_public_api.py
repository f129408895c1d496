"""What others build on, as it was reviewed: public names, their parameters, configuration keys.

Public is what the pages in docs/reference document. ``python -m tests.test_public_api`` writes it
anew to `FROZEN`, whose changes are to be reviewed like those of code (docs/releasing.md).
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dgl_mgpu
from dgl_mgpu import ops
from dgl_mgpu.data import names as data_sets
from dgl_mgpu.machine import preset_names
from dgl_mgpu.placement import POLICIES
from dgl_mgpu.train.compose import compose
from dgl_mgpu.utils.resources import resource_folder

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).with_name("public_api.txt")
AGAIN = "python -m tests.test_public_api"
#: Modules that are read and not imported, which only machines with GPUs can.
NEEDS_GPUS = ("dgl_mgpu.ops.numba_cuda",)

#: What public functions return for this package alone, and is handed on without a look inside.
OPAQUE = ("SlotBatch", "Reads", "Table")

_ATTRIBUTES = re.compile(r"^Attributes\n-+\n(.*?)(?:^\w+\n-+$|\Z)", re.M | re.S)
_SHAPE = re.compile(r"\bshape")
_DIRECTIVE = re.compile(r"^\.\. auto(module|class|function|data):: (\S+)", re.M)


def documented() -> dict[str, Any]:
    """Everything that the reference documents, by its full name: itself, or its syntax."""
    found: dict[str, Any] = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for kind, name in _DIRECTIVE.findall(page.read_text()):
            found.update(_members(name) if kind == "module" else {name: _imported(name)})
    return found


def _imported(name: str) -> Any:
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


def _members(name: str) -> dict[str, Any]:
    """The public names of a module: those in its ``__all__``, or defined in it."""
    if name in NEEDS_GPUS:
        source = ast.parse((ROOT / name.replace(".", "/")).with_suffix(".py").read_text())
        return {
            f"{name}.{node.name}": node
            for node in source.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        }
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [
        member
        for member, value in vars(module).items()
        if not member.startswith("_") and getattr(value, "__module__", None) == name
    ]
    return {f"{name}.{member}": getattr(module, member) for member in public}


def lines() -> list[str]:
    """The public interface, a name or key a line."""
    return [
        f"# Written by {AGAIN}; see docs/releasing.md.",
        *(line for name, value in sorted(documented().items()) for line in _described(name, value)),
        "",
        *_configuration(),
    ]


def _described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, ast.FunctionDef):
        yield f"{name}({', '.join(each.arg for each in value.args.args)})"
    elif isinstance(value, ast.ClassDef):
        yield name
    elif inspect.isclass(value):
        own = _is_ours(value.__init__) and not issubclass(value, Exception)
        yield f"{name}{_parameters(value) if own else ''}{_bases(value)}"
        yield from _described_members(name, value)
    elif callable(value):
        yield f"{name}{_parameters(value)}"
    elif isinstance(value, dict):
        yield f"{name}: {', '.join(map(str, value))}"
    else:
        yield f"{name} = {value!r}"


def _described_members(name: str, kind: type) -> Iterator[str]:
    """Public methods, properties and fields of a class and of its bases in this package."""
    members: dict[str, Any] = {}
    for base in reversed([each for each in kind.__mro__ if _is_ours(each)]):
        members |= vars(base)
        if is_dataclass(base):
            members |= dict.fromkeys(base.__dataclass_fields__)
    for member, value in sorted(members.items()):
        if member.startswith("_"):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_call = inspect.isfunction(function)
        yield f"{name}.{member}{_parameters(function) if is_call else ''}"
    attributes = _ATTRIBUTES.search(inspect.getdoc(kind) or "")
    for line in re.findall(r"^(\w[\w, ]*) : ", attributes[1] if attributes else "", re.M):
        yield from (f"{name}.{each}" for each in line.split(", ") if each not in members)


def _bases(kind: type) -> str:
    """Of an error, since callers catch it by them."""
    if not issubclass(kind, Exception):
        return ""
    bases = [base.__name__ for base in kind.__mro__[1:] if issubclass(base, Exception)]
    return f": {', '.join(base for base in bases if not base.startswith('_'))}"


def _is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "dgl_mgpu"


def _parameters(function: Any) -> str:
    """Names and defaults: annotations are mypy's, and written in docstrings."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of what is written in C
        return ""
    parameters = [
        parameter.replace(annotation=parameter.empty, default=_shown(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _shown(default: Any) -> Any:
    """A default; of a function only that there is one, since its text has its address."""
    return ... if inspect.isfunction(default) else default


def _configuration() -> Iterator[str]:
    def leaves(node: Any, prefix: str) -> Iterator[str]:
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key} = {value!r}"

    with mock.patch.dict(os.environ):
        os.environ.pop("DGL_MGPU_DATA", None)
        yield from leaves(asdict(compose([])), "")
    folder = resource_folder("configs")
    for group in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield f"{group.name}: {', '.join(sorted(path.stem for path in group.glob('*.yaml')))}"
    yield f"data.name: {', '.join(data_sets())}"
    yield f"store.policy: {', '.join(POLICIES)}"
    yield f"topology: {', '.join(preset_names())}"


def test_the_public_interface_is_as_reviewed():
    was, is_now = FROZEN.read_text().splitlines(), lines()
    changes = "\n".join(
        line
        for line in difflib.unified_diff(was, is_now, "reviewed", "now", n=0, lineterm="")
        if not line.startswith("@@")
    )
    assert not changes, (
        f"the public interface or a configuration key has changed:\n{changes}\n"
        f"If that is meant, run '{AGAIN}', commit {FROZEN.relative_to(ROOT)} with the change, say "
        "it in CHANGELOG.md, and see docs/releasing.md for what the version becomes."
    )


@pytest.mark.parametrize("module", [dgl_mgpu, ops], ids=lambda module: module.__name__)
def test_all_that_is_exported_is_documented(module):
    known = {id(value) for value in documented().values()}
    assert [name for name in module.__all__ if id(getattr(module, name)) not in known] == []


def test_what_is_documented_has_docstrings():
    undocumented = [
        name
        for name, value in documented().items()
        if (callable(value) or isinstance(value, ast.FunctionDef)) and not _docstring(value)
    ]
    assert undocumented == []


def _functions() -> Iterator[tuple[str, Any]]:
    """Public functions, methods and properties of this package, by their full names."""
    for name, value in documented().items():
        if isinstance(value, ast.AST):
            continue
        if not inspect.isclass(value):
            if inspect.isfunction(value):
                yield name, value
            continue
        for member in dir(value):
            found = inspect.getattr_static(value, member)
            found = found.fget if isinstance(found, property) else found
            found = getattr(found, "__func__", found)
            if not member.startswith("_") and inspect.isfunction(found) and _is_ours(found):
                yield f"{name}.{member}", found


def test_what_public_functions_return_is_documented():
    """Who gets an object from the public interface finds in the reference what it can do."""
    known = {id(value) for value in documented().values()}
    unknown = []
    for name, function in _functions():
        returned = str(inspect.signature(function).return_annotation)
        for word in set(re.findall(r"\b[A-Z]\w+", returned)).difference(OPAQUE):
            kind = function.__globals__.get(word)
            if inspect.isclass(kind) and _is_ours(kind) and id(kind) not in known:
                unknown.append(f"{name} returns {word}")
    assert unknown == []


def shapeless(docstring: str) -> list[str]:
    """Parameters and results of a numpydoc docstring that are tensors, and of no stated shape."""
    entries = re.findall(r"^(\w.*?) : (.*\n(?:[ ]+.*\n|\n(?=[ ]))*)", docstring + "\n", re.M)
    return [names for names, text in entries if "Tensor" in text and not _SHAPE.search(text)]


def test_tensors_of_public_functions_have_shapes():
    missing = {name: shapeless(inspect.getdoc(value) or "") for name, value in _functions()}
    assert {name: names for name, names in missing.items() if names} == {}


def test_a_tensor_without_a_shape_is_found():
    text = "Add.\n\nParameters\n----------\na : Tensor, shape (n,)\nb : Tensor\n    Or none.\n"
    assert shapeless(text) == ["b"]
    assert shapeless(text + "c : Tensor\n    Like a.\n\n    Of shape (m, k).\n") == ["b"]


def _docstring(value: Any) -> str | None:
    return ast.get_docstring(value) if isinstance(value, ast.AST) else inspect.getdoc(value)


if __name__ == "__main__":
    FROZEN.write_text("\n".join(lines()) + "\n")
    sys.stdout.write(f"wrote {FROZEN.relative_to(Path.cwd())}\n")
