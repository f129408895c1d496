"""Imported by every Python at its start while `dgl_mgpu.dgl.child` is in effect.

It waits for the first ``import dgl`` or ``import ogb`` and imports dgl_mgpu before it; a process
that imports neither pays nothing. The environment's own sitecustomize, which this one hides, is
run as usual.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_SITE_PACKAGES = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 3))


class _BeforeDGL:
    """Imports dgl_mgpu, which registers the real hook, when DGL or ogb is first asked for."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("dgl", "ogb"):
            return None
        sys.meta_path.remove(self)
        if "dgl_mgpu" not in sys.modules:
            # Run from a checkout, the package is in no folder this process searches.
            sys.path.append(_SITE_PACKAGES)
            try:
                import dgl_mgpu  # noqa: F401
            finally:
                sys.path.remove(_SITE_PACKAGES)
        return importlib.util.find_spec(name)


if os.environ.get("_DGL_MGPU_RUNNER_PREFIX") == sys.prefix:
    sys.meta_path.insert(0, _BeforeDGL())

_hidden = PathFinder.find_spec(
    "sitecustomize", [p for p in sys.path if os.path.abspath(p) != _HERE]
)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
