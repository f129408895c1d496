"""DGL's examples and notebooks of ``dgl.graphbolt``: those of the tag v2.1.0.

All load ``gb.BuiltinDataset(name)``, whose files :mod:`benchmarks.dgl_examples_graphbolt_data`
generates, or make small data of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

from benchmarks.dgl_examples_case import ACCURACY, NUMBER, Case

_FOLDER = "sampling/graphbolt/"
_NODES = f"{_FOLDER}node_classification.py"
_LINKS = f"{_FOLDER}link_prediction.py"
_RGCN = f"{_FOLDER}rgcn/hetero_rgcn.py"
_MULTI = "multigpu/graphbolt/node_classification.py"
_NOTEBOOKS = "../notebooks/"
#: The scripts' own rate is for larger graphs, whose epochs have more steps.
_FASTER = "--lr", "0.003"
_PRODUCTS, _CITATION, _CORA = "gb-ogbn-products", "gb-ogbl-citation2", "gb-cora"


def _nodes(name: str, mode: str, *args: str, on_cpu: bool = False) -> Case:
    return Case(
        f"gb_nodes_{name}", _NODES, ("--mode", mode, *_FASTER, *args), _PRODUCTS,
        on_cpu=("--epochs", "4", *_FASTER, *args) if on_cpu else None,
    )  # fmt: skip


def _links(name: str, mode: str, *args: str, on_cpu: bool = False) -> Case:
    return Case(
        f"gb_links_{name}", _LINKS, ("--mode", mode, *args), _CITATION,
        rf"Test MRR {NUMBER}", "test MRR",
        ("--epochs", "4", "--fanout", "5,5,5", *args) if on_cpu else None, (),
    )  # fmt: skip


def _rgcn(dataset: str, num_gpus: str) -> Case:
    shared = "--dataset", dataset
    return Case(
        f"gb_rgcn_{dataset.split('-')[-1]}", _RGCN, (*shared, "--num_gpus", num_gpus),
        f"gb-{dataset}", rf"Test accuracy {NUMBER}", "test accuracy, %",
        (*shared, "--num_epochs", "2"), ("psutil", "ogb"), loads_on_gpu=num_gpus != "0",
    )  # fmt: skip


def _multi(name: str, gpus: str, mode: str, *args: str) -> Case:
    return Case(
        f"gb_multi_gpu_{name}", _MULTI, ("--gpu", gpus, "--mode", mode, *_FASTER, *args), _PRODUCTS,
        num_gpus=gpus.count(",") + 1,
    )  # fmt: skip


def _notebook(
    name: str, path: str, data: str | None, pattern: str, measure: str, *requires: str
) -> Case:
    """They are for CPUs."""
    return Case(
        f"gb_notebook_{name}", f"{_NOTEBOOKS}{path}.ipynb", (), data, pattern, measure, (),
        requires, loads_on_gpu=False,
    )  # fmt: skip


GRAPHBOLT_CASES = (
    _nodes("pinned", "pinned-cuda", on_cpu=True),
    _nodes("gpu", "cuda-cuda"),
    _nodes("cpu", "cpu-cuda"),
    _nodes("overlap", "pinned-cuda", "--overlap-graph-fetch"),
    _nodes("layer", "pinned-cuda", "--sample-mode", "sample_layer_neighbor", on_cpu=True),
    _nodes("gpu_layer", "cuda-cuda", "--sample-mode", "sample_layer_neighbor"),
    _nodes("workers", "cpu-cuda", "--num-workers", "2", on_cpu=True),
    _links("pinned", "pinned-cuda", on_cpu=True),
    _links("gpu", "cuda-cuda"),
    _links("cpu", "cpu-cuda"),
    _links("workers", "cpu-cuda", "--num-workers", "2", on_cpu=True),
    Case(
        "gb_quickstart_nodes", f"{_FOLDER}quickstart/node_classification.py", (), _CORA,
        rf"Test Acc {NUMBER}", on_cpu=(),
    ),
    Case(
        "gb_quickstart_links", f"{_FOLDER}quickstart/link_prediction.py", (), _CORA,
        rf"AUC: {NUMBER}", "test AUC", (), ("torcheval",),
    ),
    Case(
        "gb_lightning", f"{_FOLDER}lightning/node_classification.py", ("--epochs", "10"), _PRODUCTS,
        rf"val_acc[=:]\s*{NUMBER}", "validation accuracy",
        requires=("torchmetrics", "pytorch-lightning"), loads_on_gpu=False,
    ),
    _rgcn("ogbn-mag", "1"),
    # With a GPU its evaluation compares predictions on the CPU with labels that are not.
    _rgcn("ogb-lsc-mag240m", "0"),
    Case(
        "gb_pyg", "sampling/pyg/node_classification.py", (), _PRODUCTS, ACCURACY,
        requires=("torchmetrics", "torch-geometric"), loads_on_gpu=False,
    ),
    _multi("pinned", "0", "pinned-cuda"),
    _multi("gpu", "0", "cuda-cuda"),
    _multi("cpu", "0", "cpu-cuda"),
    _multi("cache", "0", "pinned-cuda", "--gpu-cache-size", "10000"),
    _multi("two_pinned", "0,1", "pinned-cuda"),
    _multi("two_gpu", "0,1", "cuda-cuda"),
    _multi("two_cache", "0,1", "pinned-cuda", "--gpu-cache-size", "10000"),
    _notebook(
        "nodes", "stochastic_training/node_classification", "gb-ogbn-arxiv",
        rf"Validation Accuracy {NUMBER}", "validation accuracy", "scikit-learn",
    ),
    _notebook(
        "links", "stochastic_training/link_prediction", _CORA,
        rf"Link Prediction AUC: {NUMBER}", "test AUC", "scikit-learn",
    ),
    _notebook(
        "homograph", "stochastic_training/ondisk_dataset_homograph", None,
        r"num_edges=(\d+)", "edges",
    ),
    _notebook(
        "heterograph", "stochastic_training/ondisk_dataset_heterograph", None,
        r"num_edges=\{.*'user:like:item': (\d+)", "edges of a type",
    ),
)  # fmt: skip

#: What is not run, and why.
GRAPHBOLT_LEFT_OUT = MappingProxyType(
    {
        f"{_FOLDER}sparse/graphsage.py":
            "its sampler does not take timestamps, which GraphBolt 2.1 gives it: a TypeError, with "
            "DGL's own C++ too",
        f"{_NOTEBOOKS}graphbolt/walkthrough.ipynb":
            "its last cell calls from_fused_csc, which GraphBolt 2.1 has not; all before it runs",
        f"{_NOTEBOOKS}stochastic_training/neighbor_sampling_overview.ipynb": "has no code",
    }
)  # fmt: skip


def as_script(notebook: Path) -> str:
    """The code of a notebook, without what is for IPython alone."""
    cells = json.loads(notebook.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = [line for source in sources for line in source.split("\n")]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%"))) + "\n"
