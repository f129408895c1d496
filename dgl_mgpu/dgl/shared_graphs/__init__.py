"""Graphs of unmodified scripts in the store: ``DataLoader(g, …, use_uva=True)``.

With ``use_uva=True`` DGL has every process pin the graph and its features in the host's memory,
where its GPU reads them.  Here they are put into a store instead, once for all ranks of a machine
(`dgl_mgpu.GlobalStore`), and the DataLoader is given a `SharedGraph`, which samples and reads
there.  The script does not change:

>>> loader = dgl.dataloading.DataLoader(
...     g, train_ids, sampler, device=device, batch_size=1024, use_ddp=True, use_uva=True
... )

That is done where ``g`` is a DGLGraph on the CPU, the sampler one of DGL's that samples neighbours,
and

- there are several ranks and ``use_ddp=True``: they build the store together when the first such
  DataLoader of a graph is made;
- there is one process, and ``python -m dgl_mgpu`` was given options
  (`dgl_mgpu.dgl.runner_options`); or
- the graph has a store already.

Else, and with ``--store=off``, the graph is pinned as DGL does.  The first rank of each machine
reads the data; the others' are assumed to be the same.  A store belongs to its graph, whose
DataLoaders share it, and is freed with it.

A column of the graph that is replaced, or written to by torch in this process, is read from the
graph from then on.  Writes that torch does not count, by NumPy or by other processes, go unnoticed.
"""

from dgl_mgpu.dgl.shared_graphs.graph import SharedGraph
from dgl_mgpu.dgl.shared_graphs.sharing import can_be_served, is_shared, share, unpinned

__all__ = ["SharedGraph", "can_be_served", "is_shared", "share", "unpinned"]
