from dgl_mgpu.training.launch import launch  # noqa: F401  (until all who import it here have moved)
