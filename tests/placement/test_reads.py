"""Expected reads against mini-batches that are drawn."""

import numpy as np
import pytest

from dgl_mgpu.placement import Degrees, minibatch_reads

NODES = {"paper": 20_000, "author": 8_000}
#: Source and destination types.
EDGES = [("paper", "paper"), ("author", "paper"), ("paper", "author")]
BATCHES = 150


class Graph:
    """Random edges of several types, with hubs, and mini-batches of them in plain NumPy."""

    def __init__(self, etypes, seed=0):
        self._random = np.random.default_rng(seed)
        self.num_nodes = {t: n for t, n in NODES.items() if any(t in etype for etype in etypes)}
        self.hotness = {t: np.zeros(n, np.int64) for t, n in self.num_nodes.items()}
        self.tables = []
        for src, dst in etypes:
            degrees = self._random.zipf(1.7, self.num_nodes[dst]).clip(max=200) - 1
            weights = 1 / np.arange(1, self.num_nodes[src] + 1) ** 0.7
            neighbours = self._random.choice(
                self.num_nodes[src], degrees.sum(), p=weights / weights.sum()
            )
            self.hotness[src] += np.bincount(neighbours, minlength=self.num_nodes[src])
            self.tables.append((src, dst, degrees, np.split(neighbours, degrees.cumsum()[:-1])))

    @property
    def degrees(self):
        return [Degrees(dst, degrees) for _, dst, degrees, _ in self.tables]

    def drawn(self, batch_size, fanouts):
        """Mean reads of mini-batches: rows sampled, nodes read, and edges."""
        sampled = {t: np.zeros(n) for t, n in self.num_nodes.items()}
        read = {t: np.zeros(n) for t, n in self.num_nodes.items()}
        edges = 0
        types = np.repeat(list(self.num_nodes), list(self.num_nodes.values()))
        ids = np.concatenate([np.arange(n) for n in self.num_nodes.values()])
        for _ in range(BATCHES):
            some = self._random.choice(len(ids), batch_size, replace=False)
            reached = {t: set(ids[some][types[some] == t]) for t in self.num_nodes}
            for fanout in reversed(fanouts):
                found = {t: set(nodes) for t, nodes in reached.items()}
                for t, nodes in reached.items():
                    sampled[t][list(nodes)] += 1
                for src, dst, _, rows in self.tables:
                    for node in reached[dst]:
                        row = rows[node]
                        if 0 <= fanout < len(row):
                            row = self._random.choice(row, fanout, replace=False)
                        found[src].update(row)
                        edges += len(row)
                reached = found
            for t, nodes in reached.items():
                read[t][list(nodes)] += 1
        per_batch = [{t: rows / BATCHES for t, rows in each.items()} for each in (sampled, read)]
        return (*per_batch, edges / BATCHES)


def by_hotness(reads, hotness):
    """Sums over tenths of the rows, hottest first."""
    order = np.argsort(-hotness, kind="stable")
    return [float(part.sum()) for part in np.array_split(reads[order], 10)]


@pytest.mark.parametrize("etypes", [EDGES[:1], EDGES], ids=["one type", "several types"])
@pytest.mark.parametrize("fanouts", [[4], [5, 10], [3, 3, 3], [2, -1]], ids=str)
def test_reads_are_those_of_mini_batches_that_are_drawn(etypes, fanouts):
    graph = Graph(etypes)
    reads = minibatch_reads(graph.hotness, graph.degrees, 100, fanouts)
    sampled, nodes, edges = graph.drawn(100, fanouts)
    assert reads.edges == pytest.approx(edges, rel=0.05)
    for ntype, hot in graph.hotness.items():
        for found, drawn in ((reads.sampled, sampled), (reads.nodes, nodes)):
            expected = by_hotness(drawn[ntype], hot)
            all_of_them = sum(expected)
            assert by_hotness(found[ntype], hot) == pytest.approx(
                expected, rel=0.1, abs=0.02 * all_of_them
            )


def test_counts_of_reads_are_in_proportion_to_reads():
    graph = Graph(EDGES)
    counts = {ntype: np.arange(n, dtype=np.float64) for ntype, n in graph.num_nodes.items()}
    expected = minibatch_reads(counts, graph.degrees, 100, [5, 10])
    reads = minibatch_reads(counts, graph.degrees, 100, [5, 10], distinct=True)
    for found, other in ((reads.nodes, expected.nodes), (reads.sampled, expected.sampled)):
        shares = [found[ntype][1:] / counts[ntype][1:] for ntype in counts]
        np.testing.assert_allclose(np.concatenate(shares), shares[0][0])
        total = sum(float(rows.sum()) for rows in other.values())
        assert sum(float(rows.sum()) for rows in found.values()) == pytest.approx(total)


def test_no_node_is_read_more_often_than_once():
    hotness = {"node": np.array([10**6, 1, 1, 0])}
    reads = minibatch_reads(hotness, [Degrees("node", np.array([3, 0, 0, 10**6]))], 4, [-1, -1])
    assert reads.nodes["node"].tolist() == [1, 1, 1, 1]
    assert reads.sampled["node"].tolist() == [2, 2, 2, 2]


def test_without_hotness_all_nodes_are_drawn_alike():
    degrees = [Degrees("node", np.full(1000, 5)), Degrees("unordered", np.full(10, 5))]
    reads = minibatch_reads({"node": np.zeros(1000, np.int64)}, degrees, 10, [3])
    assert reads.edges == pytest.approx(30)
    np.testing.assert_allclose(reads.nodes["node"], 1 - 0.99 * np.exp(-0.03), rtol=1e-5)
    nothing = minibatch_reads({}, [], 10, [3])
    assert (nothing.nodes, nothing.edges, nothing.fanout) == ({}, 0, 0)


def test_the_fanout_is_the_mean_over_rows_that_are_sampled():
    # 10 rows in the layer of the seeds, and all that those reach in the other.
    hotness = {"node": np.ones(1000, np.int64)}
    reads = minibatch_reads(hotness, [Degrees("node", np.full(1000, 50))], 10, [10, 25])
    later = 1000 - 990 * np.exp(-0.25)
    assert reads.fanout == pytest.approx((10 * 25 + later * 10) / (10 + later), rel=1e-4)
