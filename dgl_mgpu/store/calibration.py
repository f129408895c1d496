"""How many of a GPU's multiprocessors gathers and samplers need, measured on the store itself.

A small part of a GPU keeps a link busy; the rest is then left to the model, which trains meanwhile
(PyTorch-Direct, sections 3.2.2 and 4.3).  How small depends on the GPU, the links, how many ranks
share them and how long rows are: so it is tried out, on all ranks at once, when a store on GPUs
has been built.  That takes some tenths of a second, and what was found is kept in a file for the
next time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.store_options import StoreOptions
from dgl_mgpu.errors import DeviceMemoryError
from dgl_mgpu.ops import GraphView, RowView, SampleKey, device, gather_rows, sample_blocks
from dgl_mgpu.ops.view import HOST_SMS, LISTED_ROWS
from dgl_mgpu.placement import HOST, Tier
from dgl_mgpu.store.memory.format import CSCFormat
from dgl_mgpu.store.memory.table import Table
from dgl_mgpu.store.memory.tables import Store
from dgl_mgpu.utils.tuning_cache import TuningCache

T = TypeVar("T")

#: Bytes of a table in GPUs, or in host memory, below which nothing is measured: much of it fits
#: into a GPU's cache, and reading it takes microseconds.
MIN_BYTES = 256 << 20

_ACTION = "measure how many multiprocessors the store's operators need"
#: What a gather that is timed reads: several times a GPU's cache, as a mini-batch does, ...
_BATCH_BYTES = 128 << 20
#: ... in no more rows than a mini-batch has, and no fewer than gathers list host rows of.
_BATCH_ROWS = range(LISTED_ROWS, (1 << 20) + 1)
#: Batches that take turns, so that none is in the cache.
_BATCHES = 4
#: How much more than the shortest time is as good: bandwidth of 97 %, sampling within 5 %.
_GATHER_SLACK, _SAMPLE_SLACK = 1 / 0.97, 1.05
#: With so much more than the shortest time, fewer multiprocessors are not worth trying.
_HOPELESS = 1.25
#: How long a measurement lasts, and how many calls it takes at most.
_WINDOW_SECONDS, _MAX_CALLS = 4e-3, 16
#: Of the file; a higher number when kernels have changed and older measurements no longer hold.
FOUND = TuningCache("multiprocessors.json", 1, int)


class CudaMeter:
    """Times calls by events on the current stream of a CUDA device.

    ``machine`` names all of GPU and driver that times depend on.
    """

    def __init__(self, gpu: torch.device) -> None:
        self.num_sms = device.driver.num_sms(gpu)
        version = device.cupy().cuda.runtime.driverGetVersion()
        self.machine = (
            f"{torch.cuda.get_device_name(gpu)}, CUDA {torch.version.cuda} on driver {version}"
        )

    def seconds(self, call: Callable[[], object]) -> float:
        """Time that a call takes on the GPU, the mean of some."""
        once = self._mean(call, 1)
        calls = min(_MAX_CALLS, int(_WINDOW_SECONDS / once))
        return once if calls < 2 else self._mean(call, calls)

    def _mean(self, call: Callable[[], object], times: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / times


@dataclass(frozen=True)
class _Trial:
    """An operation whose time depends on how many multiprocessors it has."""

    name: str  # what the answer depends on beside the machine
    slack: float  # a time that is so many times the shortest one is as good
    prepare: Callable[[], Callable[[int], object]]  # returns the operation, which takes that number


def calibrate(
    store: Store,
    options: StoreOptions,
    ranks: Communicator,
    meter: CudaMeter | None = None,
    *,
    cached: bool = True,
) -> None:
    """Have each table of a store on GPUs read with as many multiprocessors as fill its links.

    What is found is the fewest with which, on the slowest rank, a gather of rows in GPU memory has
    97 % of the best bandwidth, a gather from host memory too, and a mini-batch of the size that
    the store was planned for is sampled within 5 % of the shortest time.  Tiers are read as
    often as the plan expects.  A table that is smaller than :data:`MIN_BYTES` keeps what its
    view has by default; so does topology between different node types, and any topology where
    ``options.fanouts`` take all neighbours.

    Collective.  A store in shared memory is left as it is.  The first rank's options count, and
    with a number as ``options.sms`` nothing is measured.  With ``cached``, `FOUND` has what was
    found before on such a machine, and keeps what is found.  ``meter`` is the GPU's own by default.

    Raises DeviceMemoryError if a gather or a mini-batch does not fit beside the store, and
    RankFailedError if another rank failed.
    """
    if store.gpu is None:
        return
    options = ranks.broadcast_from_rank0(_ACTION, lambda: options)
    if options.sms != "auto":
        for table in store.tables.values():
            table.use_sms(options.sms, min(options.sms or HOST_SMS, HOST_SMS))
        return
    trials = {name: _trials(store, name, options, ranks.rank) for name in store.tables}
    if not any(trials.values()):
        return
    clock = meter or ranks.run_all(_ACTION, lambda: CudaMeter(store.device))
    machine, num_sms = ranks.broadcast_from_rank0(_ACTION, lambda: (clock.machine, clock.num_sms))
    known = ranks.broadcast_from_rank0(_ACTION, lambda: FOUND.read() if cached else {})
    measured: dict[str, int] = {}
    for name, table in store.tables.items():
        chosen = {"sms": 0, "host_sms": HOST_SMS}
        for what, trial in trials[name].items():
            key = f"{trial.name}; {ranks.size} x {machine}; links {options.links}"
            if not 0 <= known.get(key, -1) <= num_sms:
                known[key] = measured[key] = _fewest(trial, clock, num_sms, ranks)
            chosen[what] = known[key]
        table.use_sms(**chosen)
    if measured and cached:
        ranks.broadcast_from_rank0(_ACTION, lambda: FOUND.keep(measured))
    # What was gathered and sampled is not needed any more.
    store.gpu.runtime.trim()


def candidates(num_sms: int) -> list[int]:
    """The numbers of multiprocessors that are tried, from all of them down to one."""
    halves = {num_sms >> k for k in range(num_sms.bit_length())}
    return sorted(halves | {3 * sms // 4 for sms in halves if sms > 1}, reverse=True)


def _fewest(trial: _Trial, meter: CudaMeter, num_sms: int, ranks: Communicator) -> int:
    """The fewest multiprocessors with which an operation is as good as with any; 0 for all."""

    def prepare() -> Callable[[int], object]:
        operation = trial.prepare()
        operation(num_sms)  # compiles kernels
        return operation

    operation = ranks.run_all(_ACTION, partial(_with_room, prepare))

    def seconds(sms: int) -> float:
        measure = partial(meter.seconds, partial(operation, sms))
        return max(ranks.all_gather(ranks.run_all(_ACTION, partial(_with_room, measure))))

    # What was held up by something else is measured once more.
    times: dict[int, float] = {}
    for sms in candidates(num_sms):
        times[sms] = seconds(sms)
        if times[sms] > _HOPELESS * min(times.values()):
            times[sms] = min(times[sms], seconds(sms))
            if times[sms] > _HOPELESS * min(times.values()):
                break
    best = min(times.values())
    for sms, time in times.items():
        if time <= _HOPELESS * best:
            times[sms] = min(time, seconds(sms))
    best = min(times.values())
    sms = min(sms for sms, time in times.items() if time <= trial.slack * best)
    return 0 if sms == num_sms else sms


def _with_room(step: Callable[[], T]) -> T:
    try:
        return step()
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceMemoryError(
            _ACTION,
            f"a gather or a mini-batch does not fit beside the store ({error})",
            "lower store.gpu_memory, or set store.sms to a number",
        ) from error


def _trials(store: Store, name: str, options: StoreOptions, rank: int) -> dict[str, _Trial]:
    """What is to be measured for a table, by the argument of ``use_sms`` that it gives."""
    table = store.tables[name]
    tiers = table.plan.tiers
    accesses = [row["accesses"] for row in store.plan.rows if row["table"] == name]
    if not sum(accesses):
        accesses = [tier.num_rows for tier in tiers]
    reads = list(zip(tiers, accesses, strict=True))
    if isinstance(table.view, GraphView):
        return _sampler_trials(table, table.view, reads, options, rank)
    return _gather_trials(table.view, reads, rank)


_Reads = Sequence[tuple[Tier, float]]  # tiers, and how often each is read


def _gather_trials(view: RowView, reads: _Reads, rank: int) -> dict[str, _Trial]:
    row_bytes = view.row_bytes
    count = min(_BATCH_BYTES // max(row_bytes, 1), _BATCH_ROWS[-1])
    if row_bytes == 0 or count not in _BATCH_ROWS:
        return {}
    # Ids are positions from here on, and none is on disk: looking them up takes no part in what
    # bounds a gather, and nobody waits for the disk.
    view = replace(view, position=view.position[:0], disk=None)
    rows = f"rows up to {_power_of_two(row_bytes)} B"
    trials = {}
    on_gpus = [(tier, often) for tier, often in reads if tier.memory == "gpu"]
    if _num_rows(on_gpus) * row_bytes >= MIN_BYTES:
        trials["sms"] = _Trial(
            f"gather {rows} from {_shares(on_gpus)}",
            _GATHER_SLACK,
            partial(
                _gather, lambda sms: replace(view, host_start=-1, sms=sms), on_gpus, count, rank
            ),
        )
    view = replace(view, host_share=1.0, host_reads=None)
    on_host = [(tier, often) for tier, often in reads if tier.memory == "host"]
    host_bytes = _num_rows(on_host) * row_bytes
    if view.host_start >= 0 and host_bytes >= MIN_BYTES:
        # The more memory, the more addresses have to be translated.
        trials["host_sms"] = _Trial(
            f"gather {rows} from host memory up to {_power_of_two(host_bytes)} B",
            _GATHER_SLACK,
            partial(_gather, lambda sms: replace(view, host_sms=sms), on_host, count, rank),
        )
    return trials


def _gather(
    view_with: Callable[[int], RowView], reads: _Reads, count: int, rank: int
) -> Callable[[int], object]:
    """Gathers of ``count`` rows from views that give them so many multiprocessors."""
    view = view_with(0)
    batches = _batches(lambda draw: _positions(reads, count, draw), view, rank)
    out = torch.empty(count, *view.row_shape, dtype=view.dtype, device=view.tiers.device)
    return lambda sms: gather_rows(view_with(sms), next(batches), out)


def _sampler_trials(
    table: Table, view: GraphView, reads: _Reads, options: StoreOptions, rank: int
) -> dict[str, _Trial]:
    format = table.format
    assert isinstance(format, CSCFormat)
    nbytes = format.offsets(format.num_rows, format.num_edges)[2]
    # Over machines a hop leads to nodes that others have, and is sampled there.
    is_whole = view.num_rows == view.num_cols and options.span == "machine"
    if nbytes < MIN_BYTES or not is_whole or min(options.fanouts) < 0:
        return {}

    def draw_seeds(draw: torch.Generator) -> torch.Tensor:
        return torch.randint(
            view.num_rows, (options.batch_size,),
            generator=draw, dtype=view.idtype, device=draw.device,
        )  # fmt: skip

    def prepare() -> Callable[[int], object]:
        batches, key = _batches(draw_seeds, view, rank), SampleKey(0)
        return lambda sms: sample_blocks(view, next(batches), options.fanouts, key, sms=sms)

    name = (
        f"sample {list(options.fanouts)} for {options.batch_size} nodes of "
        f"{8 * view.idtype.itemsize} bits from {_shares(reads)}"
    )
    return {"sms": _Trial(name, _SAMPLE_SLACK, prepare)}


def _batches(
    make: Callable[[torch.Generator], torch.Tensor], view: RowView | GraphView, rank: int
) -> Iterator[torch.Tensor]:
    # A generator of one's own: a run is the same whether it measures or not.
    draw = torch.Generator(view.tiers.device).manual_seed(rank)
    return itertools.cycle([make(draw) for _ in range(_BATCHES)])


def _positions(reads: _Reads, count: int, draw: torch.Generator) -> torch.Tensor:
    """Positions of rows, as often as their tiers are read, int64."""
    rows = [(often, tier.start, tier.num_rows) for tier, often in reads]
    often, start, size = torch.tensor(rows, dtype=torch.float64, device=draw.device).T
    weights = often if often.any() else size
    tier = torch.multinomial(weights, count, replacement=True, generator=draw)
    start, size = start[tier], size[tier]
    offset = torch.rand(count, generator=draw, dtype=torch.float64, device=draw.device) * size
    return (start + offset.floor()).long()


def _num_rows(reads: _Reads) -> int:
    return sum(tier.num_rows for tier, _ in reads)


def _shares(reads: _Reads) -> str:
    """Which kinds of memory reads go to, in tenths, over all ranks."""
    shares: defaultdict[str, float] = defaultdict(float)
    for tier, often in reads:
        if tier.memory != "gpu":
            shares[tier.memory] += often
            continue
        for rank, holders in enumerate(tier.source):
            for holder in holders:
                kind = "host" if holder == HOST else "device" if holder == rank else "peer"
                shares[kind] += often / (len(tier.source) * tier.parts)
    total = sum(shares.values()) or 1
    return " ".join(f"{kind} {10 * round(10 * shares[kind] / total)} %" for kind in sorted(shares))


def _power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (number - 1).bit_length()
