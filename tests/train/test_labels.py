"""A split is of nodes that have a class, whatever trains on it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dgl_mgpu.cli import main
from dgl_mgpu.data import Dataset, HeteroDataset, load, load_hetero, require_labelled_split
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.train import setup

SIZE = {"num_nodes": 300, "num_edges": 900, "num_classes": 5}


def relabelled(
    data: Dataset | HeteroDataset, part: str, label: int, count: int = 2
) -> Dataset | HeteroDataset:
    """The data set with a label for the last nodes of a part; unchecked, as one from a file."""
    labels = np.array(data.labels)
    labels[getattr(data, part)[-count:]] = label
    return dataclasses.replace(data, labels=labels, checked=True)


@pytest.mark.parametrize(("part", "label"), [("train", -1), ("valid", 5), ("test", -1)])
def test_a_node_without_a_class_is_named(tmp_path, part, label):
    data = load("generated", tmp_path, **SIZE)
    nodes = getattr(data, part)
    found = f"2 of {len(nodes)} {part} nodes .* node {nodes[-2]}, whose label is {label}; .*0, 5"
    with pytest.raises(InvalidInputError, match=found):
        require_labelled_split(relabelled(data, part, label))


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_an_empty_part_is_named(tmp_path, part):
    data = load("generated", tmp_path, **SIZE)
    empty = dataclasses.replace(data, **{part: getattr(data, part)[:0]})
    with pytest.raises(
        InvalidInputError, match=f"data set 'generated': there are no {part} nodes; "
    ):
        require_labelled_split(empty)


def test_a_node_all_of_whose_labels_are_unknown_is_named(tmp_path):
    data = load("generated", tmp_path, **SIZE, num_labels=3)
    require_labelled_split(data)
    labels = np.array(data.labels)
    labels[data.valid[2], 1:] = -1
    require_labelled_split(dataclasses.replace(data, labels=labels))
    labels[data.valid[2]] = -1
    such = f"node {data.valid[2]}, all of whose labels are unknown"
    found = f"1 of {len(data.valid)} valid nodes .* {such}"
    with pytest.raises(InvalidInputError, match=found):
        require_labelled_split(dataclasses.replace(data, labels=labels))


def test_a_part_whose_labels_are_all_alike_is_named(tmp_path):
    data = load("generated", tmp_path, **SIZE, num_labels=2)
    labels = np.array(data.labels)
    labels[data.test, 0], labels[data.test, 1] = 1, 0
    with pytest.raises(InvalidInputError, match="no label that some test nodes have and others"):
        require_labelled_split(dataclasses.replace(data, labels=labels))
    labels[data.test[0], 1] = 1
    require_labelled_split(dataclasses.replace(data, labels=labels))


def test_nodes_of_no_part_need_no_class(tmp_path):
    data = load("generated", tmp_path, **SIZE)
    split = np.concatenate([data.train, data.valid, data.test])
    labels = np.full_like(data.labels, -1)
    labels[split] = data.labels[split]
    others = dataclasses.replace(data, train=data.train[1:], labels=labels)
    labels[data.train[0]] = -1
    require_labelled_split(others)


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (load, ["mode=minibatch", "data=generated", "data.options.num_nodes=300"]),
        (load, ["mode=fullgraph", "data=generated", "data.options.num_nodes=300"]),
        (load_hetero, ["mode=minibatch", "model=rgcn", "data=generated-relations"]),
        (load_hetero, ["mode=fullgraph", "model=rgcn", "data=generated-relations"]),
    ],
)
def test_no_trainer_begins(tmp_path, monkeypatch, capsys, loader, options):
    monkeypatch.setattr(
        setup,
        loader.__name__,
        lambda *args, **how: relabelled(loader(*args, **how), "valid", -1),
    )
    assert main(["train", f"hydra.run.dir={tmp_path}", *options]) == 1
    told = capsys.readouterr().err
    assert "InvalidInputError: cannot train on data set 'generated" in told and "2 of" in told
    assert "valid nodes have no class" in told and "Traceback" not in told
    assert not (tmp_path / "metrics.jsonl").exists()
