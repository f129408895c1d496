"""A module as one of its users sees it, with some of its names replaced."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any


def module_with(module: ModuleType, **names: Any) -> ModuleType:
    """A view of `module` in which `names` differ; everything else is looked up in `module`.

    Bound in the place of ``import numpy as np`` in one module, it changes what that module calls
    and nothing for anyone else.
    """
    view = ModuleType(module.__name__, f"{module.__name__}, but for {', '.join(names)}.")
    vars(view).update(names, __getattr__=partial(getattr, module))
    return view
