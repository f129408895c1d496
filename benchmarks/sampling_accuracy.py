"""Claim: training on the whole graph is as accurate as on samples of it, or more so.

After MGG's table 5, which has Reddit and ogbn-proteins: here the Facebook page graph and Cora, and
others whose files are there, the same GraphSAGE trained on mini-batches of sampled neighbours and
on whole graphs, over several seeds; the test accuracy is that of the epoch with the best
validation accuracy.  Both ways take about as many steps, of which the whole graph has one an
epoch.  Of ogbn-proteins, whose nodes have several labels each, accuracies are areas under ROC
curves; of a generated graph of its size the epochs' times are taken, where its files are not there.

    python -m benchmarks.sampling_accuracy --data data --out sampling_accuracy.json
    python -m benchmarks.sampling_accuracy --sets reddit ogbn-proteins --seeds 1
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.convergence import through_the_store
from benchmarks.datasets import data_overrides, datasets_here
from benchmarks.machine import describe_machine

#: By data set, what both ways share.
SHARED = {
    "facebook": ("trainer.lr=0.01", "model.hidden=128"),
    "cora": ("trainer.lr=0.01", "model.hidden=64", "trainer.weight_decay=0.0005"),
    "reddit": ("trainer.lr=0.01", "model.hidden=128"),
    "ogbn-arxiv": ("trainer.lr=0.01", "model.hidden=128"),
    "ogbn-products": ("trainer.lr=0.01", "model.hidden=128"),
    "ogbn-proteins": ("trainer.lr=0.01", "model.hidden=128"),
    "proteins' size": ("trainer.lr=0.01", "model.hidden=128"),
}
#: An epoch on samples has 14 steps of the Facebook page graph and 1 of Cora, 150 of Reddit, 89 of
#: ogbn-arxiv, 193 of ogbn-products and 85 of ogbn-proteins.
EPOCHS = {
    "facebook": {"sampled": 15, "whole": 210},
    "cora": {"sampled": 80, "whole": 80},
    "reddit": {"sampled": 3, "whole": 450},
    "ogbn-arxiv": {"sampled": 5, "whole": 450},
    "ogbn-products": {"sampled": 3, "whole": 580},
    "ogbn-proteins": {"sampled": 12, "whole": 1020},
    "proteins' size": {"sampled": 3, "whole": 30},
}
#: Layers are two in both ways.
WAYS = {
    "sampled": ("mode=minibatch", "sampler.fanouts=[10,10]", "sampler.eval_fanouts=[-1,-1]"),
    "whole": ("mode=fullgraph", "sampler.fanouts=[-1,-1]", "sampler.eval_fanouts=[-1,-1]"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="root of the data sets")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of epochs")
    parser.add_argument("--sets", nargs="+", choices=tuple(SHARED), default=["facebook", "cora"])
    parser.add_argument("--out", type=Path, help="write the accuracies here, as JSON")
    options = parser.parse_args()
    datasets_here(options.sets, options.data)
    epochs = {
        name: {way: max(1, round(options.scale * count)) for way, count in EPOCHS[name].items()}
        for name in options.sets
    }
    machine = describe_machine()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in options.sets}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in options.sets}
    spent: dict[str, dict[str, float]] = {name: {} for name in options.sets}
    for name in options.sets:
        for way, settings in WAYS.items():
            runs = [
                through_the_store(
                    *data_overrides(name, options.data), "model=graphsage",
                    f"trainer.seed={seed}", f"trainer.epochs={epochs[name][way]}",
                    *SHARED[name], *settings,
                )
                for seed in range(options.seeds)
            ]  # fmt: skip
            accuracies = [run.test_accuracy for run in runs]
            found[name][way] = accuracies
            samples[name][way] = [run.epoch_s for run in runs]
            spent[name][way] = statistics.median(samples[name][way])
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            mean = statistics.mean(accuracies)
            print(
                f"{name}, {way}: mean {mean:.2%}, deviation {spread:.2%}, n={len(accuracies)}, "
                f"{spent[name][way]:.3g} s an epoch",
                flush=True,
            )
            if options.out:
                report = {
                    "machine": machine,
                    "epochs": epochs,
                    "test_accuracy": found,
                    "epoch_s": spent,
                    "samples": samples,
                }
                options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
