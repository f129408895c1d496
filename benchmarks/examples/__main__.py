"""All reproductions of DGL's examples, on every data set that is there: a table and JSON.

python -m benchmarks.examples --root data --out docs/benchmarks/examples.json
"""

from __future__ import annotations

from benchmarks.examples import (
    gat,
    gcn,
    gin,
    link_prediction,
    node_classification,
    pinsage,
    rgcn,
    rgcn_hetero,
    sage,
)
from benchmarks.examples.common import main

MODULES = (
    gcn, gat, sage, gin, node_classification, link_prediction, rgcn, rgcn_hetero, pinsage
)  # fmt: skip

if __name__ == "__main__":
    main(example for module in MODULES for example in module.EXAMPLES)
