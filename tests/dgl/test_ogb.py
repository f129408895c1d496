"""ogb's data sets are read as ogb wrote them; a file that could run code is not."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, ClassVar

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl and ogb below

import numpy as np
import pandas as pd
import pytest
import torch
from ogb.nodeproppred import DglNodePropPredDataset, NodePropPredDataset

from dgl_mgpu.errors import DataFormatError
from tests.environment import needs_torch

NUM_NODES, EDGES = 5, np.array([[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 2]])
FEATURES = np.arange(NUM_NODES * 3, dtype=np.float32).reshape(NUM_NODES, 3) / 7
LABELS = np.arange(NUM_NODES)[:, None] % 2
SPLIT = {"train": np.array([0, 1, 2]), "valid": np.array([3]), "test": np.array([4])}
pytestmark = pytest.mark.filterwarnings("error:The given NumPy array is not writable")

DATASETS = (NodePropPredDataset, DglNodePropPredDataset)


def write_csv(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(values).to_csv(path, header=False, index=False, compression="gzip")


@pytest.fixture(params=[False, True], ids=["csv", "npz"])
def meta(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A data set in ogb's on-disk format, as its ``meta_dict`` describes it."""
    folder, binary = tmp_path / "tiny", request.param
    (folder / "processed").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    raw = folder / "raw"
    if binary:
        raw.mkdir()
        np.savez(
            raw / "data.npz",
            edge_index=EDGES.T,
            num_nodes_list=np.array([NUM_NODES]),
            num_edges_list=np.array([len(EDGES)]),
            node_feat=FEATURES,
        )
        np.savez(raw / "node-label.npz", node_label=LABELS)
    else:
        write_csv(raw / "edge.csv.gz", EDGES)
        write_csv(raw / "node-feat.csv.gz", FEATURES)
        write_csv(raw / "node-label.csv.gz", LABELS)
        write_csv(raw / "num-node-list.csv.gz", np.array([NUM_NODES]))
        write_csv(raw / "num-edge-list.csv.gz", np.array([len(EDGES)]))
    for part, ids in SPLIT.items():
        write_csv(folder / "split" / "random" / f"{part}.csv.gz", ids)
    none = ("additional node files", "additional edge files")
    return {
        "dir_path": str(folder),
        "version": 1,
        "url": "http://localhost:9/",
        "download_name": "tiny",
        "num tasks": 1,
        "num classes": 2,
        "task type": "multiclass classification",
        "eval metric": "acc",
        "is hetero": "False",
        "binary": str(binary),
        "add_inverse_edge": "False",
        "split": "random",
        **dict.fromkeys(none, "None"),
    }


@pytest.mark.parametrize("form", [None, "arrays", "tensors", "tensors before torch 1.6"], ids=str)
@pytest.mark.parametrize("dataset", DATASETS)
def test_reads_what_it_wrote(dataset, meta, form):
    if form is not None:  # a split in one file, as some data sets have it
        split = {k: v if form == "arrays" else torch.from_numpy(v) for k, v in SPLIT.items()}
        path = Path(meta["dir_path"]) / "split" / "random" / "split_dict.pt"
        torch.save(split, path, _use_new_zipfile_serialization="before" not in form)
    for _ in range(2):  # from the raw files, then from the processed ones
        made = dataset("tiny", meta_dict=meta)
        graph, labels = made[0]
        if dataset is NodePropPredDataset:
            edges, features = graph["edge_index"].T, graph["node_feat"]
        else:
            edges = torch.stack(graph.edges(), dim=1).numpy()
            features = graph.ndata["feat"].numpy()
        np.testing.assert_array_equal(edges, EDGES)
        np.testing.assert_allclose(features, FEATURES, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(labels), LABELS)
        for part, ids in made.get_idx_split().items():
            np.testing.assert_array_equal(np.asarray(ids), SPLIT[part])


def test_reads_files_written_with_numpy_1(meta):
    NodePropPredDataset("tiny", meta_dict=meta)
    processed = Path(meta["dir_path"]) / "processed" / "data_processed"
    data = torch.load(processed, weights_only=False)

    class OldNames(pickle._Pickler):  # numpy.core became numpy._core in NumPy 2
        def save_global(self, obj, name=None):
            if (obj.__module__ or "").startswith("numpy._core"):
                module = obj.__module__.replace("_core", "core")
                self.write(f"c{module}\n{obj.__qualname__}\n".encode())
                self.memoize(obj)
            else:
                super().save_global(obj, name)

        dispatch: ClassVar = {**pickle._Pickler.dispatch, type(np.load): save_global}

    class OldPickle:
        Pickler = OldNames
        __name__ = "pickle"

    torch.save(data, processed, pickle_module=OldPickle, pickle_protocol=2)
    assert b"numpy.core" in processed.read_bytes()
    np.testing.assert_array_equal(
        NodePropPredDataset("tiny", meta_dict=meta)[0][0]["edge_index"], EDGES.T
    )


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("dataset", DATASETS)
def test_refuses_a_file_that_would_run_code(dataset, meta, tmp_path):
    path, made_by_code = Path(meta["dir_path"]) / "split" / "random", tmp_path / "has-run"
    torch.save(RunsCode(made_by_code), path / "split_dict.pt")
    made = dataset("tiny", meta_dict=meta)
    with pytest.raises(DataFormatError, match="mkdir"):
        made.get_idx_split()
    assert not made_by_code.exists()


def test_refuses_names_reached_through_an_allowed_module(meta):
    path = Path(meta["dir_path"]) / "split" / "random" / "split_dict.pt"

    class Reaches:
        def __reduce__(self):
            return np.load, (str(path),)

    torch.save(Reaches(), path)
    with pytest.raises(DataFormatError, match="load"):
        NodePropPredDataset("tiny", meta_dict=meta).get_idx_split()


def test_tensors_can_be_written_to(meta):
    made = DglNodePropPredDataset("tiny", meta_dict=meta)
    graph, labels = made[0]
    for tensor in (labels, graph.ndata["feat"], *made.get_idx_split().values()):
        tensor.zero_()  # arrays that pandas gives out are read-only


@needs_torch("2.6", "torch.load takes any pickle before")
@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_torch_load_is_as_safe_as_ever_for_everyone_else(tmp_path):
    torch.save({"a": np.ones(2)}, tmp_path / "file", pickle_protocol=4)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file")
