"""The order in which batches are made ahead, waited for and handed out."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref

import pytest
import torch

from dgl_mgpu.sampling import prefetcher as prefetcher
from dgl_mgpu.sampling.prefetcher import Prefetcher, PrefetchTuner
from dgl_mgpu.sampling.side_stream import side_stream_of
from tests.sampling.side_streams import HostStream

CPU = torch.device("cpu")


class Clock:
    """Seconds, which pass while batches are made."""

    def __init__(self):
        self.now = 0.0
        #: Of a batch, by where it is made.
        self.seconds = {"ahead": 2.0, "here": 1.0}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(prefetcher, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(NumberSource, "clock", clock, raising=False)
    return clock


class Batch:
    def __init__(self, number, seeds):
        self.number, self.seeds = number, seeds


class NumberSource:
    """Makes batches of numbers, and notes which, where and when."""

    clock: Clock

    def __init__(self, side_stream, count=6, fails=None):
        self.side_stream, self.fails = side_stream, dict(fails or {})
        self.log = [] if side_stream is None else side_stream.log
        self._seeds = iter(range(100, 100 + count))
        self.version, self.left = 0, None
        #: What beginning a batch raises, by its number.
        self.fails_to_start = {}
        #: What going on with one raises.
        self.fails_to_go_on = {}
        #: What making a batch leaves, by its number.
        self.leaves = {}

    def seeds(self):
        return next(self._seeds)

    def start(self, number, seeds):
        assert seeds == 100 + number
        self.log.append(("starts", number))
        errors = self.fails_to_start.get(number)
        if errors:
            raise errors.pop(0)
        return self._where(), number

    def _where(self):
        return "ahead" if self.side_stream is not None and self.side_stream.is_inside else "here"

    def make(self, number, seeds, future=None):
        assert seeds == 100 + number
        where = self._where()
        if future is not None:
            assert future == (where, number)
            self.log.append(("finishes", number))
        self.log.append((f"makes {where}", number))
        self.clock.now += self.clock.seconds[where]
        self.left = self.leaves.get(number)
        errors = self.fails.get(number)
        if errors:
            raise errors.pop(0)
        return Batch(number, (seeds, self.version))

    def go_on(self, future):
        self.log.append(("goes on", future[1]))
        errors = self.fails_to_go_on.get(future[1])
        if errors:
            raise errors.pop(0)

    def dependencies(self):
        return self.version

    def new_shared_state(self):
        left, self.left = self.left, None
        return left

    def hand_over(self, *made):
        assert not self.side_stream.is_inside
        self.log.append(("hands over", made))


def over(side_stream, depth=1, in_lockstep=False, **options):
    source = NumberSource(side_stream, **options)
    return source, Prefetcher(source, side_stream, depth, in_lockstep=in_lockstep)


def made(log, where):
    return [number for what, number in log if what == f"makes {where}"]


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_batches_come_in_order_and_no_more_than_depth_are_made_ahead(depth, count):
    side_stream = HostStream()
    _, batches = over(side_stream, depth, count=count)
    found = []
    for batch in batches:
        found.append((batch.number, batch.seeds))
        assert len(made(side_stream.log, "ahead")) == min(depth + len(found), count) - 1
    assert found == [(n, (100 + n, 0)) for n in range(count)]
    assert made(side_stream.log, "here") == list(range(min(1, count)))
    assert made(side_stream.log, "ahead") == list(range(1, count))
    with pytest.raises(StopIteration):
        next(batches)


def test_without_a_side_stream_a_batch_is_made_when_it_is_asked_for():
    source, batches = over(None)
    assert iter(batches) is batches
    for number, batch in enumerate(batches):
        assert batch.number == number
        assert made(source.log, "here") == list(range(number + 1))
    assert side_stream_of(CPU) is None


def test_the_side_stream_follows_the_script_once_the_first_batch_is_made():
    side_stream = HostStream()
    _, batches = over(side_stream)
    list(batches)
    order = [what for what, _ in side_stream.log]
    assert order.count("follows") == 1
    assert order.index("makes here") < order.index("follows") < order.index("makes ahead")


@pytest.mark.parametrize("depth", [1, 3])
def test_the_script_waits_for_a_batch_before_it_has_it(depth):
    side_stream = HostStream()
    _, batches = over(side_stream, depth)
    ends = {}
    for batch in batches:
        for before, (what, event) in itertools.pairwise(side_stream.log):
            if what == "records" and event.on_side_stream:
                assert before[0] in ("makes ahead", "starts")
                ends[before[1]] = event  # the later one: it is begun first
        if batch.number:
            waits = side_stream.log.index(("waits", ends[batch.number]))
            assert ("hands over", (batch.seeds[0], batch)) in side_stream.log[waits:]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_batch_is_begun_before_the_one_before_it_is_made(depth):
    side_stream = HostStream()
    _, batches = over(side_stream, depth, count=8)
    for batch in batches:
        started = [number for what, number in side_stream.log if what == "starts"]
        assert started == list(range(1, min(batch.number + depth + 2, 8)))
    order = [
        (what, n) for what, n in side_stream.log if what in ("starts", "finishes", "makes ahead")
    ]
    assert order[0] == ("starts", 1)
    for number in range(1, 7):
        begins = order.index(("starts", number + 1))
        assert order[begins + 1 : begins + 3] == [("finishes", number), ("makes ahead", number)]


def test_what_beginning_raises_is_raised_in_its_turn_and_no_memory_for_it_is_no_error():
    side_stream = HostStream()
    source, batches = over(side_stream)
    source.fails_to_start = {2: [torch.OutOfMemoryError()], 3: [ValueError("begin 3")]}
    assert [next(batches).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="begin 3"):
        next(batches)
    assert [batch.number for batch in batches] == [4, 5]
    assert made(side_stream.log, "ahead") == [1, 2, 4, 5]
    assert [n for what, n in side_stream.log if what == "finishes"] == [1, 4, 5]


def test_what_is_begun_is_made_on_the_side_stream_before_it_rests():
    side_stream = HostStream()
    side_stream.is_idle = True
    list(over(side_stream, count=30)[1])
    events = [
        event for event in side_stream.log if event[0] in ("starts", "finishes", "makes here")
    ]
    started = [number for what, number in events if what == "starts"]
    assert started == [number for what, number in events if what == "finishes"]
    assert started == list(range(2, 30))
    assert made(side_stream.log, "here")[:3] == [0, 1, 10]


def test_what_is_started_at_rest_is_finished_on_the_same_stream():
    """It is started again if the script goes on on another stream."""
    side_stream = HostStream()
    side_stream.is_idle = True
    _, batches = over(side_stream, count=14)
    assert [next(batches).number for _ in range(12)] == list(range(12))
    assert side_stream.log[-1] == ("starts", 12)
    side_stream.script_stream = 7
    assert next(batches).number == 12
    assert ("finishes", 11) in side_stream.log and ("finishes", 12) not in side_stream.log
    assert [batch.number for batch in batches] == [13]
    assert ("finishes", 13) in side_stream.log


@pytest.mark.parametrize("is_idle", [False, True])
def test_without_memory_for_what_is_begun_it_is_given_up_and_no_more_is_begun(is_idle):
    side_stream = HostStream()
    side_stream.is_idle = is_idle
    _, batches = over(side_stream, fails={2: [torch.OutOfMemoryError()]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [batch.number for batch in batches] == list(range(6))
    first = 2 if is_idle else 1
    assert [n for what, n in side_stream.log if what == "starts"][:3] == [
        first,
        first + 1,
        first + 2,
    ]
    assert not side_stream.is_full
    # Each begins when it is made: none was before the one before it was made.
    order = [(what, n) for what, n in side_stream.log if what in ("starts", "makes ahead")]
    later = [number for what, number in order[order.index(("makes ahead", 2)) + 1 :]]
    assert later == sorted(later)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_host_waits_for_the_model_of_two_batches_ago(depth):
    side_stream = HostStream()
    _, batches = over(side_stream, depth, count=8)
    queued = []
    for batch in batches:
        asked = [m for what, m in side_stream.log if what == "records" and not m.on_side_stream]
        queued.append(asked[-1])
        waited = [m for what, m in side_stream.log if what == "host waits"]
        # What was queued when the batch before was asked for, and nothing later.
        assert waited == queued[:-1]
        if batch.number and batch.number + depth < 8:
            waits = side_stream.log.index(("host waits", queued[-2]))
            assert ("makes ahead", batch.number + depth) in side_stream.log[waits:]


def windows(*first_and_last):
    return [n for first, last in first_and_last for n in range(first, last + 1)]


@pytest.mark.parametrize("depth", [1, 3])
def test_an_idle_gpu_has_batches_made_when_they_are_asked_for_if_that_is_faster(depth):
    side_stream = HostStream()
    side_stream.is_idle = True
    _, batches = over(side_stream, depth, count=100)
    assert [batch.number for batch in batches] == list(range(100))
    # Windows of 8: one ahead, one at rest, and one more of these as they are faster. Ahead is tried
    # again after 1, 2 and 4 of them. What is begun or made by then is handed out first.
    more = depth
    assert made(side_stream.log, "ahead") == windows(
        (2, 8 + more), (25, 32 + more), (49, 56 + more), (89, min(96 + more, 99))
    )


@pytest.mark.parametrize("is_busy_later", [False, True])
def test_an_idle_gpu_has_batches_made_ahead_if_that_is_faster(clock, is_busy_later):
    side_stream = HostStream()
    side_stream.is_idle = True
    clock.seconds["here"] = 3.0
    _, batches = over(side_stream, count=100)
    for batch in batches:
        side_stream.is_idle = not (is_busy_later and batch.number >= 20)
    # Where the script is in a second window, and then after 2, 4 and 8 windows: of a GPU that has
    # work left nothing else is tried.
    expected = windows((0, 1), (10, 16), (34, 40), (74, 80))
    assert made(side_stream.log, "here") == (expected[:9] if is_busy_later else expected)


def test_an_idle_gpu_makes_nothing_ahead_for_who_wants_one_batch():
    side_stream = HostStream()
    side_stream.is_idle = True
    for _ in range(3):
        next(over(side_stream)[1])
    assert not made(side_stream.log, "ahead") and made(side_stream.log, "here") == [0] * 3


def test_what_counts_is_the_time_from_one_batch_to_the_next(clock):
    side_stream = HostStream()
    side_stream.is_idle = True
    _, batches = over(side_stream, count=60)
    for batch in batches:
        if batch.number in made(side_stream.log, "here"):
            clock.now += 2.0  # what is read then is waited for
    assert made(side_stream.log, "here") == windows((0, 1), (10, 16), (34, 40))


def test_what_passes_have_shown_is_known_to_the_next_but_not_the_time_between_them(clock):
    side_stream, tuner = HostStream(), PrefetchTuner()
    side_stream.is_idle = True
    for count, expected in ((12, (2, 9)), (8, (0, -1)), (16, (13, 15))):
        side_stream.log.clear()
        list(Prefetcher(NumberSource(side_stream, count), side_stream, 1, tuner))
        clock.now += 1000.0
        assert made(side_stream.log, "ahead") == windows(expected)


def test_how_a_pass_begins_does_not_count(clock):
    tuner, at_rest = PrefetchTuner(), []
    for _ in range(20):
        tuner.start_pass()
        for step in range(15):
            at_rest.append(tuner.is_on_demand)
            # At rest takes longer, and so do the first batches of a pass, however they are made.
            clock.now += 9.0 if step < 4 else 3.0 if tuner.is_on_demand else 2.0
            tuner.after_step(True)
    # Tried it is, in one window of 8 after 1, 2, 4, … others.
    assert 0 < sum(at_rest) < 0.2 * len(at_rest)


@pytest.mark.parametrize("late", [0, 2, 4])
def test_a_gpu_that_mostly_has_work_left_has_its_batches_made_ahead(clock, late):
    tuner = PrefetchTuner()
    for step in range(41):
        clock.now += 1.0
        tuner.after_step(step % 8 < late)
        assert not tuner.is_on_demand
    for _ in range(8):
        assert not tuner.is_on_demand
        clock.now += 1.0
        tuner.after_step(True)
    assert tuner.is_on_demand  # as the other way is tried


def test_the_pace_is_that_of_all_steps_and_not_only_of_those_where_the_gpu_was_idle(clock):
    tuner = PrefetchTuner()
    for step in range(17):
        # Where the GPU still has work left, ahead, the host was in time.
        is_late = tuner.is_on_demand or step % 4 != 0
        clock.now += 3.0 if is_late else 1.0
        clock.now -= 0.5 if tuner.is_on_demand else 0.0
        tuner.after_step(is_late)
    assert tuner.is_on_demand
    tuner = PrefetchTuner()
    for step in range(17):
        is_late = tuner.is_on_demand or step % 8 < 5
        clock.now += (2.5 if tuner.is_on_demand else 4.0) if is_late and step % 8 < 2 else 2.0
        tuner.after_step(is_late)
    assert not tuner.is_on_demand


def test_the_side_stream_follows_the_script_when_it_is_used_again():
    side_stream = HostStream()
    side_stream.is_idle = True
    list(over(side_stream, count=60)[1])
    order = [(what, of if what.startswith("makes") else None) for what, of in side_stream.log]
    for looked in (25, 49):
        before = order.index(("makes here", looked - 1))
        assert ("follows", None) in order[before : order.index(("makes ahead", looked))]


def test_a_batch_that_is_made_at_rest_may_fail_and_be_stale():
    side_stream = HostStream()
    side_stream.is_idle = True
    source, batches = over(side_stream, count=14, fails={11: [ValueError("told once")]})
    found = [next(batches) for _ in range(11)]
    with pytest.raises(ValueError, match="told once"):
        next(batches)
    source.version = 1
    found += batches
    assert [b.seeds for b in found] == [(100 + n, int(n > 11)) for n in range(14) if n != 11]
    assert made(side_stream.log, "ahead") == list(range(2, 10))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad", [0, 1, 3, 5])
@pytest.mark.parametrize("changes", [False, True])
def test_what_a_batch_raises_comes_once_and_in_its_turn(depth, bad, changes):
    side_stream = HostStream()
    error = ValueError("told once")
    source, batches = over(side_stream, depth, fails={bad: [error]})
    for number in range(bad):
        assert next(batches).number == number
    if changes:
        source.version += 1
    with pytest.raises(ValueError) as raised:
        next(batches)
    assert raised.value is error
    assert [batch.number for batch in batches] == list(range(bad + 1, 6))


def test_a_batch_whose_making_was_interrupted_is_made_in_its_turn():
    side_stream = HostStream()
    _, batches = over(side_stream, fails={2: [KeyboardInterrupt()]})
    assert next(batches).number == 0
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert [batch.number for batch in batches] == [2, 3, 4, 5]
    assert made(side_stream.log, "here") == [0, 2]
    # Its seeds had come by the side stream.
    assert ("hands over", (102, None)) in side_stream.log


def test_what_a_change_makes_stale_is_made_again():
    side_stream = HostStream()
    source, batches = over(side_stream, 2)
    found = [next(batches), next(batches)]
    source.version = 1
    side_stream.log.clear()
    found += batches
    assert [(b.number, b.seeds) for b in found] == [(n, (100 + n, int(n >= 2))) for n in range(6)]
    # Two were made ahead and one started: the script waits for the stream before it uses their
    # seeds.
    assert [what for what, _ in side_stream.log[:6]] == ["waits", "hands over"] * 3
    assert [things for what, things in side_stream.log if what == "hands over"] == [
        (102,),
        (103,),
        (104,),
    ]
    assert made(side_stream.log, "here") == [2, 3, 4, 5] and not made(side_stream.log, "ahead")


def test_without_memory_for_it_nothing_is_made_ahead_any_more():
    side_stream = HostStream()
    # Also not when what is begun is given up.
    _, batches = over(
        side_stream, fails={2: [torch.OutOfMemoryError("none left") for _ in range(2)]}
    )
    assert next(batches).number == 0
    with pytest.warns(UserWarning, match="does not fit into the GPU's memory") as told:
        assert next(batches).number == 1
    assert told[0].filename == __file__
    assert side_stream.is_full
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [batch.number for batch in batches] == [2, 3, 4, 5]
    assert made(side_stream.log, "ahead") == [1, 2, 2]
    assert made(side_stream.log, "here") == [0, 2, 3, 4, 5]


def test_memory_that_is_short_in_its_turn_too_is_an_error():
    errors = [torch.OutOfMemoryError("none left") for _ in range(3)]
    _, batches = over(HostStream(), fails={1: errors})
    with pytest.warns(UserWarning, match="does not fit"):
        next(batches)
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)


def test_what_a_batch_leaves_with_others_is_theirs_at_once():
    side_stream = HostStream()
    source, batches = over(side_stream)
    source.leaves = {0: "of the first batch, which is made where the script is", 2: "format"}
    next(batches)
    assert "hands over" not in [what for what, _ in side_stream.log]
    side_stream.log.clear()
    next(batches)
    *_, (records, event), (waits, waited), handed = side_stream.log
    assert (records, waits, waited) == ("records", "waits", event) and event.on_side_stream
    assert handed == ("hands over", ("format",))
    assert "follows" not in [what for what, _ in side_stream.log]


@pytest.mark.parametrize("is_idle", [False, True])
def test_the_side_stream_follows_the_script_that_has_left_something_with_batches(is_idle):
    side_stream = HostStream()
    side_stream.is_idle = is_idle
    source, batches = over(side_stream)
    next(batches)
    side_stream.log.clear()
    source.left = "format"
    next(batches)
    order = [what for what, _ in side_stream.log]
    assert order.count("follows") == 1
    assert order.index("follows") < order.index("makes ahead")
    assert ("hands over", ("format",)) not in side_stream.log


def test_what_is_begun_is_waited_for_too_when_it_is_given_up():
    side_stream = HostStream()
    source, batches = over(side_stream)
    source.fails_to_start = {3: [KeyboardInterrupt()]}
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    (*_, last) = [
        event for what, event in side_stream.log if what == "records" and event.on_side_stream
    ]
    del batches
    gc.collect()
    assert ("host waits", last) in side_stream.log


def test_batches_that_are_given_up_are_waited_for_and_freed():
    side_stream = HostStream()
    source, batches = over(side_stream, 2)
    next(batches)
    refs = [weakref.ref(entry.batch) for entry in batches._queue]
    refs.append(weakref.ref(source))
    last = [event for what, event in side_stream.log if what == "records"][-1]
    assert len(refs) == 3 and last.on_side_stream
    gc.disable()
    try:
        del batches, source
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()
    assert side_stream.log[-1] == ("host waits", last)


@pytest.mark.parametrize("depth", [1, 2])
def test_in_lockstep_batches_are_made_at_the_same_places_whatever_the_gpu_does(depth):
    """As other ranks take part, whose GPUs are at work or not."""
    logs = []
    for idle in ({0, 1, 2, 3, 4, 5}, set(), {1, 2, 5}):
        side_stream = HostStream()
        source, batches = over(side_stream, depth, in_lockstep=True, count=20)
        source.clock.seconds = {"ahead": 1.0 + 5 * len(idle), "here": 1.0}
        for number in range(20):
            side_stream.is_idle = number % 6 in idle
            assert next(batches).number == number
            side_stream.log.append(("has", number))
        logs.append([entry for entry in side_stream.log if isinstance(entry[1], int)])
        assert made(side_stream.log, "here") == [0]
    assert all(log == logs[0] for log in logs)


def test_in_lockstep_the_next_samples_go_on_behind_a_batch():
    side_stream = HostStream()
    source, batches = over(side_stream, in_lockstep=True, count=4)
    source.fails_to_go_on = {2: [RuntimeError("lost")]}
    assert [next(batches).number for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="lost"):
        next(batches)
    assert next(batches).number == 3
    order = [entry for entry in side_stream.log if entry[0] in ("starts", "makes ahead", "goes on")]
    assert order == [
        *(("starts", 1), ("starts", 2), ("makes ahead", 1), ("goes on", 2)),
        *(("starts", 3), ("goes on", 3)),
        ("makes ahead", 3),
    ]
    _, others = over(HostStream(), count=4)
    assert [batch.number for batch in others] == list(range(4))


def test_in_lockstep_no_batch_is_started_again_for_want_of_memory():
    source, batches = over(HostStream(), in_lockstep=True, count=4)
    source.fails_to_start = {2: [torch.OutOfMemoryError("full")]}
    assert [next(batches).number for _ in range(2)] == [0, 1]
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        next(batches)
    assert next(batches).number == 3


def test_in_lockstep_no_batch_is_made_again_for_want_of_memory():
    side_stream = HostStream()
    full = torch.OutOfMemoryError("full")
    _, batches = over(side_stream, in_lockstep=True, fails={2: [full]})
    found = [next(batches).number, next(batches).number]
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        next(batches)
    assert [*found, *(batch.number for batch in batches)] == [0, 1, 3, 4, 5]
    assert made(side_stream.log, "ahead") == [1, 2, 3, 4, 5] and not side_stream.is_full
