"""Batches made on a side stream: nothing is read before it is there, or written while read."""

from __future__ import annotations

import gc

import pytest
import torch

from dgl_mgpu.sampling.prefetcher import Prefetcher
from dgl_mgpu.sampling.side_stream import side_stream_of
from tests.sampling.side_streams import poison

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

#: Of a GPU's clock: tens of milliseconds, in which the host does all that it does here.
LONG = 100_000_000
ROWS, WIDTH, COUNT = 4096, 256, 8


@pytest.fixture
def where():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def poisoned(where):
    poison(where)
    yield
    assert not side_stream_of(where).is_full


class RowSource:
    """Batches are rows of a table; making one takes as long as it is told to."""

    def __init__(self, where, *, sleeps=0, count=COUNT, first=None):
        self._where, self._sleeps, self._first = where, sleeps, first
        draw = torch.Generator(where).manual_seed(1)
        self.table = torch.rand(ROWS, WIDTH, device=where, generator=draw)
        self.copy = self.table.clone()
        order = torch.randint(ROWS, (count, 1000), device=where, generator=draw)
        self.order = order.clone()
        self._left = iter(order)
        self.version = 0

    def seeds(self):
        return next(self._left).clone()

    def start(self, number, seeds):
        torch.cuda._sleep(self._sleeps)
        return seeds.clone()

    def make(self, number, seeds, future=None):
        if number == 0 and self._first is not None:
            self._first(self)
        if number:
            torch.cuda._sleep(self._sleeps)
        return self.table[seeds if future is None else future]

    def dependencies(self):
        return self.version

    def new_shared_state(self):
        return None

    def hand_over(self, *made):
        for each in made:
            if each is not None:
                each.record_stream(torch.cuda.current_stream(self._where))

    def expected(self, number):
        return self.copy[self.order[number]]


def assert_right(source, sums):
    torch.cuda.synchronize()
    assert len(sums) == len(source.order)
    for number, found in enumerate(sums):
        assert torch.equal(found, source.expected(number)), number


def test_there_is_one_side_stream_a_gpu_and_it_comes_first(where):
    side_stream = side_stream_of(where)
    assert side_stream is side_stream_of(torch.device("cuda", where.index))
    with side_stream.use():
        stream = torch.cuda.current_stream(where)
    assert stream != torch.cuda.current_stream(where)
    assert stream.priority < 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("made_slowly", [False, True])
@pytest.mark.parametrize("used_slowly", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_batches_are_right_whichever_stream_is_late(
    depth, made_slowly, used_slowly, own_stream, where
):
    source = RowSource(where, sleeps=LONG // 4 if made_slowly else 0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        for batch in Prefetcher(source, side_stream_of(where), depth):
            if used_slowly:
                torch.cuda._sleep(LONG // 4)
            sums.append(batch.clone())
            # Given back while the GPU has yet to read it.
            del batch
    assert_right(source, sums)


@pytest.mark.parametrize("changes", [2, 3])
def test_batches_made_again_are_right(changes, where):
    source = RowSource(where, sleeps=LONG // 4)
    sums = []
    for number, batch in enumerate(Prefetcher(source, side_stream_of(where), 2)):
        torch.cuda._sleep(LONG // 4)
        sums.append(batch.clone())
        del batch
        if number == changes:
            # Written on the script's stream, after a while, into what the side stream reads.
            source.table.neg_()
            source.version += 1
    torch.cuda.synchronize()
    for number, found in enumerate(sums):
        expected = source.expected(number)
        assert torch.equal(found, -expected if number > changes else expected)


def test_the_side_stream_waits_for_what_was_written_before_it_began(where):
    def write(source):
        torch.cuda._sleep(LONG)
        source.table.copy_(source.later)

    source = RowSource(where, first=write)
    source.later = source.table + 1
    source.copy += 1
    torch.cuda.synchronize()
    assert_right(source, [batch.clone() for batch in Prefetcher(source, side_stream_of(where), 1)])


@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_is_two_models_ahead_and_no_more(depth, where):
    source = RowSource(where)
    ends = []
    for number, batch in enumerate(Prefetcher(source, side_stream_of(where), depth)):
        if 2 <= number < COUNT - depth:
            assert ends[number - 2].query()
            # It did not wait for this one, which takes longer than all the rest.
            assert not ends[number - 1].query()
        batch.sum()
        torch.cuda._sleep(LONG)
        ends.append(torch.cuda.current_stream().record_event())


def test_a_pass_that_is_left_leaves_nothing_running(where):
    source = RowSource(where, sleeps=LONG)
    batches = Prefetcher(source, side_stream_of(where), 2)
    torch.cuda._sleep(LONG)  # a GPU that has nothing left to do gets its first batch at once
    next(batches)
    last = batches._queue[-1].event
    assert not last.query()
    gc.disable()
    try:
        del batches
    finally:
        gc.enable()
    # Whoever gets the table's memory next may write there.
    assert last.query()


def test_memory_is_bounded(where):
    source = RowSource(where, count=60)
    source.table = source.table.repeat(1, 16)  # batches of 16 MB
    reserved = []
    for number, batch in enumerate(Prefetcher(source, side_stream_of(where), 1)):
        torch.cuda._sleep(LONG // 20)
        batch.sum()
        if number in (20, 59):
            reserved.append(torch.cuda.memory_reserved(where))
    assert reserved[1] - reserved[0] < 3 << 24  # of 39 batches


def test_no_batch_is_kept(where):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(where)
    source = RowSource(where, count=5)
    for batch in Prefetcher(source, side_stream_of(where), 1):
        batch.sum()
    del batch, source
    assert torch.cuda.memory_allocated(where) == before


def test_without_memory_for_two_batches_one_is_made_at_a_time(where):
    class Large(RowSource):
        def make(self, number, seeds, future=None):
            room = torch.empty(1 << 30, dtype=torch.uint8, device=where)
            room[: seeds.numel()] = number
            return room

    side_stream = side_stream_of(where)
    gc.collect()
    torch.cuda.empty_cache()
    source = Large(where)
    total = torch.cuda.get_device_properties(where).total_memory
    # For the one in use and the next one; at depth 1, one more would be made.
    limit = torch.cuda.memory_reserved(where) + (5 << 29)
    torch.cuda.set_per_process_memory_fraction(limit / total, where)
    try:
        with pytest.warns(UserWarning, match="does not fit into the GPU's memory"):
            seen = []
            for batch in Prefetcher(source, side_stream, 1):
                seen.append(int(batch[0]))
                torch.cuda._sleep(LONG)  # else the next is made when this one is asked for
        assert seen == list(range(COUNT))
        assert side_stream.is_full
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, where)
        side_stream.is_full = False
        torch.cuda.empty_cache()
