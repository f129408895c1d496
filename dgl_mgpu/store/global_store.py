"""The global store: built from a DGLGraph or a data set, and read by DGL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import dgl
import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator, error_text
from dgl_mgpu.comm.cuda_runtime import Runtime, choose_runtime
from dgl_mgpu.comm.network import measured_network
from dgl_mgpu.config.store_options import StoreOptions
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.errors import ConfigError, InvalidInputError, UnsupportedByStoreError, nearest
from dgl_mgpu.machine import Network
from dgl_mgpu.machine.links import as_measured
from dgl_mgpu.machine.shared_memory import SharedMemory
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.placement import Plan, expected_reads, load_accesses
from dgl_mgpu.store.accesses import Accesses
from dgl_mgpu.store.agreement import StoreInput, job_facts, require_agreement, require_same
from dgl_mgpu.store.calibration import calibrate
from dgl_mgpu.store.content import (
    Content,
    Embeddings,
    StoreSchema,
    read_dataset,
    with_ends,
    with_learned_rows,
    with_narrow_features,
)
from dgl_mgpu.store.embedding.layer import StoreEmbedding
from dgl_mgpu.store.embedding.tables import STATES, unfold_embeddings
from dgl_mgpu.store.graph import GRAPH_NAMES, StoreGraph
from dgl_mgpu.store.graph_structure import Nodes, node_table, state_table
from dgl_mgpu.store.graphbolt import node_features, read_from_store
from dgl_mgpu.store.hotness import degree_hotness, presample_hotness
from dgl_mgpu.store.memory import Blueprint, Store, build
from dgl_mgpu.store.memory.format import Source
from dgl_mgpu.store.memory.links import measure_links
from dgl_mgpu.store.memory.machine import machine, prove_access, with_access
from dgl_mgpu.store.memory.mapped_machines import are_joined, map_other_machines
from dgl_mgpu.store.part_exchange import PartExchange
from dgl_mgpu.store.part_files import read_part
from dgl_mgpu.store.partitioned import content_of
from dgl_mgpu.store.planning import in_edges_order, make_blueprint, reads_of
from dgl_mgpu.store.remote import OtherMachines
from dgl_mgpu.store.span import Bounds, Kept, plan_span
from dgl_mgpu.utils.unused_memory import give_memory_back

#: What stores are built with beside `StoreOptions`.
_OWN_OPTIONS = ("topology", "seed", "seeds", "edges", "embeddings")


class GlobalStore:
    """Topology and features of one graph over GPU, peer, host and disk memory.

    Everything is there once on the machine and read by all its ranks directly (XGNN's global
    GNN memory store, section 4; WholeGraph, section III-B).  With ``span='job'`` it is there once
    on all machines of a job together: then all ranks sample and read in the same order, also those
    that have nothing to ask for.

    Examples
    --------
    >>> store = dgl_mgpu.GlobalStore.from_dgl(g)
    >>> loader = dgl.dataloading.DataLoader(store.graph, train_ids, sampler, batch_size=1024)

    Attributes
    ----------
    graph : StoreGraph
        Takes a DGLGraph's place in DGL's DataLoader.
    plan : Plan
        Where every row is.
    device : torch.device
        Where its operators run and put what they return: a GPU, or the CPU when all of it is
        in shared memory.
    """

    def __init__(
        self,
        store: Store,
        schema: StoreSchema,
        seed: int,
        others: OtherMachines | None = None,
    ) -> None:
        self._store = store
        self.plan: Plan = store.plan
        self.device: torch.device = store.device
        self.graph = StoreGraph(store, schema.num_nodes, schema.canonical_etypes, seed, others)
        self._optimizers = schema.optimizers
        self._embeddings: dict[tuple[str, str], StoreEmbedding] = {}

    @classmethod
    def from_dgl(
        cls,
        g: dgl.DGLGraph | None,
        *,
        seeds: Nodes | None = None,
        seed: int = 0,
        edges: bool = False,
        embeddings: Embeddings | None = None,
        **options: Any,
    ) -> GlobalStore:
        """Store a DGLGraph with all its node and edge features.

        Collective where torch.distributed is initialised: every rank calls it.  The data is
        read on the machine's first rank; the others pass the same, or None.

        Parameters
        ----------
        g : DGLGraph
            On the CPU, homogeneous or heterogeneous, with int32 or int64 ids.
        seeds : Tensor or dict of Tensor, int32 or int64, shape (n,), optional
            Nodes that mini-batches will start from, by node type in a heterogeneous graph, for
            ``hotness='presample'``; all nodes by default.
        seed : int
            Which samples are drawn.
        edges : bool
            Whether edges can be found by their ids, as samplers of edges do for link prediction,
            also where these are not in the order in which a CSC has the edges: then a table of
            their ends is stored, two ids for each edge.
        embeddings : dict, optional
            Rows of numbers to be trained, by name: how many numbers each node has, or an
            :class:`~dgl_mgpu.EmbeddingSpec`, ``{"emb": 64}``; of several node types by type,
            ``{"paper": {"emb": 64}}``.  :meth:`embedding` looks them up.  As the data: the same
            on all ranks, or None.
        **options
            As in :class:`~dgl_mgpu.store.planning.StoreOptions`, and ``topology``: a
            :class:`~dgl_mgpu.machine.Topology`, a preset's name, or 'auto' for this machine.

        Returns
        -------
        GlobalStore

        Raises
        ------
        InvalidInputError
            If the graph is none, or of a kind that a store does not take, or another one than on
            the machine's first rank; or a feature cannot be kept in the type that
            ``feature_dtypes`` names.
        ConfigError
            If an option is unknown or out of its range, or another one than on the machine's first
            rank, or there are more ranks than GPUs.
        PlanDoesNotFitError
            If the memories that the options allow do not hold all rows.
        SharedMemoryError
            If shared memory or a file on the disk cannot be made or mapped.
        PeerAccessError
            If a rank cannot map the memory of another's GPU.
        DeviceMemoryError
            If a GPU has less free memory than the plan takes.
        RankFailedError
            If another rank failed.
        """
        data = None if g is None else StoreInput.from_graph(g, seeds)
        return cls._build(data, seed, edges, embeddings, options)

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset | HeteroDataset | None,
        *,
        seed: int = 0,
        edges: bool = False,
        embeddings: Embeddings | None = None,
        **options: Any,
    ) -> GlobalStore:
        """Store a data set: its graph, features and, as node feature 'label', its labels.

        Collective; what is not listed here, and errors, are as for :meth:`from_dgl`.

        Parameters
        ----------
        dataset : Dataset or HeteroDataset
            Its arrays may be memory maps: they are read in stretches.  Ranks other than the
            machine's first pass the same, whose edges are read to be compared, or None.  Its
            training nodes are the seeds of ``hotness='presample'``.
        seed, edges, embeddings, **options
            As for :meth:`from_dgl`.

        Returns
        -------
        GlobalStore
        """
        data = None if dataset is None else StoreInput.from_dataset(dataset)
        return cls._build(data, seed, edges, embeddings, options)

    @classmethod
    def from_partition(cls, path: str | Path, *, seed: int = 0, **options: Any) -> GlobalStore:
        """Store a graph that ``dgl.distributed.partition_graph`` has partitioned, over machines.

        Each machine reads its own part alone, the one of its number; a store has ``span='job'``.
        Node and edge ids are those that the partition gave them, ``orig_id`` of the graph on disk
        has those before.  Features of edges are whole on each machine.

        Collective: every rank calls it.  What is not listed here, and errors, are as for
        :meth:`from_dgl`.

        Parameters
        ----------
        path : str or Path
            The JSON file of the partition, on every machine; of the parts, the machine's own has
            to be there.  The graph may have several types of nodes and edges.
        seed, **options
            As for :meth:`from_dgl`.

        Returns
        -------
        GlobalStore

        Raises
        ------
        InvalidInputError
            If the files cannot be read, or there are more or fewer parts than machines.
        UnsupportedByStoreError
            If ``hotness='presample'``.
        """
        if options.setdefault("span", "job") == "auto":
            options["span"] = "job"  # no machine has a copy of all
        if options["span"] != "job":
            raise InvalidInputError(
                "store a graph in parts",
                f"span='{options['span']}' has a copy of the graph on each machine",
                "use span='job', or store the whole graph by from_dgl or from_dataset",
            )
        ranks, machines = Communicator.of_this_machine(), Communicator.across_machines()

        def read() -> StoreInput | None:
            if ranks.rank:
                return None
            part = read_part(Path(path), machines.rank, machines.size)
            return StoreInput(partial(content_of, part, machines), dict, dict)

        everyone = Communicator.of_all_machines()
        return cls._build(
            everyone.run_all("read a partition of DGL's", read), seed, False, None, options
        )

    @classmethod
    def from_graphbolt(
        cls,
        graph: Any,
        features: Any = None,
        *,
        seeds: Nodes | None = None,
        seed: int = 0,
        **options: Any,
    ) -> GlobalStore:
        """Store a graph of GraphBolt's and the features of its nodes.

        GraphBolt's samplers of the graph, and whoever reads the features, read the store from then
        on where their mini-batches are on its device.  Samples stay the same.  Tensors that are
        written to later are read where they are; a graph of several edge types is sampled where it
        is.

        Collective; what is not listed here, and errors, are as for :meth:`from_dgl`.

        Parameters
        ----------
        graph : dgl.graphbolt.FusedCSCSamplingGraph or dgl.graphbolt.OnDiskDataset
            On the CPU; of a data set that is loaded its graph and features.  On every rank.
        features : dgl.graphbolt.BasicFeatureStore, optional
            Of which ``TorchBasedFeature`` of nodes are stored, in memory or mapped from a file,
            also if a ``GPUCachedFeature`` is before them.  Those of edges are not.
        seeds, seed, **options
            As for :meth:`from_dgl`.

        Returns
        -------
        GlobalStore

        Examples
        --------
        >>> dataset = gb.OnDiskDataset("data").load()
        >>> store = dgl_mgpu.GlobalStore.from_graphbolt(dataset)
        >>> datapipe = gb.ItemSampler(dataset.tasks[0].train_set, batch_size=1024)
        >>> datapipe = datapipe.copy_to(store.device, extra_attrs=["seed_nodes"])
        >>> datapipe = datapipe.sample_neighbor(dataset.graph, [10, 10])
        >>> datapipe = datapipe.fetch_feature(dataset.feature, node_feature_keys=["feat"])
        """
        if features is None and hasattr(graph, "feature"):
            graph, features = graph.graph, graph.feature
        if options.get("span") == "auto":
            options["span"] = "machine"
        if options.get("span", "machine") != "machine":
            raise UnsupportedByStoreError(
                "store a graph of GraphBolt over several machines",
                "GraphBolt's samplers read the edges directly, of which each machine has a part",
                "use from_dgl or from_dataset, or span='machine'",
            )
        tensors = node_features(features)
        ranks = Communicator.of_this_machine()
        data = StoreInput.from_graphbolt(graph, tensors, seeds)
        action = "store a graph of GraphBolt"
        facts = ranks.all_gather(ranks.run_all(action, data.facts))
        require_same(action, facts, "load the same graph and features on all ranks")
        # The others' edges are taken to be the same.
        store = cls._build(data if ranks.rank == 0 else None, seed, False, None, options)
        read_from_store(store.graph, graph, tensors)
        return store

    @classmethod
    def _build(
        cls,
        data: StoreInput | None,
        seed: int,
        edges: bool,
        embeddings: Embeddings | None,
        options: Mapping[str, Any],
    ) -> GlobalStore:
        options = dict(options)
        topology = options.pop("topology", "auto")
        ranks = Communicator.of_this_machine()
        checked = ranks.run_all("read the store's options", lambda: _checked(options, seed))
        require_agreement(ranks, data, embeddings, checked, topology, seed, edges)
        machines = Communicator() if checked.span == "machine" else Communicator.across_machines()
        runtime = choose_runtime(checked.device, ranks)
        access = device_infos = None
        if runtime is not None:
            access = prove_access(runtime, ranks)
            device_infos = ranks.all_gather(
                ranks.run_all("look at the ranks' GPUs", runtime.device_info)
            )
            if topology == "auto":
                measure_links(runtime, ranks, access, device_infos)
        blueprint: Blueprint | None = None
        network: Network | None = None
        if machines.size > 1:
            device = torch.device("cpu") if runtime is None else runtime.device
            network = measured_network(machines, ranks, device)
        exchange: PartExchange | None = None

        def plan() -> tuple[StoreSchema, Bounds]:
            with machines.told_of_errors():
                return planned()

        def planned() -> tuple[StoreSchema, Bounds]:
            nonlocal blueprint, exchange
            assert data is not None  # as require_agreement has checked
            whole = data.read()

            @cache
            def content_if(spans: bool) -> Content:
                content = with_ends(whole, edges, spans)
                content = with_narrow_features(content, checked.narrow_features())
                return with_learned_rows(content, embeddings)

            content = content_if(machines.size > 1)
            planned_for = machine(topology, ranks.size, runtime, device_infos)
            if access is not None:
                planned_for = with_access(planned_for, access)
            if topology == "auto" and device_infos is not None:
                planned_for = as_measured(planned_for, [info.gpu for info in device_infos])
            hotness = _hotness(content, checked, seed, runtime)
            shared = SharedMemory.of_this_machine() if runtime is None else None

            def place(kept: Kept | None = None) -> Blueprint:
                return make_blueprint(
                    content_if(kept is not None).sources,
                    hotness,
                    planned_for,
                    checked,
                    on_gpus=runtime is not None,
                    shared=shared,
                    kept=kept,
                    network=network,
                )

            bounds: Bounds = {}
            if machines.size > 1:
                facts = {**job_facts(checked, embeddings, seed, edges), **data.facts()}
                reads = reads_of(content.sources, hotness, checked)
                blueprint, bounds = plan_span(
                    machines, content.sources, reads, checked, facts, place, content.bounds
                )
                exchange = content.exchange
            else:
                blueprint = place()
            blueprint = unfold_embeddings(blueprint, content.embeddings, seed)
            return content.schema, bounds

        schema, bounds = ranks.broadcast_from_rank0("plan the store", plan)
        joined = bool(bounds) and are_joined(runtime, ranks, machines)
        data = None  # of a part, what only planning needs
        give_memory_back()  # what planning took, before the store takes its own
        store: Store | None = None

        def fill() -> Store:
            nonlocal store
            try:
                store = build(blueprint, ranks, runtime, over_machines=bool(bounds), joined=joined)
            except Exception as error:
                if exchange is not None:
                    exchange.fail(error)
                raise
            if bounds:
                ranks.run_all("build the store", exchange.finish if exchange else lambda: None)
            return store

        try:
            store = machines.run_all("build the store", fill)
            calibrate(store, replace(checked, span="job" if bounds else "machine"), ranks)
            in_edges = {in_edges_order(ntype): firsts for ntype, firsts in bounds.items()}
            if joined and map_other_machines(store, machines, {**bounds, **in_edges}):
                bounds = {}  # machines that NVLink joins are as one
        except BaseException:
            if store is not None:
                store.close()
            raise
        others = None
        if bounds:
            views = [table.view for table in store.tables.values()]
            num_edges = [view.num_edges for view in views if isinstance(view, GraphView)]
            most = max(*schema.num_nodes.values(), *num_edges)
            machines = Communicator.across_machines(own=True)
            others = OtherMachines(machines, bounds, most, len(num_edges), store.device)
        return cls(store, schema, seed, others)

    def count_accesses(self) -> Accesses:
        """Count how often each node's features are read, for a later store to be ordered by.

        Examples
        --------
        >>> with store.count_accesses() as accesses:
        ...     for input_nodes, output_nodes, blocks in loader:
        ...         ...
        >>> accesses.save("accesses.npz")
        >>> store = dgl_mgpu.GlobalStore.from_dgl(g, hotness="accesses.npz")

        Returns
        -------
        Accesses
            Counts within ``with``, again each time it is entered.
        """
        tables = {
            table: ntype
            for ntype in self.graph.ntypes
            for name, table in self._store.tables.items()
            if name.startswith(node_table(ntype, ""))
        }
        num_nodes = {ntype: self.graph.num_nodes(ntype) for ntype in self.graph.ntypes}
        return Accesses(self.graph.traffic, tables, num_nodes)

    def embedding(self, name: str, ntype: str | None = None) -> StoreEmbedding:
        """The embedding ``name`` of a node type, always the same module.

        Parameters
        ----------
        name : str
        ntype : str, optional
            The only one by default.

        Returns
        -------
        StoreEmbedding

        Raises
        ------
        InvalidInputError
            If the store was built without.
        """
        ntype = self.graph._structure.only_ntype(ntype)
        optimizer = self._optimizers.get((ntype, name))
        if optimizer is None:
            raise InvalidInputError(
                f"find embedding '{name}' of '{ntype}'",
                f"the store holds {[other for of, other in self._optimizers if of == ntype]}",
                f"name one of these, or build the store with embeddings={{'{name}': 64}}",
            )
        embedding = self._embeddings.get((ntype, name))
        if embedding is None:
            tables = self._store.tables
            embedding = self._embeddings[ntype, name] = StoreEmbedding(
                name if self.graph.is_homogeneous else f"{ntype}.{name}",
                self.graph.get_node_storage(name, ntype),
                optimizer,
                tables[node_table(ntype, name)],
                [tables[state_table(ntype, name, state)] for state in STATES[optimizer]],
            )
        return embedding

    def close(self) -> None:
        """Give all memory back, on every GPU and of the host.

        Every rank calls it.  The graph and its storages can no longer be read; what they
        returned stays.  A store that is not closed goes with the last reference to it, or with
        the process.  ``with GlobalStore.from_dgl(g) as store:`` closes it at the block's end.
        Where it is over several machines, on CPUs, ranks that ask this one for rows afterwards
        raise RankFailedError.
        """
        self._store.close()
        if self.graph._structure.others is not None:
            self.graph._structure.others.close()

    def __repr__(self) -> str:
        features = self._store.tables.keys()
        return f"GlobalStore({self.graph!r}, device={str(self.device)!r}, tables={[*features]})"

    if not TYPE_CHECKING:  # which knows the attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name in GRAPH_NAMES:
                raise UnsupportedByStoreError(
                    f"use '{name}' of a store",
                    "a store is not a graph",
                    "use its graph, store.graph, as in DataLoader(store.graph, …)",
                )
            raise AttributeError(f"'GlobalStore' object has no attribute '{name}'")

    def __enter__(self) -> GlobalStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        others = self.graph._structure.others
        if error is not None and others is not None:
            others.close(error_text(error))  # why this rank closes it
        self.close()

    def gather(
        self,
        key: str,
        ids: torch.Tensor,
        ntype: str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Rows of a node feature, from wherever they are.

        Parameters
        ----------
        key : str
            The feature's name.
        ids : Tensor, int32 or int64, shape (n,)
            Nodes, on any device, in any order; some may be there several times.
        ntype : str, optional
            The only one by default.
        dtype : torch.dtype, optional
            A floating-point type to which rows are cast on the way, as
            :func:`dgl_mgpu.ops.gather_rows` does; by default to the feature's own.

        Returns
        -------
        Tensor, the feature's dtype or ``dtype``, shape (n, *row_shape)
            On the ids' device.

        Raises
        ------
        InvalidInputError
            If there is no such feature or node type, or ids or dtype are of a wrong kind.
        IdOutOfRangeError
            Of ids on a GPU by a later call, as :func:`dgl_mgpu.ops.gather_rows` says.
        StoreClosedError
            If the store was closed.
        RankFailedError
            Of a store over machines, if another rank failed or has closed it.

        Examples
        --------
        >>> store.gather("feat", torch.tensor([3, 5])).shape
        torch.Size([2, 64])
        """
        with self.graph._structure.told(f"gather rows of '{key}'"):
            storage = self.graph._features.get_node_storage(key, ntype)
            ids = torch.as_tensor(ids)
        return storage.fetch(ids, ids.device, dtype=dtype)


def sources_of(
    dataset: Dataset | HeteroDataset,
    options: StoreOptions,
    seed: int,
    embeddings: Embeddings | None = None,
    *,
    hotness: dict[str, np.ndarray] | None = None,
) -> tuple[dict[str, Source], dict[str, np.ndarray]]:
    """A data set and embeddings as tables, and how hot the rows of each order are.

    That is what the data say, where it is not given.
    """
    data = with_narrow_features(read_dataset(dataset), options.narrow_features())
    data = with_learned_rows(data, embeddings)
    return data.sources, _hotness(data, options, seed) if hotness is None else hotness


def _checked(options: Mapping[str, Any], seed: int) -> StoreOptions:
    unknown = sorted(options.keys() - StoreOptions.__dataclass_fields__.keys())
    if unknown:
        raise ConfigError(
            f"build a store with {unknown}",
            "there is no such option",
            nearest(unknown[0], [*StoreOptions.__dataclass_fields__, *_OWN_OPTIONS]),
        )
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise InvalidInputError(
            "build a store", f"the seed is {seed!r}", "use an integer in [0, 2**64)"
        )
    if isinstance(options.get("device"), torch.device):
        options = {**options, "device": str(options["device"])}
    checked = StoreOptions(**options)
    if checked.disk_path is not None and not Path(checked.disk_path).is_dir():
        raise ConfigError(
            f"keep rows on disk in store.disk_path={checked.disk_path}",
            "there is no such folder",
            "create it, or name another one",
        )
    return checked


def _hotness(
    data: Content, options: StoreOptions, seed: int, runtime: Runtime | None = None
) -> dict[str, np.ndarray]:
    graph = (data.schema.num_nodes, data.schema.canonical_etypes, data.sources)
    degrees = degree_hotness(*graph) if data.degrees is None else data.degrees
    if options.hotness == "degree":
        return degrees
    if options.hotness == "presample":
        if data.degrees is not None:
            raise UnsupportedByStoreError(
                "sample a graph in parts to see which nodes are read (store.hotness=presample)",
                "no machine has all of its edges",
                "use hotness='degree', or a file of counts",
            )
        counts = presample_hotness(
            *graph, data.seeds, options.fanouts, options.batch_size, seed, runtime
        )
    else:
        counts = load_accesses(options.hotness, data.schema.num_nodes)
    return {ntype: expected_reads(counts[ntype], degrees[ntype]) for ntype in counts}
