"""Ranks that read each other's GPU memory until they are ended: python -m … RANKS FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import DGLMGPUError
from dgl_mgpu.store.memory import build
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.train.launch.preemption import PreemptionHandler
from dgl_mgpu.utils.interrupts import Stopped
from tests.store.memory.gpu_runtimes import make_runtime
from tests.store.memory.test_faults_gpu import gathered, numbered


def _read(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    store = build(numbered(ranks), ranks, make_runtime("cuda", ranks))
    turn = 0
    with PreemptionHandler(Communicator.of_all_machines()).listening() as stop:
        while not stop.after_step():
            gathered(store, turn)
            if turn == 10:
                (folder / f"reads-{ranks.rank}").touch()
            turn += 1
    store.close()
    raise Stopped


def _main(ranks: str, folder: str) -> int:
    Path(folder).mkdir()
    try:
        launch(_read, int(ranks), Path(folder))
    except DGLMGPUError as error:
        print(f"dgl-mgpu train: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
