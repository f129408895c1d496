"""Features of nodes that stay in the host's memory while models train on GPUs.

The rows, of which a GPU has some columns at a time, are in `host`; which features are kept so, in
`placement`; what models get that know nothing of it, in `lending`.
"""

from dgl_mgpu.distributed.host_features.host_rows import HostRows

__all__ = ["HostRows"]
