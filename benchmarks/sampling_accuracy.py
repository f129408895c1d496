"""Claim: training on the whole graph is as accurate as on samples of it, or more so.

After MGG's table 5, which has Reddit and ogbn-proteins: here the Facebook page graph and Cora, the
same GraphSAGE trained on mini-batches of sampled neighbours and on whole graphs, over several
seeds; the test accuracy is that of the epoch with the best validation accuracy.  Where an
epoch has several mini-batches the whole graph takes more epochs, since each is one step.

    python -m benchmarks.sampling_accuracy --data data --out sampling_accuracy.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.convergence import through_the_store
from benchmarks.machine import describe_machine

#: By data set, what both ways share.
SHARED = {
    "facebook": ("trainer.lr=0.01", "model.hidden=128"),
    "cora": ("trainer.lr=0.01", "model.hidden=64", "trainer.weight_decay=0.0005"),
}
#: Training nodes of Cora are one mini-batch, so that both ways take as many steps.
EPOCHS = {
    "facebook": {"sampled": 15, "whole": 80},
    "cora": {"sampled": 80, "whole": 80},
}
WAYS = {"sampled": ("mode=minibatch", "sampler.fanouts=[10,10]"), "whole": ("mode=fullgraph",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="root of the data sets")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each")
    parser.add_argument("--sets", nargs="+", choices=tuple(SHARED), default=tuple(SHARED))
    parser.add_argument("--out", type=Path, help="write the accuracies here, as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for name in options.sets:
        found[name] = {}
        for way, settings in WAYS.items():
            accuracies = [
                through_the_store(
                    f"data={name}", f"data.root={options.data}", "model=graphsage",
                    f"trainer.seed={seed}", f"trainer.epochs={EPOCHS[name][way]}",
                    *SHARED[name], *settings,
                )
                for seed in range(options.seeds)
            ]  # fmt: skip
            found[name][way] = accuracies
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            mean = statistics.mean(accuracies)
            print(f"{name}, {way}: mean {mean:.2%}, deviation {spread:.2%}, n={len(accuracies)}")
    if options.out:
        report = {"machine": describe_machine(), "epochs": EPOCHS, "test_accuracy": found}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
