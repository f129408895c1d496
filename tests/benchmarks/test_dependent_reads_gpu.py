"""Dependent reads, as far as small chains on a CPU show."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from benchmarks import dependent_reads_gpu
from benchmarks.dependent_reads_gpu import HOST, LINE_BYTES, Blocks, Case, Chain, Walk, cases
from dgl_mgpu.comm.communicator import Communicator
from tests.kernels.emulator import EmulatedDriver


def test_a_chain_comes_to_every_line_once():
    chain, line, seen = Chain(256), 0, set()
    for _ in range(256):
        seen.add(line)
        line = chain.after(line)
    assert (line, seen) == (0, set(range(256)))
    large = Chain(2**40)  # products beyond 64 bits
    lines = [0, 3, 2**39 + 1, 2**40 - 1]
    assert large.after(torch.tensor(lines)).tolist() == [large.after(each) for each in lines]
    assert large.reached(3) == large.after(large.after(large.after(0)))


@pytest.fixture
def blocks() -> Blocks:
    return Blocks(Communicator(), None, 100 * LINE_BYTES, 70 * LINE_BYTES)


@pytest.mark.parametrize("holders", [(0,), (HOST,)])
def test_a_walk_reads_what_was_written(blocks, holders):
    chain = Chain(64)
    blocks.write(holders, chain)
    walk = Walk(blocks.view(holders, 64))
    walk.go(3)
    walk.go(7)
    assert (walk.steps, int(walk.line)) == (10, chain.reached(10))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernel_walks_over_several_blocks():
    chain, holders = Chain(64), 3
    lines = torch.zeros(holders, 22, LINE_BYTES // 8, dtype=torch.int64)
    for line in range(64):
        lines[line % holders, line // holders, 0] = chain.after(line)
    tiers = torch.tensor([[0, 64, holders, 0]])
    pointers, line = torch.tensor([block.data_ptr() for block in lines]), torch.zeros(1).long()
    text = dependent_reads_gpu.source()
    EmulatedDriver().run(text, "follow", 1, 1, tiers, pointers, line, LINE_BYTES, 50)
    assert int(line) == chain.reached(50)


def test_what_is_read():
    alone = cases(1, [2**33], [2**33])
    assert [case.name for case in alone] == ["its own memory, 8 GiB", "the host, 8 GiB"]
    assert [case.gpu_bytes for case in alone] == [2**33, 0]
    of_three = {case.where: case for case in cases(3, [2**33], [])}
    assert of_three["all GPUs"] == Case("all GPUs", (0, 1, 2), 2**33)
    assert 3 * of_three["all GPUs"].gpu_bytes >= 2**33 and of_three["a peer"].holders == (1,)


def run(monkeypatch, arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments.split()])
    dependent_reads_gpu.main()


def test_all_memory_is_read(monkeypatch, tmp_path):
    out = tmp_path / "found.json"
    few = f"--ranks 2 --host-sizes 16KiB --steps 20 --repeats 2 --out {out}"
    run(monkeypatch, f"{few} --sizes 64KiB")
    figures = json.loads(out.read_text())["figures"]
    assert [each["more"]["where"] for each in figures] == [
        "all GPUs", "its own memory", "a peer", "the host",
    ]  # fmt: skip
    for figure in figures:
        assert figure["unit"] == "µs" and len(figure["more"]["seconds"]) == 2
        assert figure["ours"] == pytest.approx(5e5 * sum(figure["more"]["seconds"]))


def test_what_has_no_room_is_left_out(monkeypatch, capsys):
    run(monkeypatch, "--ranks 1 --sizes 2KiB 1024TiB --host-sizes 1KiB --steps 3 --repeats 1")
    printed = capsys.readouterr().out
    assert "its own memory, 1.04858e+06 GiB: left out, there is room for" in printed
    assert printed.count("its own memory") == 2


def test_a_wrong_line_is_no_figure(monkeypatch):
    monkeypatch.setattr(Chain, "reached", lambda self, steps: steps)
    with pytest.raises(ValueError, match=r"its own memory.* reads, not"):
        run(monkeypatch, "--ranks 1 --sizes 1KiB --host-sizes 1KiB --steps 3 --repeats 1")


def test_a_size_that_is_no_power_of_two_is_told_of(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--sizes 3GiB")
    assert "no power of two" in capsys.readouterr().err
