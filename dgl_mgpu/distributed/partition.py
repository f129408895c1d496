"""Which rank has which nodes: an order of them, cut into one range a rank (1D by rows)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dgl_mgpu.errors import InvalidInputError

# Constants of splitmix64's finaliser (Steele, Lea and Flood, 2014), as signed numbers.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
#: Edges that are looked at together: what is made of them stays in a GPU's cache.
_STRETCH = 1 << 22


@dataclass(frozen=True)
class Ownership:
    """How the nodes of one type are dealt out.

    A node's *position* is its place in an order of all nodes; a rank owns a range of positions.

    Attributes
    ----------
    order : Tensor, int64, shape (num_nodes,), or None
        The node at each position; None where positions are node ids.
    bounds : tuple of int, length ranks + 1
        Where each rank's range begins, and the end of the last.
    """

    order: torch.Tensor | None
    bounds: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Of all ranks."""
        return self.bounds[-1]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, with or without nodes."""
        return len(self.bounds) - 1

    def count(self, rank: int) -> int:
        """How many nodes a rank owns."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def nodes(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The nodes a rank owns, in the order of their positions; int64, shape (count(rank),)."""
        if self.order is None:
            return torch.arange(self.bounds[rank], self.bounds[rank + 1], device=device)
        return self.order[self.bounds[rank] : self.bounds[rank + 1]].to(device)

    def positions(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """The position of every node; shape (num_nodes,), made anew each time."""
        places = torch.arange(self.num_nodes, dtype=dtype, device=device)
        if self.order is None:
            return places
        return torch.empty_like(places).scatter_(0, self.order.to(device), places)

    def cpu(self) -> Ownership:
        """The same, in the host's memory: an order is long, and read only now and then."""
        return self if self.order is None else replace(self, order=self.order.cpu())

    def owners(self, positions: torch.Tensor) -> torch.Tensor:
        """Which rank owns each position; int64, of the positions' shape."""
        inner = torch.tensor(self.bounds[1:-1], dtype=positions.dtype, device=positions.device)
        return torch.bucketize(positions, inner, right=True)


def shuffled(num_nodes: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A random order of nodes, the same on every device; int64, shape (num_nodes,).

    MG-GCN, section 5.2: after it, ranges of rows are balanced in all respects at once.
    """
    return torch.sort(
        random_bits(torch.arange(num_nodes, device=device), seed), stable=True
    ).indices


def random_bits(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """64 random bits for each number, int64, the same on every device."""
    mixed = (numbers + _wrapped(seed * 0x632BE5AB)) * _STEP
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return mixed ^ _shifted(mixed, 31)


def are_chosen(numbers: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """Whether each number is chosen, with a probability and independently of the others; bool."""
    return _shifted(random_bits(numbers, seed), 11) < round(probability * (1 << 53))


def _wrapped(number: int) -> int:
    """A number of any size as torch's would be, which wrap round."""
    return (number + 2**63) % 2**64 - 2**63


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Bits shifted right, zeros coming in on the left."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def fingerprint(src: torch.Tensor, dst: torch.Tensor) -> int:
    """A number that other edges, or the same in another order of ids, are most unlikely to have."""
    total = torch.zeros((), dtype=torch.int64, device=src.device)
    numbers = torch.arange(min(len(src), _STRETCH), device=src.device) * _STEP
    for low in range(0, len(src), _STRETCH):
        from_here, to_here = src[low : low + _STRETCH], dst[low : low + _STRETCH]
        mixed = numbers[: len(from_here)] + _wrapped(low * _STEP)
        mixed += from_here.long() * _FIRST
        mixed ^= mixed >> 29
        mixed += to_here.long()
        mixed *= _SECOND
        mixed ^= mixed >> 32
        mixed *= _FIRST
        total += mixed.sum()
    return int(total)


def balanced_bounds(in_degrees: torch.Tensor, num_ranks: int) -> tuple[int, ...]:
    """Cut nodes into ranges of about equal numbers of in-edges and nodes; degrees are by position.

    MGG, algorithm 1, where a node counts as one edge more: rows without edges are work as well.
    """
    work = in_degrees.long().cumsum(0) + torch.arange(
        1, len(in_degrees) + 1, device=in_degrees.device
    )
    total = int(work[-1]) if len(work) else 0
    shares = torch.arange(1, num_ranks, device=work.device) * total // num_ranks
    # A range ends with the node that brings its work nearest to its share.
    ends = torch.searchsorted(work, shares)
    before = torch.where(ends > 0, work[(ends - 1).clamp(min=0)], 0) if len(work) else ends
    nearer = ends + (2 * shares > before + work[ends.clamp(max=len(work) - 1)] if len(work) else 0)
    return (0, *nearer.tolist(), len(in_degrees))


def assigned(ranks: torch.Tensor, num_ranks: int) -> Ownership:
    """Nodes as somebody dealt them out: ``ranks`` has the rank of every node."""
    order = torch.sort(ranks, stable=True).indices
    counts = torch.bincount(ranks, minlength=num_ranks)
    return Ownership(order, (0, *counts.cumsum(0).tolist()))


def ranges(order: torch.Tensor | None, in_degrees: torch.Tensor, num_ranks: int) -> Ownership:
    """An order's nodes, dealt out in ranges of about the same work; see `balanced_bounds`."""
    degrees = in_degrees if order is None else in_degrees[order.to(in_degrees.device)]
    return Ownership(order, balanced_bounds(degrees, num_ranks))


def check_assignment(ranks: torch.Tensor, num_nodes: int, num_ranks: int) -> None:
    """Raise unless ``ranks`` gives every node one of the ranks."""
    if ranks.dim() != 1 or len(ranks) != num_nodes or ranks.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(
            "partition a graph as assigned",
            f"the assignment has dtype {ranks.dtype} and shape {tuple(ranks.shape)}",
            f"pass int32 or int64, one rank for each of {num_nodes} nodes",
        )
    if num_nodes and not 0 <= int(ranks.min()) <= int(ranks.max()) < num_ranks:
        raise InvalidInputError(
            "partition a graph as assigned",
            f"nodes are assigned to ranks {int(ranks.min())} to {int(ranks.max())}, but there are "
            f"{num_ranks} ranks",
            f"pass ranks in [0, {num_ranks})",
        )
