"""pylibwholegraph as far as one rank on a CPU needs it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.peers.wholegraph import WholeGraph


class Memory:
    """What the peer's memory is to one rank on a CPU."""

    def __init__(self, communicator, kind, where, shape, dtype, strides) -> None:
        self.rows, self.kind = torch.zeros(shape, dtype=dtype), kind

    def get_local_tensor(self):
        return self.rows, 0

    def gather(self, ids):
        return self.rows[ids.long()]


class Embedding:
    """The peer's memory with a cache, which is counted and not kept."""

    def __init__(self, communicator, kind, where, dtype, sizes, *, cache_policy) -> None:
        # With a cache the peer rounds a table up to whole sets.
        self._memory = Memory(communicator, kind, where, [sizes[0] + 3, sizes[1]], dtype, [])
        self.policy, self.gathers = cache_policy, {True: 0, False: 0}

    def get_embedding_tensor(self):
        return self._memory

    def set_adjust_cache(self, adjust: bool) -> None:
        self._adjust = adjust

    def gather(self, ids):
        self.gathers[self._adjust] += 1
        return self._memory.gather(ids)


class Structure:
    """The peer's graph, whose samples are the first neighbours."""

    def set_csr_graph(self, indptr, indices) -> None:
        self._indptr, self._indices = indptr.rows, indices.rows

    def multilayer_sample_without_replacement(self, seeds, fanouts):
        nodes, edges, offsets, sources = [seeds], [], [], []
        for fanout in fanouts:
            rows = [self._indices[self._indptr[n] : self._indptr[n + 1]][:fanout] for n in nodes[0]]
            numbers = {int(n): i for i, n in enumerate(nodes[0])}
            for n in torch.cat(rows).tolist():
                numbers.setdefault(n, len(numbers))
            src = torch.tensor([numbers[n] for n in torch.cat(rows).tolist()], dtype=torch.int32)
            sizes = torch.tensor([len(row) for row in rows])
            dst = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(sizes)
            edges.insert(0, torch.stack([src, dst]))
            offsets.insert(0, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
            sources.insert(0, src)
            nodes.insert(0, torch.tensor(list(numbers), dtype=seeds.dtype))
        return nodes, edges, offsets, sources


def fake_peer(monkeypatch) -> WholeGraph:
    """The peer over a library that is made up."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = object.__new__(WholeGraph)
    found._wholegraph = SimpleNamespace(
        create_wholememory_tensor=Memory,
        destroy_wholememory_tensor=lambda tensor: None,
        GraphStructure=Structure,
        create_builtin_cache_policy=lambda *given: given,
        create_embedding=Embedding,
        destroy_embedding=lambda embedding: None,
    )
    found._communicator = SimpleNamespace(barrier=lambda: None)
    monkeypatch.setattr(found, "close", lambda: None)
    return found
