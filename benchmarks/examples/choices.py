"""What users chose: MovieLens, or generated data of its schema."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import pandas as pd
import torch

from benchmarks.examples.common import GENERATED, require


class Choices(NamedTuple):
    """What users chose.

    Attributes
    ----------
    g : DGLGraph
        ``item`` nodes, with ``genre`` (float, several) and ``year`` (int), and ``user`` nodes.
    chosen : tuple of Tensor
        Users and items of all choices but those held out.
    latest, held_out : Tensor, shape (users,)
        The last item before the one held out, and that.
    batches, lr : int, float
        Batches that make an epoch, and Adam's learning rate.
    """

    g: dgl.DGLGraph
    chosen: tuple[torch.Tensor, torch.Tensor]
    latest: torch.Tensor
    held_out: torch.Tensor
    batches: int
    lr: float


def read(name: str, root: str) -> Choices:
    if name == GENERATED:
        return generate()
    folder = require(Path(root) / name, name, f"unpack grouplens.org's {name}.zip into {root}")
    tables = [
        pd.read_csv(folder / f"{of}.dat", sep="::", engine="python", header=None, encoding="latin1")
        for of in ("ratings", "movies")
    ]
    ratings, movies = tables[0].set_axis(["user", "item", "rating", "time"], axis=1), tables[1]
    movies = movies[movies[0].isin(ratings["item"])]
    item_of = pd.Series(range(len(movies)), index=movies[0])
    ratings["item"] = ratings["item"].map(item_of)
    ratings["user"] = pd.factorize(ratings["user"])[0]
    ratings = ratings.sort_values(["user", "time"], kind="stable")
    pairs = torch.from_numpy(ratings[["user", "item"]].to_numpy().copy()).T
    genre = torch.from_numpy(movies[2].str.get_dummies("|").to_numpy()).float()
    year = torch.tensor(movies[1].str.extract(r"\((\d{4})\)$")[0].fillna(0).astype(int).to_numpy())
    return choices(pairs, genre, year, batches=20_000, lr=3e-5)


def generate(users: int = 300, tastes: int = 12) -> Choices:
    """Users who choose 11 of 12 items by taste, of which only the choices tell."""
    draw = torch.Generator().manual_seed(0)
    items, each = 20 * tastes, 12
    taste = torch.randint(tastes, (users,), generator=draw)
    rank = torch.rand(users, 20, generator=draw).argsort(1)[:, :each]
    item = rank * tastes + taste[:, None]
    stray = torch.rand(item.shape, generator=draw) < 1 / 12
    item[stray] = torch.randint(items, (int(stray.sum()),), generator=draw)
    pairs = torch.stack([torch.arange(users).repeat_interleave(each), item.flatten()])
    genre = torch.rand(items, 18, generator=draw).round()
    year = torch.randint(1980, 2000, (items,), generator=draw)
    return choices(pairs, genre, year, batches=200, lr=0.01)


def choices(
    pairs: torch.Tensor, genre: torch.Tensor, year: torch.Tensor, batches: int, lr: float
) -> Choices:
    """Hold the last two choices of each user out; pairs are sorted by user, then by time."""
    user, item = pairs
    last = torch.bincount(user).cumsum(0) - 1
    kept = torch.ones(len(user), dtype=torch.bool)
    kept[last] = kept[last - 1] = False
    chosen = user[kept], item[kept]
    g = _both_ways(*chosen, {"user": len(last), "item": len(genre)})
    g.nodes["item"].data.update(genre=genre, year=year)
    return Choices(g, chosen, item[last - 2], item[last - 1], batches, lr)


def _both_ways(user: torch.Tensor, item: torch.Tensor, num_nodes: dict[str, int]) -> dgl.DGLGraph:
    edges = {("user", "chose", "item"): (user, item), ("item", "chosen-by", "user"): (item, user)}
    return dgl.heterograph(edges, num_nodes)


def without_structure(data: Choices) -> Choices:
    """The graph to learn from is rewired, both ways alike; what has to be hit stays."""
    user, item = data.chosen
    g = _both_ways(
        user,
        item[torch.randperm(len(item))],
        {ntype: data.g.num_nodes(ntype) for ntype in data.g.ntypes},
    )
    g.nodes["item"].data.update(data.g.nodes["item"].data)
    return data._replace(g=g)
