"""Run an unmodified DGL script: ``python -m dgl_mgpu script.py args…`` or ``-m module args…``.

The script runs as if Python had been given it directly, in this very process, with
``import dgl`` mended. So do all Python processes it starts: spawned or forked by
multiprocessing, DataLoader workers, ranks of torchrun, subprocesses.

Options before the script say how the store keeps graphs that it gives to
``DataLoader(use_uva=True)`` (`dgl_mgpu.dgl.shared_graphs`)::

    python -m dgl_mgpu --store.gpu-memory=16GiB node_classification_sage.py --gpu 0,1
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import NoReturn

from dgl_mgpu.dgl import copies, install
from dgl_mgpu.dgl.child import mend_children
from dgl_mgpu.dgl.runner_options import OPTIONS, RunnerOptions, hand_on, take_options, was_told
from dgl_mgpu.errors import ConfigError, nearest

USAGE = """\
usage: python -m dgl_mgpu [OPTIONS] SCRIPT [ARGS…]
       python -m dgl_mgpu [OPTIONS] -m MODULE [ARGS…]

Run an unmodified DGL script on this machine's torch. SCRIPT is a file, or a folder or zip file
with a __main__.py. Training without a script: dgl-mgpu train --help

Graphs in DataLoader(use_uva=True, use_ddp=True) are kept in a store, once for all ranks of a
machine, in GPU memory as far as it goes. OPTIONS say how, here and in all processes that the
script starts; with any of them also where there is one rank alone:

  --store.KEY=VALUE  as in configs/store/default.yaml:
                     --store.gpu-memory=16GiB --store.policy=auto --store.disk-path=/data/rest
                     and the mini-batch to plan for, if not the DataLoader's:
                     --store.batch-size=1024 --store.fanouts=[15,10,5]
  --store=on|off     keep them in a store, as it is by default; or pin them in each process, as
                     DGL does
  --config FILE      a YAML file with such keys below 'store:'

  --capture=on|off   run models that are called with mini-batches on a GPU as CUDA graphs, where
                     these give the same, as it is by default; or kernel by kernel

  --partition[=BY]   for a script for one process that trains on a whole graph, as a rank of
                     torchrun: ranks share the graph that it moves to its device, by random (as
                     without BY), order or metis. See docs/howto/full-graph.md
"""


def main(argv: list[str]) -> None:
    """Run what `argv` names, as ``__main__``.

    Parameters
    ----------
    argv : list of str
        As after ``python`` on a command line: a script or ``-m module``, then its arguments;
        before these, options of the runner.

    Raises
    ------
    SystemExit
        With Python's own exit codes: 2 for a wrong command line or a missing file, 1 for a
        missing module. What the script raises passes through unchanged.
    """
    try:
        options, argv = take_options(argv)
    except ConfigError as error:
        _refuse(f"python -m dgl_mgpu: {type(error).__name__}: {error}")
    if argv[:1] == ["-m"] and len(argv) > 1:
        run = _prepare_module(argv[1], argv[2:])
    elif argv and not argv[0].startswith("-"):
        run = _prepare_script(argv[0], argv[1:])
    elif argv in (["-h"], ["--help"]):
        print(USAGE, end="")
        return
    else:
        wrong = "no script"
        if argv:
            wrong = f"unknown option '{argv[0]}'; {nearest(re.split('[=.]', argv[0])[0], OPTIONS)}"
        if argv[:1] in (["-m"], ["--config"]):
            wrong = f"nothing follows '{argv[0]}'"
        _refuse(f"{USAGE}\npython -m dgl_mgpu: {wrong}")
    install()
    mend_children()
    if options is None and not was_told():
        options = RunnerOptions()
    if options is not None:
        hand_on(options)
    code, namespace = run
    if options is None or options.partition is None:
        exec(code, namespace)
        copies.warn()
        return
    from dgl_mgpu.distributed.whole_view import script

    script.start(options.partition)
    exec(code, namespace)
    script.finish()


def _prepare_script(path: str, args: list[str]) -> tuple[CodeType, dict[str, object]]:
    """Set ``sys`` and ``__main__`` as ``python path args…`` does; return what to execute."""
    sys.argv[:] = [path, *args]
    absolute = os.path.abspath(path)
    spec = PathFinder.find_spec("__main__", [absolute])  # a folder or a zip file that holds one
    if spec is not None:
        if sys.flags.safe_path:
            sys.path.insert(0, "")  # Python searches such a folder even then
        sys.path[0] = absolute
        return _module_code(spec), _new_main(spec=spec, package="")
    try:
        with io.open_code(absolute) as file:
            code = compile(file.read(), absolute, "exec", dont_inherit=True)
    except OSError as error:
        what = f"[Errno {error.errno}] {error.strerror}"
        _refuse(f"{sys.executable}: can't open file {absolute!r}: {what}")
    if not sys.flags.safe_path:  # else ``python -m`` has put no working directory there
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    return code, _new_main(file=absolute)


def _prepare_module(name: str, args: list[str]) -> tuple[CodeType, dict[str, object]]:
    """Set ``sys`` and ``__main__`` as ``python -m name args…`` does; return what to execute."""
    sys.argv[:] = ["-m", *args]  # while the module's packages are imported
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        _refuse(
            f"{sys.executable}: Error while finding module specification for {name!r} "
            f"(ModuleNotFoundError: {error})",
            code=1,
        )
    if spec is None:
        _refuse(f"{sys.executable}: No module named {name}", code=1)
    code = _module_code(spec)
    sys.argv[0] = spec.origin or name
    return code, _new_main(spec=spec, package=spec.parent)


def _module_code(spec: ModuleSpec) -> CodeType:
    code = spec.loader.get_code(spec.name) if spec.loader is not None else None  # type: ignore[attr-defined]
    if code is None:
        _refuse(f"{sys.executable}: No code object available for {spec.name}", code=1)
    return code


def _new_main(
    spec: ModuleSpec | None = None, package: str | None = None, file: str | None = None
) -> dict[str, object]:
    """A fresh ``__main__``, so that a spawned child finds the script there and not this runner."""
    module = ModuleType("__main__")
    vars(module).update(
        __builtins__=__builtins__,
        __cached__=spec.cached if spec is not None else None,
        __file__=spec.origin if spec is not None else file,
        __loader__=spec.loader if spec is not None else SourceFileLoader("__main__", str(file)),
        __package__=package,
        __spec__=spec,
    )
    sys.modules["__main__"] = module
    return vars(module)


def _refuse(message: str, code: int = 2) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
