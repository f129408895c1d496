"""A machine as plain numbers; nothing here queries the hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dgl_mgpu.errors import ConfigError, DataFormatError

#: Bytes per second of the unit that all bandwidths are given in.
GB = 1e9


@dataclass(frozen=True)
class HostGroup:
    """GPUs that share one way to host memory, such as the uplink of a PCIe switch.

    Attributes
    ----------
    gpus : tuple of int
    bandwidth : float
        GB/s that all of them get together.
    """

    gpus: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Topology:
    """The memories of one machine and what joins them.

    Attributes
    ----------
    name : str
    link_bandwidth : ndarray, float64, shape (n, n)
        GB/s at which GPU ``i`` reads the memory of GPU ``j``; 0 where it cannot.  The diagonal
        is the bandwidth of a GPU's own memory.
    gpu_memory : ndarray, int64, shape (n,)
        Bytes of each GPU.
    host_bandwidth : ndarray, float64, shape (n,)
        GB/s at which each GPU reads host memory while the others are silent.
    host_memory : int
        Bytes of host memory.
    host_groups : tuple of HostGroup
        Limits on what several GPUs read from the host at once.
    port_bandwidth : ndarray, float64, shape (n,), optional
        GB/s a GPU takes in from all its peers together, and the same again that it serves to
        them: what a switch port limits.  By default as much as its links add up to.
    disk_bandwidth : float
        GB/s from disk for the whole machine; 0 when there is none.
    disk_memory : int
        Bytes of disk.

    Raises
    ------
    ConfigError
        If shapes disagree or a number is negative, NaN or infinite.
    """

    name: str
    link_bandwidth: np.ndarray
    gpu_memory: np.ndarray
    host_bandwidth: np.ndarray
    host_memory: int
    host_groups: tuple[HostGroup, ...] = ()
    port_bandwidth: np.ndarray = None  # type: ignore[assignment]  # set in __post_init__
    disk_bandwidth: float = 0.0
    disk_memory: int = 0

    def __post_init__(self) -> None:
        links = np.array(self.link_bandwidth, np.float64)
        n = len(links)
        if links.shape != (n, n) or n == 0:
            raise self._error(f"link_bandwidth has shape {links.shape}", "make it n x n, n >= 1")
        remote = links - np.diag(np.diag(links))
        port = np.maximum(remote.sum(0), remote.sum(1))
        if self.port_bandwidth is not None:
            port = np.minimum(port, np.broadcast_to(self.port_bandwidth, n))
        self._set("link_bandwidth", links, np.float64)
        self._set("gpu_memory", np.broadcast_to(self.gpu_memory, n), np.int64)
        self._set("host_bandwidth", np.broadcast_to(self.host_bandwidth, n), np.float64)
        self._set("port_bandwidth", port, np.float64)
        object.__setattr__(self, "host_groups", tuple(self.host_groups))
        self._validate()

    def _set(self, name: str, value: np.ndarray, dtype: type) -> None:
        array: np.ndarray = np.array(value, dtype)
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    def _validate(self) -> None:
        for name in ("link_bandwidth", "gpu_memory", "host_bandwidth", "port_bandwidth"):
            value = getattr(self, name)
            if not (np.isfinite(value).all() and (value >= 0).all()):
                raise self._error(f"{name} is {value.tolist()}", "give finite numbers >= 0")
        if not (np.diag(self.link_bandwidth) > 0).all() or not (self.host_bandwidth > 0).all():
            raise self._error(
                "a GPU has no bandwidth to its own memory or to the host",
                "pass a link_bandwidth with a positive diagonal and a positive host_bandwidth",
            )
        if (self.ports() <= 0).any():
            raise self._error(
                "a linked GPU has a port without bandwidth", "pass a positive port_bandwidth for it"
            )
        for name in ("host_memory", "disk_memory", "disk_bandwidth"):
            if not 0 <= getattr(self, name) < np.inf:
                raise self._error(f"{name} is {getattr(self, name)}", "give a finite number >= 0")
        for group in self.host_groups:
            inside = all(0 <= gpu < self.num_gpus for gpu in group.gpus)
            if not inside or len(set(group.gpus)) != len(group.gpus) or not group.bandwidth > 0:
                raise self._error(
                    f"{group} does not fit this topology",
                    f"name distinct GPUs in [0, {self.num_gpus}) and a positive bandwidth",
                )

    def _error(self, found: str, fix: str) -> ConfigError:
        return ConfigError(f"describe topology '{self.name}'", found, fix)

    @property
    def num_gpus(self) -> int:
        return len(self.link_bandwidth)

    def ports(self) -> np.ndarray:
        """GB/s of each GPU's port; infinite for a GPU without links. Shape (n,)."""
        linked = (self.link_bandwidth > 0).sum(1) > 1
        return np.where(linked, self.port_bandwidth, np.inf)

    def neighbors(self, gpu: int) -> tuple[int, ...]:
        """The other GPUs whose memory ``gpu`` can read."""
        readable = np.flatnonzero(self.link_bandwidth[gpu])
        return tuple(int(peer) for peer in readable if peer != gpu)

    @property
    def fully_linked(self) -> bool:
        """Whether every GPU reads every other."""
        return bool((self.link_bandwidth > 0).all())

    def subset(self, gpus: Sequence[int]) -> Topology:
        """The same machine when only ``gpus`` are used, renumbered in the order given.

        Raises
        ------
        ConfigError
            If a GPU is named twice or does not exist, or none is named.
        """
        chosen = list(gpus)
        inside = all(0 <= gpu < self.num_gpus for gpu in chosen)
        if not chosen or not inside or len(set(chosen)) != len(chosen):
            raise ConfigError(
                f"use GPUs {chosen} of topology '{self.name}'",
                f"it has GPUs 0 to {self.num_gpus - 1}",
                "name one or more of them, each once",
            )
        new = {gpu: index for index, gpu in enumerate(chosen)}
        groups = tuple(
            HostGroup(members, group.bandwidth)
            for group in self.host_groups
            if (members := tuple(sorted(new[gpu] for gpu in group.gpus if gpu in new)))
        )
        return replace(
            self,
            name=f"{self.name}[{','.join(map(str, chosen))}]",
            link_bandwidth=self.link_bandwidth[np.ix_(chosen, chosen)],
            gpu_memory=self.gpu_memory[chosen],
            host_bandwidth=self.host_bandwidth[chosen],
            host_groups=groups,
            port_bandwidth=self.port_bandwidth[chosen],
        )

    def without_links(self, *pairs: tuple[int, int]) -> Topology:
        """The same machine with the links between some pairs of GPUs cut, both ways.

        Raises
        ------
        ConfigError
            If a pair is not linked.
        """
        links = self.link_bandwidth.copy()
        for one, other in pairs:
            inside = 0 <= one < self.num_gpus and 0 <= other < self.num_gpus
            if one == other or not inside or not (links[one, other] or links[other, one]):
                raise ConfigError(
                    f"cut the link {one}-{other} of topology '{self.name}'",
                    "there is no such link",
                    "name two GPUs that are linked",
                )
            links[one, other] = links[other, one] = 0.0
        return replace(self, link_bandwidth=links)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        data = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }
        groups = [{**asdict(group), "gpus": list(group.gpus)} for group in self.host_groups]
        return {**data, "host_groups": groups}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """Inverse of :meth:`to_dict`.

        Raises
        ------
        DataFormatError
            If a field is missing or of another type.
        ConfigError
            If the numbers do not describe a machine.
        """
        try:
            fields = {name: kind(data[name]) for name, kind in _JSON_TYPES.items()}
            groups = tuple(
                HostGroup(tuple(map(int, group["gpus"])), float(group["bandwidth"]))
                for group in data["host_groups"]
            )
            return cls(**fields, host_groups=groups)
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataFormatError(
                "read a topology",
                f"it is damaged ({type(error).__name__}: {error})",
                "write it with to_dict()",
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


_FLOATS = partial(np.array, dtype=np.float64)
_JSON_TYPES: dict[str, Callable[[Any], Any]] = {
    "name": str, "link_bandwidth": _FLOATS, "gpu_memory": partial(np.array, dtype=np.int64),
    "host_bandwidth": _FLOATS, "host_memory": int, "port_bandwidth": _FLOATS,
    "disk_bandwidth": float, "disk_memory": int,
}  # fmt: skip
