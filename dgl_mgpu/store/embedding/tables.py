"""Tables of learned rows: what a store is to have of them, their places and their first rows."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.ops.cpu import kernel
from dgl_mgpu.ops.philox import philox, splitmix64
from dgl_mgpu.placement import Plan, TablePlan
from dgl_mgpu.store.graph_structure import node_table, state_table
from dgl_mgpu.store.memory import Blueprint, FeatureSource
from dgl_mgpu.store.memory.format import Source

#: For each optimizer, the tables of state that it keeps beside the rows, by torch's names.
STATES = {"sgd": (), "adagrad": ("state_sum",), "adam": ("exp_avg", "exp_avg_sq")}

# Fourth counter word of the draws that first rows are.
_STREAM = 1 << 28
# Rows drawn per range that are worth waking a thread for.
_GRAIN = 256


@dataclasses.dataclass(frozen=True)
class EmbeddingSpec:
    """A row of trained numbers for each node of a type, to be kept in a store.

    Attributes
    ----------
    dim : int
        Numbers in a row, float32.
    optimizer : 'sgd', 'adagrad' or 'adam'
        What will train it, whose state is kept beside the rows: none, as much again, or twice that.
    init : 'xavier', float, Tensor or ndarray
        First rows: drawn evenly from [-b, b], where b is the number, or for 'xavier' that of
        ``torch.nn.init.xavier_uniform_`` on the whole table, √(6 / (nodes + dim)); or the rows
        themselves, float32, shape (nodes, dim).  What is drawn depends on the store's seed, the
        names of the node type and the embedding, and the node's id alone.

    Raises
    ------
    InvalidInputError
        If one of them is none of these.
    """

    dim: int
    optimizer: str = "adam"
    init: str | float | torch.Tensor | np.ndarray = "xavier"

    def __post_init__(self) -> None:
        action = "keep an embedding in a store"
        check_integer(self.dim, "dim", 1, action)
        if self.optimizer not in list(STATES):  # which also asks for what has no hash
            raise InvalidInputError(
                action,
                f"there is no optimizer {self.optimizer!r}",
                f"name one of {', '.join(STATES)}",
            )
        if isinstance(self.init, torch.Tensor | np.ndarray):
            return
        is_number = isinstance(self.init, int | float) and not isinstance(self.init, bool)
        if not (0 <= self.init < math.inf if is_number else self.init == "xavier"):  # type: ignore[operator]
            raise InvalidInputError(
                action,
                f"init={self.init!r} is none of the ways to fill the first rows",
                "pass 'xavier', a bound of 0 or more, or the rows themselves",
            )

    def bound(self, num_nodes: int) -> float:
        """The bound of what is drawn."""
        if self.init == "xavier":
            return math.sqrt(6 / (num_nodes + self.dim))
        return float(self.init)  # type: ignore[arg-type]


#: By node type and name.
Specs = dict[tuple[str, str], EmbeddingSpec]


def read_specs(embeddings: Mapping[str, Any] | None, ntypes: list[str]) -> Specs:
    """What a user asks for, by node type and name, or InvalidInputError.

    Given is name → dim or :class:`EmbeddingSpec`, where there is one node type, or node type → such
    a mapping.
    """
    action = "keep embeddings in a store"
    if not isinstance(embeddings, Mapping | None):
        raise InvalidInputError(
            action, f"embeddings={embeddings!r} is not a dict", "pass a dict, such as {'emb': 64}"
        )
    specs: Specs = {}
    for first, given in (embeddings or {}).items():
        if isinstance(given, Mapping):
            ntype, named = first, given
        elif len(ntypes) == 1:
            ntype, named = ntypes[0], {first: given}
        else:
            raise InvalidInputError(
                action,
                f"the graph has the node types {ntypes}, and '{first}' does not say of which it is",
                "name embeddings by node type: {'paper': {'emb': 64}}",
            )
        if ntype not in ntypes:
            raise InvalidInputError(
                action, f"the graph has no node type '{ntype}'", f"name one of {ntypes}"
            )
        for name, spec in named.items():
            specs[ntype, name] = spec if isinstance(spec, EmbeddingSpec) else EmbeddingSpec(spec)
    return specs


def with_embeddings(
    sources: Mapping[str, Source], specs: Specs, num_nodes: Mapping[str, int]
) -> dict[str, Source]:
    """The tables to place: an embedding's rows and state as one, since they lie side by side.

    Raises InvalidInputError if a feature has an embedding's name, or first rows do not have its
    shape.
    """
    tables = dict(sources)
    for (ntype, name), spec in specs.items():
        table, action = node_table(ntype, name), f"keep embedding '{name}' of '{ntype}' in a store"
        if table in sources:
            raise InvalidInputError(
                action, "there is a feature of this name", "give one of them another name"
            )
        shape = num_nodes[ntype], spec.dim
        if not isinstance(spec.init, str | int | float):
            rows = FeatureSource(spec.init)
            if (rows.num_rows, *rows.row_shape) != shape or rows.dtype != torch.float32:
                raise InvalidInputError(
                    action,
                    f"the first rows have shape {(rows.num_rows, *rows.row_shape)} and dtype "
                    f"{rows.dtype}",
                    f"pass rows of shape {shape} and dtype torch.float32",
                )
        copies = 1 + len(STATES[spec.optimizer])
        tables[table] = FeatureSource(_zeros(shape[0], copies * spec.dim), ntype)
    return tables


def require_in_memory(plan: Plan, specs: Specs) -> None:
    """Raise ConfigError if a plan has rows of embeddings on disk, where they cannot be trained."""
    for ntype, name in specs:
        if any(tier.memory == "disk" for tier in plan.tables[node_table(ntype, name)].tiers):
            raise ConfigError(
                f"keep embedding '{name}' of '{ntype}' in memory, where it is trained",
                "with these budgets part of it goes to disk",
                "raise store.host_memory or store.gpu_memory",
            )


def unfold_embeddings(blueprint: Blueprint, specs: Specs, seed: int) -> Blueprint:
    """The blueprint with each embedding's rows and state as tables of their own, placed alike.

    Raises ConfigError as :func:`require_in_memory`.
    """
    require_in_memory(blueprint.plan, specs)
    sources = dict(blueprint.sources)
    tables, hits = dict(blueprint.plan.tables), dict(blueprint.plan.hit_rates)
    for (ntype, name), spec in specs.items():
        rows = node_table(ntype, name)
        num_nodes = sources[rows].num_rows
        sources[rows] = FeatureSource(_first_rows(ntype, name, spec, num_nodes, seed), ntype)
        for state in STATES[spec.optimizer]:
            beside = state_table(ntype, name, state)
            sources[beside] = FeatureSource(_zeros(num_nodes, spec.dim), ntype)
            tables[beside] = TablePlan(beside, tables[rows].tiers)
            if rows in hits:
                hits[beside] = hits[rows]
    plan = dataclasses.replace(blueprint.plan, tables=tables, hit_rates=hits)
    return dataclasses.replace(blueprint, sources=sources, plan=plan)


def _zeros(num_rows: int, width: int) -> np.ndarray:
    """Rows that take no memory."""
    return np.broadcast_to(np.zeros((1, width), np.float32), (num_rows, width))


def _first_rows(ntype: str, name: str, spec: EmbeddingSpec, num_rows: int, seed: int) -> Any:
    if isinstance(spec.init, torch.Tensor):
        return spec.init.detach().cpu()
    if isinstance(spec.init, np.ndarray):
        return spec.init
    digest = hashlib.blake2b(f"{ntype}/{name}".encode(), digest_size=8).digest()
    key = splitmix64(splitmix64(seed) ^ int.from_bytes(digest, "little"))
    return UniformRows(num_rows, spec.dim, spec.bound(num_rows), key)


class UniformRows:
    """Rows drawn evenly from [-bound, bound] when they are asked for, always the same.

    Rows of another ``key``, 64 bits, are independent of these.
    """

    ndim = 2
    dtype = np.dtype(np.float32)

    def __init__(self, num_rows: int, width: int, bound: float, key: int) -> None:
        self.shape = num_rows, width
        self._bound = bound
        self._key = key - (1 << 64) if key >> 63 else key

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        rows = np.empty((len(ids), self.shape[1]), np.float32)
        ids = np.ascontiguousarray(ids, np.int64)
        cpu.run(_draw, len(ids), _GRAIN, ids, rows, np.float32(self._bound), self._key)
        return rows


@kernel
def _draw(
    begin: int, end: int, ids: np.ndarray, rows: np.ndarray, bound: np.float32, key: int
) -> None:
    """Fill the rows ``[begin, end)``: four numbers of 24 bits from each block of draws."""
    width = rows.shape[1]
    for place in range(begin, end):
        for column in range(0, width, 4):
            first, second = philox(ids[place], column >> 2, _STREAM, key)
            for at in range(min(4, width - column)):
                word = first if at < 2 else second
                bits = (word >> np.uint64(32 * (at & 1) + 8)) & np.uint64(0xFFFFFF)
                # From -1 to 1 in steps of 2^-23, which float32 has all.
                unit = np.float32(np.int64(bits) - (1 << 23)) * np.float32(2.0**-23)
                rows[place, column + at] = unit * bound
