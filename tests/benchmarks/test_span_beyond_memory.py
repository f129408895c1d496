"""The benchmark of a graph that no machine holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import span_beyond_memory


@pytest.mark.slow
def test_two_machines_train_as_a_large_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        with span_beyond_memory.memory_limit(1 << 30, "tried") as group:
            group.read_text()
    except OSError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    out = tmp_path / "found.json"
    few = "--nodes 6000 --edges 60000 --width 8 --limit 2GiB --memory 64MiB --steps 3 --batch 32"
    words = [*few.split(), "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["program", *words])
    span_beyond_memory.main()
    found = json.loads(out.read_text())["figures"]
    two, one = found["trainings"]
    assert (two["machines"], one["machines"]) == (2, 1)
    assert two["loss_of_the_last_step"] == one["loss_of_the_last_step"]
    assert found["accuracies_differ_by"] == 0
    assert found["cut"]["peak_bytes"] <= found["cut"]["memory_bytes"]
    assert [entry.name for entry in tmp_path.iterdir()] == [out.name]


def test_what_exceeds_a_limit_is_ended() -> None:
    try:
        with span_beyond_memory.memory_limit(100 << 20, "tried") as group:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group), sys.executable, "-c"]
            small, large = (
                subprocess.run([*command, f"bytearray({mib} << 20)"], check=False).returncode
                for mib in (20, 200)
            )
    except OSError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    assert (small, large) == (0, -9)
