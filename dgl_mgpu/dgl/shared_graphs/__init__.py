"""Graphs of unmodified scripts in the store: ``DataLoader(g, …, use_uva=True)``.

With ``use_uva=True`` DGL has every process pin the graph and its features in the host's memory,
where its GPU reads them.  Here they are put into a store instead, once for all ranks of a machine
(`dgl_mgpu.GlobalStore`), and the DataLoader is given a `SharedGraph`, which samples and reads
there.  The script notices nothing of it:

>>> loader = dgl.dataloading.DataLoader(
...     g, train_ids, sampler, device=device, batch_size=1024, use_ddp=True, use_uva=True
... )

That is done where ``g`` is a DGLGraph on the CPU, the sampler one of DGL's that samples neighbours,
and

- there are several ranks and ``use_ddp=True``: then all of them come here, and build the store
  together when the first such DataLoader of a graph is made;
- there is one process, and ``python -m dgl_mgpu`` was given options
  (`dgl_mgpu.dgl.runner_options`); or
- the graph has a store already.

Else, and with ``--store=off``, the graph is pinned as DGL does.  The data are read on the first
rank of each machine; the others' are taken to be the same.  A store belongs to its graph, all
DataLoaders of which share it, and goes with it.

A column of the graph that is replaced, or written to by torch in this process, is read from the
graph from then on.  What torch does not see is not seen: writes by NumPy, or by other processes.
"""

from dgl_mgpu.dgl.shared_graphs.graph import SharedGraph
from dgl_mgpu.dgl.shared_graphs.sharing import can_be_served, is_shared, share, unpinned

__all__ = ["SharedGraph", "can_be_served", "is_shared", "share", "unpinned"]
