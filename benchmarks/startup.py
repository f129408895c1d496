"""Claim: ``python -m dgl_mgpu`` starts a script in little more time than its imports take.

A script that imports torch and dgl is run in new processes, whose bytecode and files are in the
system's caches. Its own imports are timed in the script; all before them is the runner's.

    python -m benchmarks.startup --out startup.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe_machine

_SCRIPT = """\
import time
begin = time.time()
import torch, dgl
print(begin, time.time())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=15, help="processes after the first")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_SCRIPT)
        times = [_run(script) for _ in range(options.repeats + 1)][1:]
    runner, imports = (statistics.median(column) for column in zip(*times, strict=True))
    figure = {
        "runner_ms": 1e3 * runner,
        "imports_ms": 1e3 * imports,
        "ratio": (runner + imports) / imports,
    }
    print(
        f"until the script's first line {1e3 * runner:.0f} ms, its imports of torch and dgl"
        f" {1e3 * imports:.0f} ms: {figure['ratio']:.2f} times these"
    )
    if options.out is not None:
        content = {"machine": describe_machine(), "figures": [figure]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def _run(script: Path) -> tuple[float, float]:
    """Seconds until the script's first line, and of its imports."""
    begin = time.time()
    words = [sys.executable, "-m", "dgl_mgpu", str(script)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    first_line, imported = map(float, done.stdout.split())
    return first_line - begin, imported - first_line


if __name__ == "__main__":
    main()
