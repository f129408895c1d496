from __future__ import annotations

import pytest

from dgl_mgpu.data import HETEROGENEOUS, load, load_hetero, names
from dgl_mgpu.errors import ConfigError


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("coar", "cora"),
        ("ogbn-papers100m", "ogbn-papers100M"),
        ("products", "ogbn-products"),
        ("generated-papers", "generated-papers100M"),
        ("CORA", "cora"),
    ],
)
def test_unknown_name_has_the_nearest(tmp_path, asked, nearest):
    with pytest.raises(ConfigError, match="did you mean") as error:
        load(asked, tmp_path)
    assert nearest in error.value.fix


def test_a_name_like_no_other(tmp_path):
    with pytest.raises(ConfigError, match="choose from citeseer, cora"):
        load("§§", tmp_path)


@pytest.mark.parametrize(
    ("name", "option", "nearest"),
    [
        ("cora", "self_loop", "self_loops"),
        ("ogbn-arxiv", "add_reversed", "add_reverse"),
        ("facebook", "num_feature", "num_features"),
        ("generated", "homophilly", "homophily"),
        ("generated", "shape", "scale"),
        ("generated-igbh", "scales", "scale"),
    ],
)
def test_unknown_option_has_the_nearest(tmp_path, name, option, nearest):
    with pytest.raises(ConfigError) as error:
        (load_hetero if name in HETEROGENEOUS else load)(name, tmp_path, **{option: 1})
    assert nearest in error.value.fix
    assert not list(tmp_path.iterdir())


def test_names():
    assert len(names()) == len(set(names())) == 20
    assert set(HETEROGENEOUS) < set(names())


def test_each_kind_has_its_loader(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"it has several types .*; use dgl_mgpu\.data\.load_hetero",
    ):
        load("ogbn-mag", tmp_path)
    with pytest.raises(ConfigError, match="ogbn-mag") as error:
        load_hetero("cora", tmp_path)
    assert "cora" not in error.value.fix
