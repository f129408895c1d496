"""The options of a store: their names, meanings, defaults, parsing and checks.

``GlobalStore.from_dgl``, the planner, ``configs/store`` and ``python -m dgl_mgpu`` all use these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dgl_mgpu.errors import ConfigError, nearest
from dgl_mgpu.machine import preset
from dgl_mgpu.placement import POLICIES, Degrees, Reads, minibatch_reads
from dgl_mgpu.placement.solver import read_ratio, require_policy

#: Where a store may keep what its plan calls GPU memory.
DEVICES = ("auto", "cpu", "cuda")
#: Types in which wider features can be kept.
NARROW_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Estimates of how often a row will be read, other than a file of counts.
HOTNESS = ("degree", "presample")

#: How far one copy of the data reaches.
SPANS = ("machine", "job", "auto")

_STAGING = "store.staging_memory"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: Fewer bytes without a unit, in a text or counted by a program, are meant in another one.
_MIN_AS_TEXT, _MIN_AS_NUMBER = 2**20, 2**10
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)


def parse_bytes(text: str | int, action: str) -> int | None:
    """A number of bytes: ``16GiB``, ``512MB`` (powers of 1024 both), or None for ``auto``.

    Raises ConfigError if it is no size, or a number without a unit that is too small to be one of
    bytes; ``action`` begins the message.
    """
    if text == "auto":
        return None
    match = _SIZE.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        raise ConfigError(
            f"{action}={text}", "it is not a size", "write it like 16GiB, 512MiB or auto"
        )
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    least = _MIN_AS_TEXT if isinstance(text, str) else _MIN_AS_NUMBER
    if str(text).rstrip()[-1].isdigit() and 0 < nbytes < least:
        raise ConfigError(
            f"{action}={text}",
            f"that would be {text} bytes, without a unit",
            f"write it with one, like 16GiB, or {text}B if it is bytes",
        )
    return int(nbytes)


@dataclass(frozen=True)
class StoreOptions:
    """How a store uses the machine's memory.

    Attributes
    ----------
    policy : str
        'auto', which minimises the modelled time, or a named placement
        (:data:`dgl_mgpu.placement.POLICIES`).
    gpu_memory, host_memory : int or str
        Bytes for the store on each GPU and in host memory: ``'16GiB'``, or 'auto' for what
        the machine has; on a GPU, what is free less what training needs, for which a quarter of
        the GPU or 4 GiB is kept, whichever is more.  Without GPUs all ranks' and the host's
        together get no more than nine tenths of what ``/dev/shm`` and the machine have free.
    disk_path : str or Path, optional
        Folder for what neither holds; without one the disk is not used.  A store on GPUs keeps
        features there, and topology not.
    staging_memory : int or str
        Bytes of each GPU's share that cache rows on disk, where there is a ``disk_path``; all of
        the share if that is less.
    device : 'auto', 'cpu' or 'cuda'
        Where what the plan calls GPU memory is: on the GPUs, or with 'cpu' in shared memory.
        'auto' takes GPUs where every rank has one and CuPy can be imported.
    links : 'auto', str or sequence of (int, int)
        Which GPUs may read each other: all that can, those linked in a preset (so that another
        machine's links are tried out on this one), or the pairs of ranks given.
    sms : 'auto' or int
        Most multiprocessors of a GPU that a gather or a sampler takes, which leaves the others to
        the model: as many as fill its links, found by measuring when the store is built
        (:mod:`dgl_mgpu.store.calibration`), or so many, of which host memory gets no more than
        the default of :class:`~dgl_mgpu.ops.view.RowView`; 0 for all.
    graph_ratio, feature_ratio : float in [0, 1] or 'auto'
        Share of topology and of features, hottest rows first, that goes to GPU memory; with
        'auto' the solver chooses (XGNN, section 4.3).
    feature_dtypes : mapping of str to str
        Types in which node features are kept, by the features' names: 'float16', 'bfloat16',
        'float8_e4m3fn' or 'float8_e5m2', also as torch's.  A feature has to be of a wider
        floating-point type, at all nodes that have one of the name, and within the type's range.
        Memory holds more of such rows, and links carry them sooner; they are given in the
        type that they had, rounded, which they are cast to as they are gathered.
    hotness : 'degree', 'presample', str or Path
        What rows are ordered by: how often a node is another's neighbour; how often it was
        read by mini-batches sampled for the purpose (XGNN, section 4.3), on the first rank's GPU
        where the store is on GPUs; or, by the path of the file, how often it was read while
        an earlier store counted (:meth:`dgl_mgpu.GlobalStore.count_accesses`).
    batch_size : int
    fanouts : sequence of int
        The mini-batch that times are modelled for; -1 takes all neighbours.
    span : 'machine', 'job' or 'auto'
        Whether every machine of a job has a copy of the data, or all machines together have one.
        With 'job' machines read each other's rows over the network, in rounds that all ranks take
        part in (:mod:`dgl_mgpu.store.span`).  'auto' takes what fits into the memory of every
        machine, and of both what takes less time by the cost model and the network as measured.
    replica_ratio : float in [0, 1] or 'auto'
        With one copy over all machines, the share of the nodes' bytes, hottest rows first, of which
        every machine has a copy beside its own part; with 'auto' as much as saves time by the cost
        model.

    Raises
    ------
    ConfigError
        If ``policy``, ``hotness``, ``device``, ``span``, ``sms`` or a type is none of these,
        ``links`` no pairs of ranks, a memory no size, or a ratio not in [0, 1].
    """

    policy: str = "auto"
    gpu_memory: int | str = "auto"
    host_memory: int | str = "auto"
    disk_path: str | Path | None = None
    staging_memory: int | str = "256MiB"
    device: str = "auto"
    links: str | Sequence[Sequence[int]] = "auto"
    sms: int | Literal["auto"] = "auto"
    graph_ratio: float | Literal["auto"] = "auto"
    feature_ratio: float | Literal["auto"] = "auto"
    feature_dtypes: Mapping[str, str | torch.dtype] = field(default_factory=dict)
    hotness: str | Path = "degree"
    batch_size: int = 1024
    fanouts: Sequence[int] = (15, 10, 5)
    span: str = "machine"
    replica_ratio: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        is_named = isinstance(self.hotness, str | Path)
        if not is_named or (self.hotness not in HOTNESS and not Path(self.hotness).is_file()):
            raise ConfigError(
                f"order rows by hotness='{self.hotness}'",
                f"it is none of {', '.join(HOTNESS)}, and there is no such file",
                "use one of these, or name a file of counts that an earlier store saved",
            )
        if self.device not in DEVICES:
            raise ConfigError(
                f"keep a store on device='{self.device}'",
                f"the device is none of {', '.join(DEVICES)}",
                "use one of these; with 'cuda' each rank takes its current GPU"
                " (torch.cuda.set_device)",
            )
        if self.span not in SPANS:
            raise ConfigError(
                f"have one copy of a store's data a '{self.span}'",
                f"store.span is none of {', '.join(SPANS)}",
                nearest(str(self.span), SPANS),
            )
        if parse_bytes(self.staging_memory, _STAGING) is None:
            raise ConfigError(
                f"{_STAGING}={self.staging_memory}", "it is not a size", "write it like 256MiB"
            )
        if self.sms != "auto" and not (type(self.sms) is int and self.sms >= 0):
            raise ConfigError(
                f"use store.sms={self.sms!r} multiprocessors",
                "it is not a whole number of 0 or more",
                "give 'auto', a number, or 0 for all",
            )
        require_policy(self.policy)
        for name in ("gpu_memory", "host_memory"):
            parse_bytes(getattr(self, name), f"store.{name}")
        for name in ("graph_ratio", "feature_ratio", "replica_ratio"):
            read_ratio(name, getattr(self, name))
        self.narrow_features()
        whole = isinstance(self.fanouts, Sequence) and all(type(n) is int for n in self.fanouts)
        has_size = isinstance(self.batch_size, Integral) and self.batch_size >= 1
        if not whole or not self.fanouts or min(self.fanouts) < -1 or not has_size:
            raise ConfigError(
                f"plan for batch_size={self.batch_size} and fanouts={self.fanouts}",
                "these make no mini-batch",
                "give a batch size of 1 or more, and a whole number for each layer, -1 for all",
            )

    def narrow_features(self) -> dict[str, torch.dtype]:
        """``feature_dtypes`` as torch's types."""
        named = self.feature_dtypes
        action = f"keep features as store.feature_dtypes={named!r}"
        if not isinstance(named, Mapping):
            raise ConfigError(
                action, "it does not give types by name", "write them like {feat: float16}"
            )
        dtypes = {}
        for name, dtype in named.items():
            word = str(dtype).removeprefix("torch.")
            if word not in NARROW_DTYPES:
                raise ConfigError(
                    action, f"'{name}' cannot be kept as {word}", nearest(word, NARROW_DTYPES)
                )
            dtypes[str(name)] = getattr(torch, word)  # also of a number, as YAML has keys
        return dtypes

    def reads(self, hotness: Mapping[str, np.ndarray], topologies: Collection[Degrees]) -> Reads:
        """Expected reads of one mini-batch, by :func:`~dgl_mgpu.placement.minibatch_reads`."""
        # Counts are of reads, and degrees of draws.
        return minibatch_reads(
            hotness, topologies, self.batch_size, self.fanouts, distinct=self.hotness != "degree"
        )


# Keys of a store in files and on command lines that hold something else than a text.
_NOT_TEXT: dict[str, Any] = {
    "disk_path": str | None,
    "feature_dtypes": dict[str, str],
    **dict.fromkeys(("graph_ratio", "feature_ratio", "replica_ratio", "links", "sms"), Any),
}
if TYPE_CHECKING:
    StoreConfig = StoreOptions
else:
    #: The keys of ``configs/store``: `StoreOptions` in types that Hydra can check, without the
    #: mini-batch, which a run has elsewhere.
    StoreConfig = make_dataclass(
        "StoreConfig",
        [
            (option.name, _NOT_TEXT.get(option.name, str), field(
                default=option.default, default_factory=option.default_factory))
            for option in fields(StoreOptions)
            if option.name not in ("batch_size", "fanouts")
        ],
        namespace={"__module__": __name__},
    )  # fmt: skip


def options_as_written(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Check options from a command line or a YAML file, before there is a store.

    They are stricter than those of a program: a size is text, and a value has the type that YAML
    gives it. Relative paths become absolute, since the script may change its folder. ``values``:
    options by the names of :class:`StoreOptions`. ``prefix``: what stands before a key on the
    command line, for messages: ``--store``. Raises ConfigError if a key is unknown, or a value is
    none that the store takes.
    """
    known = StoreOptions.__dataclass_fields__
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"set {prefix}.{key}", "there is no such key", nearest(key, known))
        _check_written(key, value, prefix)
    for key in ("disk_path", "hotness"):
        if values.get(key) not in (None, *HOTNESS):
            values[key] = str(Path(values[key]).absolute())
    StoreOptions(**values)
    return values


def _check_written(key: str, value: Any, prefix: str) -> None:
    if key.endswith("_memory"):
        parse_bytes(str(value), f"{prefix}.{key}")  # as text, which has other limits
    elif key == "links" and isinstance(value, str) and value != "auto":
        preset(value)
    holds: Callable[[Any], bool] | None
    holds, fix = {
        "policy": (lambda policy: policy in POLICIES, nearest(str(value), POLICIES)),
        "disk_path": (lambda path: path is None or isinstance(path, str), "name a folder"),
        "hotness": (lambda name: isinstance(name, str), "say degree, presample or name a file"),
        "graph_ratio": (_is_share, "give a share in [0, 1], or auto"),
        "feature_ratio": (_is_share, "give a share in [0, 1], or auto"),
        "replica_ratio": (_is_share, "give a share in [0, 1], or auto"),
        "span": (lambda span: span in SPANS, nearest(str(value), SPANS)),
        "links": (_are_links, "say auto, name a preset or give pairs of ranks: [[0,1],[2,3]]"),
        "batch_size": (lambda size: type(size) is int, "give a whole number"),
    }.get(key, (None, ""))
    if holds is not None and not holds(value):
        raise ConfigError(f"set {prefix}.{key}={value}", "it does not take this value", fix)


def _is_share(value: Any) -> bool:
    return value == "auto" or (type(value) in (int, float) and 0 <= value <= 1)


def _are_links(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(pair, list) and len(pair) == 2 and all(type(rank) is int for rank in pair)
            for pair in value
        )
    )
