"""In place of ``dgl._ffi.object``: DGL's objects hold Python's, and no pointer to C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgl._ffi.object_generic import ObjectGeneric as ObjectGeneric
from dgl._ffi.object_generic import _set_class_object_base
from dgl._ffi.object_generic import convert_to_object as convert_to_object


class ObjectBase:
    """An object of DGL's; what it stands for is ``handle``."""

    handle: Any

    def __init_handle_by_constructor__(self, fconstructor: Callable[..., Any], *args: Any) -> None:
        """Become what a function of the C API makes."""
        made = fconstructor(*args)
        self.__class__ = type(made)
        vars(self).update(vars(made))

    def same_as(self, other: object) -> bool:
        """Whether both are one object."""
        return self is other or (
            isinstance(other, ObjectBase)
            and getattr(self, "handle", self) is getattr(other, "handle", other)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_object, (type(self),), self.__getstate__()

    def __getstate__(self) -> Any:
        raise RuntimeError("__getstate__ is not supported for object type")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("__setstate__ is not supported for object type")


def _new_object(cls: Any) -> Any:
    """An object of a class that is being unpickled; pickles name DGL's function of this name."""
    return cls.__new__(cls)


def register_object(type_key: Any = None) -> Any:
    """Decorates classes of DGL's objects; as DGL's, with a name or without."""
    return (lambda cls: cls) if isinstance(type_key, str) else type_key


_set_class_object_base(ObjectBase)
