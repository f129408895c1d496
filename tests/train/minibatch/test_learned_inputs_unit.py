from __future__ import annotations

import copy
import resource

import dgl
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.errors import OutputError
from dgl_mgpu.train.minibatch.task import LearnedRows


def test_a_state_is_a_file_until_the_rows_change():
    store = dgl_mgpu.GlobalStore.from_dgl(
        dgl.rand_graph(30, 60), embeddings={"emb": 4}, device="cpu"
    )
    model = LearnedRows(store.embedding("emb"))
    optimizer = dgl_mgpu.SparseAdam([model.embedding], lr=0.1)

    def step() -> None:
        model(torch.arange(30)).square().sum().backward()
        optimizer.step()

    def rows() -> torch.Tensor:
        return model(torch.arange(30)).detach()

    step()
    before, rows_before = copy.deepcopy(model.state_dict()), rows()
    assert model.state_dict() == before  # the very file
    step()
    after, rows_after = model.state_dict(), rows()
    assert after != before

    model.load_state_dict(before)
    assert torch.equal(rows(), rows_before) and model.embedding.steps == 1
    assert model.state_dict() == before
    # With its optimizer's state: the step from there is the one that was made.
    step()
    assert torch.equal(rows(), rows_after) and model.embedding.steps == 2
    assert model.state_dict() != after


def test_without_a_place_for_the_file(tmp_path, monkeypatch):
    store = dgl_mgpu.GlobalStore.from_dgl(
        dgl.rand_graph(30, 60), embeddings={"emb": 4}, device="cpu"
    )
    (tmp_path / "file").touch()
    for place in (tmp_path / "none", tmp_path / "file"):
        monkeypatch.setenv("TMPDIR", str(place))
        with pytest.raises(OutputError, match=r"set TMPDIR"):
            LearnedRows(store.embedding("emb")).state_dict()


def test_without_room_for_the_file(tmp_path, monkeypatch):
    store = dgl_mgpu.GlobalStore.from_dgl(
        dgl.rand_graph(3000, 60), embeddings={"emb": 4}, device="cpu"
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OutputError, match=r"File too large; set TMPDIR"):
            LearnedRows(store.embedding("emb")).state_dict()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())
