"""The ``torch.library`` namespace of this package's operators, ``torch.ops.dgl_mgpu``.

:class:`Operator` is an operator's specification: one Python function, from whose signature the
schema follows and whose body is the fake implementation.  The CPU's and the GPU's implementation
are registered with it; they take the same parameters.  On tensors of a device that has no
implementation torch's dispatcher raises NotImplementedError.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

NAMESPACE = "dgl_mgpu"
library = torch.library.Library(NAMESPACE, "FRAGMENT")

#: Annotations of a specification: a tensor that the operator writes to, and integers that may be
#: symbolic while a graph is compiled, as sizes of tensors are.  Others are constants of the graph.
Written = Annotated[Tensor, "written"]
Size = Annotated[int, "SymInt"]
Sizes = Annotated[Sequence[int], "SymInt[]"]

_Function = Callable[..., Any]
#: Implementations that may be called without torch's dispatcher, by operator and device type.
_direct: dict[tuple[str, str], _Function] = {}
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    torch.dtype: "ScalarType",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    type(None): "()",
}


class Operator:
    """An operator, specified by a function: its signature, and its fake implementation.

    A parameter may be a group: a NamedTuple, such as what operators see of a view.  In the schema
    its fields take its place; those of a group that several parameters are follow the parameter's
    name.  A group that may be None is None where its first field is.  The operator has the name of
    the function, without ``_op``.
    """

    def __init__(self, function: _Function) -> None:
        self.name = function.__name__.removesuffix("_op")
        self._parameters = dict(inspect.signature(function).parameters)
        self._hints = typing.get_type_hints(function, include_extras=True)
        returns = _schema_type(self._hints.pop("return"))
        written = iter("abcdefgh")
        arguments = [
            f"{_schema_type(hint, written)} {name}{_schema_default(default)}"
            for name, hint, default in self._fields()
        ]
        self.schema = f"{self.name}({', '.join(arguments)}) -> {returns}"
        library.define(self.schema)
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self.flat(function), lib=library)

    def cpu(self, function: _Function) -> _Function:
        """Register the implementation for tensors on the CPU; returns it as :meth:`flat` does."""
        implementation = self.flat(function)
        library.impl(self.name, implementation, "CPU")
        return implementation

    def cuda(self, function: _Function) -> _Function:
        """Register the implementation on CUDA, for :func:`direct` too; returns it flat."""
        implementation = self.flat(function)
        library.impl(self.name, implementation, "CUDA")
        _direct[self.name, "cuda"] = implementation
        return implementation

    def start(self, function: _Function) -> _Function:
        """Have :func:`direct` find a function that only starts the operator on CUDA, by the
        operator's name and ``_async``; returns it flat."""
        implementation = self.flat(function)
        _direct[f"{self.name}_async", "cuda"] = implementation
        return implementation

    def flat(self, function: _Function) -> _Function:
        """A function of the schema's arguments that calls one of the specification's.

        A function of ``*arguments`` takes the schema's already.  Raises TypeError if the function
        has other parameters than the specification.
        """
        parameters = inspect.signature(function).parameters
        if [parameter.kind.name for parameter in parameters.values()] == ["VAR_POSITIONAL"]:
            return function
        if list(parameters) != list(self._parameters):
            raise TypeError(f"{function} has other parameters than the operator {self.name}")
        names: dict[str, Any] = {"function": function, "new": tuple.__new__}
        arguments = []
        for name in self._parameters:
            group, is_optional = _group(self._hints[name])
            if group is not None:
                names[group.__name__] = group
                fields = [self._prefix(name, group) + field for field in group._fields]
                packed = f"new({group.__name__}, ({', '.join(fields)},))"
                name = f"None if {fields[0]} is None else {packed}" if is_optional else packed
            arguments.append(name)
        flat = []
        for name, _, default in self._fields():
            if default is not inspect.Parameter.empty:
                names[f"default_{name}"] = default
                name = f"{name}=default_{name}"
            flat.append(name)
        # Written out, as a NamedTuple's constructor is: it runs at every call.
        call = eval(f"lambda {', '.join(flat)}: function({', '.join(arguments)})", names)
        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__module__ = function.__module__
        return call

    def _prefix(self, parameter: str, group: Any) -> str:
        """What precedes the names of a group's fields in the schema."""
        groups = [_group(hint)[0] for hint in self._hints.values()]
        return f"{parameter}_" if groups.count(group) > 1 else ""

    def _fields(self) -> list[tuple[str, Any, Any]]:
        """Name, annotation and default of each of the schema's arguments."""
        fields = []
        for name, parameter in self._parameters.items():
            group, is_optional = _group(self._hints[name])
            if group is None:
                fields.append((name, self._hints[name], parameter.default))
                continue
            for field, hint in typing.get_type_hints(group, include_extras=True).items():
                default = group._field_defaults.get(field, parameter.default)
                field = self._prefix(name, group) + field
                fields.append((field, hint | None if is_optional else hint, default))
        # No argument without a default may follow one with a default.
        none = inspect.Parameter.empty
        required = max((n for n, (*_, default) in enumerate(fields) if default is none), default=-1)
        return [(*field[:2], none if n < required else field[2]) for n, field in enumerate(fields)]


def _optional(hint: Any) -> tuple[Any, bool]:
    """An annotation without ``| None``, and whether it had it."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
    return inner, True


def _group(hint: Any) -> tuple[Any, bool]:
    """The NamedTuple that an annotation names, or None, and whether None may be passed for it."""
    inner, is_optional = _optional(hint)
    return (inner if hasattr(inner, "_fields") else None), is_optional


def _schema_type(hint: Any, written: Any = None) -> str:
    hint, is_optional = _optional(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        tag = arguments[1]
        name = f"Tensor({next(written)}!)" if tag == "written" else tag
    elif origin is tuple:
        name = f"({', '.join(map(_schema_type, arguments))})"
    elif origin is not None:
        name = f"{_schema_type(arguments[0])}[]"
    else:
        name = _SCHEMA_TYPES[hint]
    return f"{name}?" if is_optional else name


def _schema_default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return ""
    return f"={list(default) if isinstance(default, tuple) else default}"


def call(name: str, tensors: tuple[Tensor | None, ...], *others: Any) -> Any:
    """Call an operator on its tensors, of which the first is not None, and its other arguments.

    Leaves out torch's dispatcher where nobody would notice: on a GPU it costs the host as much as
    a launch.
    """
    function = direct(name, tensors)
    if function is not None:
        return function(*tensors, *others)
    return getattr(torch.ops.dgl_mgpu, name).default(*tensors, *others)


def direct(
    name: str, tensors: tuple[Tensor | None, ...], *, even_profiled: bool = False
) -> _Function | None:
    """The implementation for these tensors, or None where torch's dispatcher is needed.

    With ``even_profiled`` it is returned under a profiler too, wrapped so that the profiler records
    the operator.
    """
    if torch.compiler.is_compiling():
        return None
    is_profiled = torch.autograd._profiler_enabled()
    if is_profiled and not even_profiled:
        return None
    function = _direct.get((name, tensors[0].device.type))  # type: ignore[union-attr]
    if function is None or _is_observed(tensors):
        return None
    return _recorded(name, function) if is_profiled else function


def _recorded(name: str, function: _Function) -> _Function:
    """A function that a profiler records as an operator, to which it attributes the kernels."""

    def call(*arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"dgl_mgpu::{name}"):
            return function(*arguments)

    return call


def _is_observed(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a mode, a transform, a tensor subclass or autograd has to see a call."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or not _PLAIN.issuperset(map(type, tensors))
    ):
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
