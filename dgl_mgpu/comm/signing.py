"""Signed messages of plain data between the ranks of a gloo group.

Each message is signed (HMAC, RFC 2104, with SHA-256) by a key that only the ranks have, with the
sender's number and the message's: nobody else can write, alter, repeat or reorder one unnoticed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dgl_mgpu.comm.serialization import NotPlainError, dumps, loads
from dgl_mgpu.errors import RankFailedError

#: The variable in which ranks that were not started by this package find their secret.
SECRET = "DGL_MGPU_SECRET"
# A message begins with a frame of this size, which holds all of it if it is short.
_FRAME_BYTES = 1024
# Signature of what follows in the frame: the message's length and sum.
_HEAD = struct.Struct("!32sQ32s")
_NONCE_BYTES = 16
# Characters of a signature in the job's store.
_SIGNATURE = 64
_FIX = (
    f"give all ranks the same {SECRET}; if they have it, somebody else is on the network between "
    "them"
)
_secret = b""


def set_job_secret(secret: bytes) -> None:
    """What the job's ranks know, and nobody else does."""
    global _secret
    _secret = secret


def job_secret() -> bytes:
    """What the ranks sign by: the launcher's secret, the environment's, or nothing.

    Without one, messages are whole and in order, but anybody on the network between the ranks
    could have written them.
    """
    return _secret or os.environ.get(SECRET, "").encode()


class SignedGroup:
    """A gloo group whose ranks exchange plain data.

    Collective: all ranks make it, and make the same calls in the same order. Every method raises
    RankFailedError if a message is no rank's, or of one that has another secret, and Gloo's
    RuntimeError if a rank is gone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._key = hashlib.sha256(job_secret()).digest()
        self._count = 0
        self._store: dist.Store = _get_default_store()

    def agree(self) -> None:
        """Make a key of this group's own: no message of another group is taken for one of it."""
        nonces = self.all_gather(secrets.token_bytes(_NONCE_BYTES))
        self._key = hmac.digest(self._key, b"".join(nonces), "sha256")

    def all_gather(self, value: Any) -> list[Any]:
        """Plain data of every rank, by rank."""
        data = dumps(value)
        frames = torch.empty(self._size, _FRAME_BYTES, dtype=torch.uint8)
        dist.all_gather(list(frames), self._frame(data), group=self.group)
        lengths = [self._length(rank, frame) for rank, frame in enumerate(frames)]
        longest = max(lengths)
        rests = frames[:, _HEAD.size :]
        if longest > rests.shape[1]:
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(data)] = _tensor(data)
            rests = torch.empty(self._size, longest, dtype=torch.uint8)
            dist.all_gather(list(rests), mine, group=self.group)
        values = [
            self._read(rank, frames[rank], rests[rank, :length])
            for rank, length in enumerate(lengths)
        ]
        self._count += 1
        return values

    def broadcast(self, value: Any) -> Any:
        """Plain data of the first rank on all others; there, the value itself."""
        first = self._rank == 0
        data = dumps(value) if first else b""
        source = dist.get_global_rank(self.group, 0)
        frame = self._frame(data) if first else torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        dist.broadcast(frame, src=source, group=self.group)
        length = self._length(0, frame)
        rest = frame[_HEAD.size :]
        if length > len(rest):
            rest = _tensor(data) if first else torch.empty(length, dtype=torch.uint8)
            dist.broadcast(rest, src=source, group=self.group)
        received = value if first else self._read(0, frame, rest[:length])
        self._count += 1
        return received

    def say_why(self, reason: str) -> None:
        """Leave word in the job's store of why this rank has failed; not collective."""
        text = json.dumps([self._rank, reason]).encode()
        signature = hmac.digest(self._key, text, "sha256").hex()
        self._store.set(self._word(), signature + text.decode())  # that of the last one counts

    def why(self) -> tuple[int, str] | None:
        """The rank that has failed, and why, if it has left word; not collective."""
        if not self._store.check([self._word()]):
            return None
        data = self._store.get(self._word())
        signature, text = data[:_SIGNATURE], data[_SIGNATURE:]
        expected = hmac.digest(self._key, text, "sha256").hex().encode()
        if not hmac.compare_digest(signature, expected):
            return None
        rank, reason = json.loads(text)
        return rank, reason

    def _word(self) -> str:
        """Where a rank of this group, and of no other, leaves word."""
        return f"dgl_mgpu/failed/{hmac.digest(self._key, b'failed', 'sha256').hex()}"

    def _frame(self, data: bytes) -> torch.Tensor:
        frame = bytearray(_FRAME_BYTES)
        digest = hashlib.sha256(data).digest()
        signature = self._signature(self._rank, len(data), digest)
        _HEAD.pack_into(frame, 0, signature, len(data), digest)
        if len(data) <= _FRAME_BYTES - _HEAD.size:
            frame[_HEAD.size : _HEAD.size + len(data)] = data
        return torch.frombuffer(frame, dtype=torch.uint8)

    def _signature(self, sender: int, length: int, digest: bytes) -> bytes:
        content = struct.pack("!QQQ32s", self._count, sender, length, digest)
        return hmac.digest(self._key, content, "sha256")

    def _length(self, sender: int, frame: torch.Tensor) -> int:
        signature, length, digest = _HEAD.unpack_from(frame.numpy().data)
        if not hmac.compare_digest(signature, self._signature(sender, length, digest)):
            raise _not_of(sender, "is not signed by this rank's secret")
        return length

    def _read(self, sender: int, frame: torch.Tensor, data: torch.Tensor) -> Any:
        digest = _HEAD.unpack_from(frame.numpy().data)[2]
        content = data.numpy().data
        if hashlib.sha256(content).digest() != digest:
            raise _not_of(sender, "is not what was signed")
        try:
            return loads(content)
        except NotPlainError as error:
            raise _not_of(sender, f"cannot be read: {error}") from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _not_of(sender: int, found: str) -> RankFailedError:
    return RankFailedError(
        "read what another rank has sent", f"the message of rank {sender} {found}", _FIX
    )
