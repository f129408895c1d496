"""Random numbers that are seeded by DGL's seed."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import dgl
import pytest
import torch
from dgl.random import choice

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph import random
from dgl_mgpu.graph.dispatch import tensor_backed_graphs

NULL = torch.empty(0)
CPU = torch.device("cpu")


def draws() -> list:
    return [
        torch.rand(5, generator=random.generator(CPU)).tolist(),
        random.choice(7, 100, NULL, False, 64).tolist(),
        random.next_key(),
        random.next_key(),
    ]


def test_dgls_seed_seeds_everything_and_torchs_nothing():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    dgl.seed(1)
    first, dgls = draws(), choice(100, 10)
    dgl.seed(1)
    assert draws() == first
    assert torch.equal(choice(100, 10), dgls)
    dgl.seed(2)
    other = draws()
    assert all(a != b for a, b in zip(other, first, strict=True))
    assert torch.equal(torch.rand(2), expected)


def test_no_two_calls_have_the_same_key():
    assert len({random.next_key() for _ in range(100)}) == 100


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_choices_are_numbers_of_the_population(count, weighted, replace, bits):
    weights = torch.ones(50) if weighted else NULL
    found = random.choice(count, 50, weights, replace, bits)
    assert found.dtype == (torch.int32 if bits == 32 else torch.int64)
    assert found.shape == (count,)
    assert ((found >= 0) & (found < 50)).all()
    if not replace:
        assert len(found.unique()) == count


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choices_are_as_frequent_as_they_weigh(replace, dtype):
    dgl.seed(0)
    weights = torch.tensor([0.0, 1.0, 5.0, 0.0, 2.0, 2.0], dtype=dtype)
    expected = weights.double() / weights.double().sum()
    count = 20_000 if replace else 1
    firsts = [random.choice(count, 6, weights, replace, 64) for _ in range(20_000 // count)]
    frequency = torch.bincount(torch.cat(firsts), minlength=6) / 20_000
    assert (frequency[expected == 0] == 0).all()
    # Six standard deviations.
    assert ((frequency - expected).abs() < 6 * (expected / 20_000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("population", [8, 13])
def test_all_orders_of_distinct_numbers_are_as_frequent(population):
    """Whether all numbers are shuffled, or some are drawn and those that come again left out."""
    dgl.seed(0)
    drawn = torch.stack([random.choice(3, population, NULL, False, 64) for _ in range(20_000)])
    assert (drawn[:, 0] != drawn[:, 1]).all() and (drawn[:, 1] != drawn[:, 2]).all()
    for first, second in ((0, 1), (1, 2), (0, 2)):
        found = torch.bincount(drawn[:, first] * population + drawn[:, second])
        pairs = found[found > 0]
        assert len(pairs) == population * (population - 1)
        expected = 20_000 / len(pairs)
        assert ((pairs - expected).abs() < 6 * expected**0.5).all()


def test_few_of_a_large_population_take_memory_for_those_alone():
    """`dgl.rand_graph` draws edges among all pairs of nodes."""
    found = random.choice(100_000, 10**14, NULL, False, 64)
    assert len(found.unique()) == 100_000
    assert found.min() >= 0 and found.max() < 10**14
    with tensor_backed_graphs():
        g = dgl.rand_graph(1_000_000, 5_000)
    assert g.num_edges() == len(torch.stack(g.edges()).unique(dim=1).T) == 5_000


def test_all_that_weigh_something_can_be_drawn_without_replacement():
    weights = torch.tensor([1e-30, 0.0, 1e30, 1.0])
    drawn = random.choice(3, 4, weights, False, 64)
    assert drawn.sort().values.tolist() == [0, 2, 3]
    assert drawn[0] == 2


def test_dgls_python_draws_from_tensors():
    with tensor_backed_graphs():
        drawn = choice(torch.tensor([5, 6, 7]), (2, 3), prob=torch.tensor([0.0, 1.0, 0.0]))
    assert drawn.tolist() == [[6] * 3] * 2


@pytest.mark.parametrize(
    ("count", "population", "weights", "replace"),
    [
        (4, 3, NULL, False),
        (1, 0, NULL, True),
        (4, 3, torch.ones(3), False),
        (3, 3, torch.tensor([1.0, 0.0, 1.0]), False),
        (1, 3, torch.ones(2), True),
    ],
)
def test_what_cannot_be_drawn_is_refused(count, population, weights, replace):
    with pytest.raises(InvalidInputError, match="draw"):
        random.choice(count, population, weights, replace, 64)


def test_the_seed_may_be_any_integer():
    for seed in (0, -7, 2**31 - 1):
        dgl.seed(seed)
        assert random.next_key() == (seed % 2**64, 0)


# -- mini-batches ------------------------------------------------------------------------------


def draws_of(batches: random.BatchDraws, number: int) -> list:
    with batches.of_batch(number):
        return [*draws(), torch.rand(3).tolist(), torch.rand(1).item()]


def test_draws_of_a_batch_depend_on_its_number_alone():
    dgl.seed(1)
    batches = random.BatchDraws(CPU, 7)
    in_order = [draws_of(batches, number) for number in range(4)]
    dgl.seed(1)
    batches = random.BatchDraws(CPU, 7)
    torch.rand(9), random.next_key(), torch.rand(2, generator=random.generator(CPU))
    assert [draws_of(batches, number) for number in (2, 2, 0, 3, 1)] == [
        in_order[number] for number in (2, 2, 0, 3, 1)
    ]
    for one, other in itertools.combinations(in_order, 2):
        assert all(a != b for a, b in zip(one, other, strict=True))


def test_passes_and_seeds_have_draws_of_their_own():
    found = []
    for seed in (1, 2, 1):
        dgl.seed(seed)
        found += [draws_of(random.BatchDraws(CPU, seed + 10 * number), 0) for number in range(2)]
    assert found[:2] == found[4:]
    assert all(a != b for one, other in itertools.combinations(found[:4], 2)
               for a, b in zip(one, other, strict=True))  # fmt: skip


@pytest.mark.parametrize("seed", [0, -5, 2**63 + 1])
def test_without_dgls_seed_draws_follow_torchs(seed, monkeypatch):
    found = []
    monkeypatch.setattr(random, "_common", random._Sequences())
    for offset in (0, 0, 1):
        torch.manual_seed(seed + offset)
        torchs = int(torch.empty((), dtype=torch.int64).random_())  # as its DataLoader draws it
        found.append(draws_of(random.BatchDraws(CPU, torchs), 0))
    assert found[0] == found[1] != found[2]


def test_what_torch_draws_does_not_follow_dgls_seed():
    found = []
    for seed in (1, 2):
        dgl.seed(seed)
        with random.BatchDraws(CPU, 7).of_batch(0):
            found.append((torch.rand(3).tolist(), draws()))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_a_batch_disturbs_no_other_draws():
    def others(make_batch) -> list:
        dgl.seed(4)
        torch.manual_seed(4)
        batches = random.BatchDraws(CPU, 7)
        found = [torch.randn(3).tolist(), torch.rand(2, generator=random.generator(CPU)).tolist()]
        make_batch(batches)
        return [*found, *draws(), torch.randn(3).tolist(), torch.initial_seed()]

    def fails(batches):
        with pytest.raises(ValueError), batches.of_batch(0):
            draws()
            raise ValueError

    def nested(batches):
        with batches.of_batch(3):
            first = torch.rand(2), random.next_key()
            draws_of(batches, 4)
            again = torch.rand(2), random.next_key()
        with batches.of_batch(3):
            assert first[1] == random.next_key() and torch.equal(first[0], torch.rand(2))
            assert again[1] == random.next_key() and torch.equal(again[0], torch.rand(2))

    expected = others(lambda batches: None)
    for make_batch in (lambda batches: draws_of(batches, 0), fails, nested):
        assert others(make_batch) == expected


def test_a_sampler_that_seeds_is_obeyed():
    batches = random.BatchDraws(CPU, 7)
    with batches.of_batch(0):
        dgl.seed(9)
        inside = draws()
    dgl.seed(9)
    assert draws() == inside


def test_another_threads_calls_are_not_the_batchs():
    dgl.seed(6)
    expected = [random.next_key() for _ in range(3)]
    dgl.seed(6)
    found = [random.next_key()]
    batches = random.BatchDraws(CPU, 7)
    with batches.of_batch(0), ThreadPoolExecutor(1) as pool:
        assert random.next_key() != expected[2]
        found.append(pool.submit(random.next_key).result())
    assert [found[0], found[1]] == [expected[0], expected[2]]
