"""Mini-batches of a graph, and GraphSAGE on them, by DGL or by torch-geometric, on a CPU or a GPU.

:mod:`benchmarks.geometric` runs it and asks for what it measures, by a line of JSON for each; the
answers are lines of JSON, too.  The first one, unasked, names what can be chosen:

- ``loadings``: workers that sample, threads of the script's own process, and who gathers the
  features;
- ``layouts``: what a layer's edges are to the model.

On a GPU, DGL's graph and features are there; torch-geometric samples on the CPU, and has the
features where it samples or all of them on the GPU.

Both sides train on the same seeds in the same order, and their models begin with the same numbers.
A loader and its workers stay from epoch to epoch; not counted is the first epoch of a loader, or
with ``--warm-up`` so many batches of each, and those that workers' queues hold.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
import traceback
from typing import NamedTuple

import torch
import torch.nn.functional as F

HIDDEN, LEARNING_RATE = 256, 1e-3
#: Of the training whose losses are compared.
EPOCHS = 3


#: Who gathers the features: the script's process where they are gathered, the workers, or the GPU
#: of all that it has.
PROCESS, WORKERS, GPU = "", ", which gather", ", the GPU gathers"


class Loading(NamedTuple):
    """How batches are made."""

    workers: int
    threads: int
    gathers: str

    @property
    def name(self):
        return f"{self.workers} workers{self.gathers}, {self.threads} threads"


class Sampled(NamedTuple):
    """A layer's edges as :class:`dgl_mgpu.ops.SampledBlock`, which is checked as one."""

    indptr: torch.Tensor
    src: torch.Tensor
    eids: torch.Tensor
    src_nodes: torch.Tensor
    num_dst: int

    def cpu(self):
        return Sampled(*(tensor.cpu() for tensor in self[:-1]), self.num_dst)


class Dgl:
    """DGL's loader and layers, as its user guide has them."""

    layouts = ("blocks",)

    def __init__(self, told):
        import dgl

        from benchmarks.time_to_accuracy_script import SAGE, read_graph

        self._dgl, self._told, self._sage = dgl, told, SAGE
        graph, seeds, _ = read_graph(told.graph)
        self.csc = graph.adj_tensors("csc")[:2]
        self._graph, self._seeds = graph.to(told.device), seeds.to(told.device)
        # A batch that is taken from the loader gets its features then.
        workers = told.workers if told.device.type == "cpu" else [0]
        self.loadings = [
            Loading(*each, PROCESS) for each in itertools.product(workers, told.threads)
        ]

    def set_threads(self, threads):
        torch.set_num_threads(threads)
        self._dgl.utils.set_num_threads(threads)

    def loader(self, loading):
        sampler = self._dgl.dataloading.NeighborSampler(
            self._told.fanouts[::-1], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        return self._dgl.dataloading.DataLoader(
            self._graph, self._seeds, sampler, batch_size=self._told.batch,
            num_workers=loading.workers, persistent_workers=loading.workers > 0,
            device=self._told.device,
        )  # fmt: skip

    def batches(self, loader):
        return iter(loader)

    def rows(self, batch):
        _, _, blocks = batch
        return blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]

    def model(self, layout):
        features, label = (self._graph.ndata[name] for name in ("feat", "label"))
        depth = len(self._told.fanouts)
        return self._sage(features.shape[1], HIDDEN, int(label.max()) + 1, depth)

    def parameters(self, layer):
        return layer.fc_neigh.weight, layer.fc_self.weight, layer.fc_self.bias

    def scores(self, model, batch, layout):
        return model(batch[2], self.rows(batch)[0])

    def work(self, batch):
        _, _, blocks = batch
        edges = [block.num_edges() for block in blocks]
        return {"inputs": blocks[0].num_src_nodes(), "edges": edges}

    def sampled(self, batch):
        """Layers that :func:`benchmarks.sampling_cpu.check` takes, and the fanout of each."""
        layers = []
        for block in batch[2]:
            indptr, src, places = block.adj_tensors("csc")
            eids = block.edata[self._dgl.EID][places]
            nodes = block.srcdata[self._dgl.NID]
            layers.append(Sampled(indptr, src, eids, nodes, block.num_dst_nodes()))
        return layers, self._told.fanouts[::-1]


class Geometric:
    """torch-geometric's loader, and its layers on no more of a batch than each needs."""

    def __init__(self, told):
        from torch_geometric.data import Data
        from torch_geometric.sampler import NeighborSampler

        from benchmarks.peers.geometric import LAYOUTS

        self._told, self._layouts, self.layouts = told, LAYOUTS, tuple(LAYOUTS)
        found = torch.load(told.graph)
        self.csc = found["indptr"], found["indices"]
        targets = torch.repeat_interleave(self.csc[0].diff())
        edges = torch.stack([self.csc[1], targets])
        self._feat, self._label = found["feat"], found["label"]
        self._data = Data(x=self._feat, y=self._label, edge_index=edges)
        self._seeds = found["train"]
        gathers = PROCESS, WORKERS
        if told.device.type == "cuda":
            # Workers by its own choice; the GPU spares copies of features.
            gathers = WORKERS, GPU
            self._bare = Data(num_nodes=len(found["label"]), edge_index=edges)
            self._feat, self._label = self._feat.to(told.device), self._label.to(told.device)
        product = itertools.product(told.workers, told.threads, gathers)
        every = (
            Loading(workers, threads, PROCESS if who == WORKERS and not workers else who)
            for workers, threads, who in product
        )
        self.loadings = list(dict.fromkeys(every))
        # One for all loaders: it turns the edges into CSC, which is not timed.
        self._sampler = NeighborSampler(self._data, told.fanouts, is_sorted=True)

    def set_threads(self, threads):
        torch.set_num_threads(threads)

    def loader(self, loading):
        from torch_geometric.loader import NeighborLoader

        on_gpu = self._told.device.type == "cuda"
        return NeighborLoader(
            self._bare if loading.gathers == GPU else self._data,
            self._told.fanouts, self._seeds, neighbor_sampler=self._sampler,
            # What a loader pins is what it has gathered.
            batch_size=self._told.batch, filter_per_worker=on_gpu or loading.gathers == WORKERS,
            num_workers=loading.workers, persistent_workers=loading.workers > 0, pin_memory=on_gpu,
        )  # fmt: skip

    def batches(self, loader):
        if self._told.device.type == "cpu":
            yield from loader
            return
        for batch in loader:
            batch.to(self._told.device, "edge_index", "n_id", "x", "y", non_blocking=True)
            if "x" not in batch:
                batch.x, batch.y = self._feat[batch.n_id], self._label[batch.n_id]
            yield batch

    def rows(self, batch):
        return batch.x, batch.y[: batch.batch_size]

    def model(self, layout):
        from benchmarks.peers.geometric import Geometric

        hidden = [HIDDEN] * (len(self._told.fanouts) - 1)
        widths = [self._feat.shape[1], *hidden, int(self._label.max()) + 1]
        return Geometric(self._layouts[layout].layer, itertools.pairwise(widths))

    def parameters(self, layer):
        return layer.lin_l.weight, layer.lin_r.weight, layer.lin_l.bias

    def scores(self, model, batch, layout):
        hops = self._hops(batch)
        edges = [self._layouts[layout].edges(hop) for hop in hops]
        return model(batch.x, edges, [hop.num_targets for hop in hops])

    def work(self, batch):
        edges = [len(hop.sources) for hop in self._hops(batch)]
        return {"inputs": len(batch.n_id), "edges": edges}

    def sampled(self, batch):
        """As :meth:`Dgl.sampled`: all in one, since it samples a node once and not in each hop."""
        whole = self._hops(batch)[0]
        fanouts = torch.repeat_interleave(
            torch.tensor(self._told.fanouts), torch.tensor(batch.num_sampled_nodes[:-1])
        )
        indptr, src = whole.offsets.long(), whole.sources.long()
        return [Sampled(indptr, src, batch.e_id, batch.n_id, whole.num_targets)], [fanouts]

    def _hops(self, batch):
        """Of each layer, the edges that what is asked of it depends on."""
        from benchmarks.peers.geometric import Hop

        nodes = list(itertools.accumulate(batch.num_sampled_nodes))
        ends = list(itertools.accumulate(batch.num_sampled_edges))
        hops = []
        sizes = zip(ends, itertools.pairwise(nodes), strict=True)
        for end, (targets, sources) in reversed(list(sizes)):
            edges = batch.edge_index[:, :end]
            offsets = torch._convert_indices_from_coo_to_csr(edges[1], targets, out_int32=True)
            hops.append(Hop(edges, offsets, edges[0].int(), sources, targets))
        return hops


SIDES = {"dgl": Dgl, "torch-geometric": Geometric}


class Timed:
    """What one side is asked for."""

    def __init__(self, side, told):
        self._side, self._told = side, told
        self._loading = self._loader = None
        self._trained = {}
        self._loadings = {each.name: each for each in side.loadings}

    def choices(self):
        return {"loadings": list(self._loadings), "layouts": list(self._side.layouts)}

    def load(self, loading, layout):
        """Milliseconds of a batch, its features and labels."""
        return self._epoch_ms(loading, self._side.rows)

    def step(self, loading, layout):
        """Milliseconds of a batch and of training on it."""
        if layout not in self._trained:
            self._trained[layout] = Training(self._side, layout, self._told.device)
        return self._epoch_ms(loading, self._trained[layout].step)

    def losses(self, loading, layout):
        """The mean loss of each epoch of a model."""
        self._use(loading)
        training, found = Training(self._side, layout, self._told.device), []
        for _ in range(EPOCHS):
            each = [training.step(batch) for batch in self._side.batches(self._loader)]
            found.append(torch.stack(each).mean().item())
        return found

    def work(self, loading, layout):
        """Sizes of a batch, means of an epoch, whose first batch is checked."""
        from benchmarks.sampling_cpu import check

        self._use(loading)
        each = []
        for batch in self._side.batches(self._loader):
            if not each:
                layers, fanouts = self._side.sampled(batch)
                check([layer.cpu() for layer in layers], *self._side.csc, fanouts)
            each.append(self._side.work(batch))
        inputs = sum(one["inputs"] for one in each) / len(each)
        edges = torch.tensor([one["edges"] for one in each], dtype=torch.float64).mean(0)
        return {"inputs": inputs, "edges": edges.tolist()}

    def _epoch_ms(self, loading, use):
        is_new, warm_up = self._use(loading), self._told.warm_up
        if is_new and not warm_up:
            for batch in self._side.batches(self._loader):
                use(batch)
        batches = self._side.batches(self._loader)
        # Two batches of each worker are in its queue.
        for batch in itertools.islice(batches, warm_up and warm_up + 2 * self._loading.workers):
            use(batch)
        begin = self._now()
        for count, batch in enumerate(batches, start=1):
            use(batch)
            # Workers' batches come in rounds, one of each, and a part of a round has no time.
            is_round = count % max(1, self._loading.workers) == 0
            if is_round and time.perf_counter() - begin > self._told.seconds:
                break
        return 1e3 * (self._now() - begin) / count

    def _now(self):
        if self._told.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget(self):
        """Have no loader, and end its workers."""
        if self._loader is not None:
            # Where torch keeps workers.  Of a loader in a cycle of references, as torch-geometric's
            # are, the collector ends queues first: each worker is then waited for in vain.
            self._loader._iterator = None
        self._loading = self._loader = None

    def _use(self, name):
        """Have the loader be of this name; whether it is new."""
        loading = self._loadings[name]
        if loading == self._loading:
            return False
        self.forget()
        gc.collect()  # the next workers must not inherit it
        self._side.set_threads(loading.threads)
        self._loading, self._loader = loading, self._side.loader(loading)
        return True


class Training:
    """A model and its optimizer."""

    def __init__(self, side, layout, device):
        self._side, self._layout = side, layout
        self._model = side.model(layout)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in self._model.layers:
                neigh, own, bias = side.parameters(layer)
                bound = neigh.shape[1] ** -0.5
                for weight in (neigh, own):
                    weight.uniform_(-bound, bound, generator=draw)
                bias.zero_()
        self._model.to(device)
        self._optimizer = torch.optim.Adam(self._model.parameters(), LEARNING_RATE, fused=True)

    def step(self, batch):
        """The loss before."""
        scores = self._side.scores(self._model, batch, self._layout)
        loss = F.cross_entropy(scores, self._side.rows(batch)[1])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=tuple(SIDES), required=True)
    parser.add_argument("--graph", required=True, help="what benchmarks.geometric wrote")
    parser.add_argument("--fanouts", type=int, nargs="+", required=True, help="from the seeds on")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, nargs="+", required=True)
    parser.add_argument("--warm-up", type=int, default=0, help="batches of each epoch")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a timed epoch")
    told = parser.parse_args()
    timed = Timed(SIDES[told.side](told), told)
    print(json.dumps(timed.choices()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found = {"found": getattr(timed, asked["what"])(asked["loading"], asked["layout"])}
        except Exception as error:  # a setting that fails is left out; others are tried
            traceback.print_exc()
            timed.forget()
            found = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)
