"""What ranks of torchrun keep in its store, which is there as long as torchrun is.

It outlives the ranks, also those that torchrun starts again: what it holds may be of an earlier
start.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dgl_mgpu.comm.signing import SECRET, job_secret
from dgl_mgpu.errors import CheckpointError, RankFailedError
from dgl_mgpu.utils import timeouts
from dgl_mgpu.utils.torchrun import may_restart

_LOOK_SECONDS = 0.02
_FOLDER = "folder"
# Characters of a signature.
_SIGNATURE = 64


def job_store(name: str) -> dist.Store:
    """The store, where ``name`` keeps these keys apart, by a connection of its own.

    What waits on one connection keeps nobody waiting on another.  Raises RuntimeError if the store
    cannot be reached.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeouts.CONNECT),
    )
    return dist.PrefixStore(f"dgl_mgpu/{name}", store)


def store_of_this_start(store: dist.Store, rank: int, num_ranks: int, limit: float) -> dist.Store:
    """``store`` without what ranks wrote in an earlier start; collective.

    From that, gloo would take addresses of ranks that are gone.  torchrun has ended all ranks
    before it starts any again, but what number a start has it does not tell all of them alike.  So
    each rank draws a number.  The first one publishes those that it finds: a rank that finds its
    own there knows that the first one's is of this start, too, and answers with that.

    Raises
    ------
    RuntimeError
        If not all ranks answer within ``limit`` seconds.
    """
    own = secrets.token_hex(16)
    store.set(f"drawn {rank}", own)
    deadline = time.monotonic() + limit
    drawn = [f"drawn {other}" for other in range(num_ranks)]
    answers = [f"answer {other}" for other in range(1, num_ranks)]
    while time.monotonic() < deadline:
        if rank == 0:
            if store.check(drawn):
                found = (number.decode() for number in store.multi_get(drawn))
                store.set("published", " ".join(found))
            if store.check(answers) and set(store.multi_get(answers)) <= {own.encode()}:
                return dist.PrefixStore(own, store)
        elif store.check(["published"]):
            published = store.get("published").decode().split()
            if len(published) == num_ranks and published[rank] == own:
                store.set(f"answer {rank}", published[0])
                return dist.PrefixStore(published[0], store)
        time.sleep(_LOOK_SECONDS)
    raise RuntimeError(f"rank {rank} has waited {limit:g} s for the others")


def keep_folder(folder: Path) -> None:
    """Keep the run's folder for ranks that are started again; on the first rank."""
    if may_restart():
        path = str(folder.absolute())
        job_store("run").set(_FOLDER, _signature(path) + path)


def folder_before() -> Path | None:
    """The run's folder, if these ranks were started again; on the first rank.

    Raises CheckpointError if this machine does not have it, and RankFailedError if no rank with
    this one's secret has written it.
    """
    if not may_restart() or int(os.environ["RANK"]):
        return None
    store = job_store("run")
    if not store.check([_FOLDER]):
        return None
    kept = store.get(_FOLDER).decode(errors="replace")
    signature, path = kept[:_SIGNATURE], kept[_SIGNATURE:]
    if not hmac.compare_digest(signature.encode(), _signature(path).encode()):
        raise RankFailedError(
            "read the run's folder, which another rank has written to torchrun's store",
            "it is not signed by this rank's secret",
            f"give all ranks the same {SECRET}; if they have it, somebody else writes to the store",
        )
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"go on with the run in {folder}, of which a rank was lost",
            "the folder is not on this machine, whose rank is now the first",
            "choose a folder that all machines have (hydra.run.dir)",
        )
    return folder


def _signature(path: str) -> str:
    return hmac.digest(job_secret(), f"{_FOLDER} {path}".encode(), "sha256").hex()
