"""GraphSAGE until it reaches an accuracy, as DGL's user guide trains it, on a CPU or on GPUs.

It knows nothing of dgl_mgpu; :mod:`benchmarks.time_to_accuracy` has ``python -m dgl_mgpu`` run it.
Training is timed, with all that a step does; the validation nodes' accuracy between steps is not.
Their neighbours are sampled once, before.  It writes to a file of JSON

- ``curves``: of each seed, accuracies, steps and seconds.  A first, short run does not count.
  After ``--seconds`` of training, of all seeds together, no other begins, and the one under way
  ends; it is kept if it is the only one.
- ``setting``: workers that sample and threads of the model.  Of several ``--settings`` it is the
  one with the shortest step in an epoch, workers' start included.
- ``step_ms_by_setting``: each one's milliseconds of a step, if there are several.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import SAGEConv
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SAGE(nn.Module):
    def __init__(self, features, hidden, classes, num_layers):
        super().__init__()
        widths = [features, *[hidden] * (num_layers - 1), classes]
        self.layers = nn.ModuleList(
            SAGEConv(inputs, outputs, "mean") for inputs, outputs in itertools.pairwise(widths)
        )

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x)
            if layer is not self.layers[-1]:
                x = F.relu(x)
        return x


def read_graph(file):
    data = torch.load(file)
    none = data["indices"][:0]
    g = dgl.graph(("csc", (data["indptr"], data["indices"], none)), num_nodes=len(data["label"]))
    g.ndata["feat"], g.ndata["label"] = data["feat"], data["label"]
    return g, data["train"], data["valid"]


def train(told, g, train_ids, valid_ids, device, seed, most_steps, most_seconds, setting):
    workers, threads = setting
    torch.set_num_threads(threads)
    dgl.utils.set_num_threads(threads)
    torch.manual_seed(seed)
    dgl.seed(seed)
    several = told.gpus > 1
    classes = int(g.ndata["label"].max()) + 1
    model = SAGE(g.ndata["feat"].shape[1], told.hidden, classes, len(told.fanouts)).to(device)
    if several:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=told.lr, fused=device.type == "cuda")
    sampler = NeighborSampler(told.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    to = {"device": device, "use_uva": told.place == "pinned", "batch_size": told.batch}
    loader = DataLoader(
        g, train_ids, sampler, shuffle=True, drop_last=True, use_ddp=several,
        num_workers=workers, **to,
    )  # fmt: skip
    valid = [blocks for _, _, blocks in DataLoader(g, valid_ids, sampler, **to)]

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    def right(blocks):
        scores = model(blocks, blocks[0].srcdata["feat"])
        return (scores.argmax(1) == blocks[-1].dstdata["label"]).sum()

    def accuracy():
        model.eval()
        with torch.no_grad():
            found = sum(map(right, valid)).double() / len(valid_ids)
        model.train()
        return found.item()

    def point(seconds):
        now = torch.tensor([seconds, accuracy()], dtype=torch.float64, device=device)
        if several:
            dist.broadcast(now, 0)  # ranks' clocks differ, and they may sum in another order
        return dict(zip(("seconds", "accuracy"), now.tolist(), strict=True))

    curve, seconds, steps = [], 0.0, 0
    wait()
    begin = time.perf_counter()
    while True:
        for _, _, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % told.every == 0:
                wait()
                seconds += time.perf_counter() - begin
                curve.append({"steps": steps, **point(seconds)})
                is_late = steps >= most_steps or curve[-1]["seconds"] >= most_seconds
                if is_late or has_level(told, curve):
                    return curve
                wait()
                begin = time.perf_counter()


def has_level(told, curve):
    return curve[-1]["accuracy"] >= told.level


def fastest_setting(told, data):
    """Of those that are to be tried, and milliseconds of a step of each."""
    epoch = len(data[1]) // told.batch
    few = told.seconds / (2 * len(told.settings))
    by_setting = {}
    for setting in told.settings:
        end = train(told, *data, 0, epoch, few, setting)[-1]
        by_setting[setting] = 1e3 * end["seconds"] / end["steps"]
    return min(by_setting, key=by_setting.get), by_setting


def all_seeds(told, data, setting):
    """The curve of each, as far as the seconds last."""
    curves, left = [], told.seconds
    for seed in told.seeds:
        curve = train(told, *data, seed, told.most_steps, left, setting)
        left -= curve[-1]["seconds"]
        if left > 0 or has_level(told, curve) or not curves:
            curves.append(curve)
        if left <= 0:
            break
    return curves


def work(rank, told, g, train_ids, valid_ids):
    device = torch.device("cpu")
    if told.place != "host":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        train_ids, valid_ids = train_ids.to(device), valid_ids.to(device)
    if told.gpus > 1:
        dist.init_process_group(
            "gloo" if told.place == "host" else "nccl",
            init_method=told.meeting_point, rank=rank, world_size=told.gpus,
        )  # fmt: skip
    if told.place == "gpu":
        g = g.to(device)
    data = g, train_ids, valid_ids, device
    setting, by_setting = told.settings[0], {}
    # Which loads libraries and compiles kernels.
    train(told, *data, 0, told.every, told.seconds, setting)
    if len(told.settings) > 1:
        setting, by_setting = fastest_setting(told, data)
    found = {
        "curves": all_seeds(told, data, setting),
        "setting": setting_name(setting),
        "step_ms_by_setting": {setting_name(each): ms for each, ms in by_setting.items()},
    }
    if rank == 0:
        Path(told.out).write_text(json.dumps(found))
    if told.gpus > 1:
        dist.destroy_process_group()


def setting_of(text):
    workers, threads = map(int, text.split(":"))
    return workers, threads


def setting_name(setting):
    workers, threads = setting
    return f"{workers} workers, {threads} threads"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", required=True, help="what benchmarks.time_to_accuracy wrote")
    parser.add_argument("--place", choices=("host", "pinned", "gpu"), required=True)
    parser.add_argument("--gpus", type=int, default=1, help="or ranks, with the graph on the host")
    parser.add_argument(
        "--settings", nargs="+", type=setting_of, default=[(0, torch.get_num_threads())],
        help="workers:threads",
    )  # fmt: skip
    parser.add_argument("--fanouts", type=int, nargs="+", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two accuracies")
    parser.add_argument("--level", type=float, required=True)
    parser.add_argument("--most-steps", type=int, required=True, help="of a seed")
    parser.add_argument("--seconds", type=float, required=True, help="of training, of all seeds")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--meeting-point", default="")
    parser.add_argument("--out", required=True)
    told = parser.parse_args()
    data = read_graph(told.graph)
    if told.gpus > 1:
        torch.multiprocessing.spawn(work, (told, *data), nprocs=told.gpus)
    else:
        work(0, told, *data)
