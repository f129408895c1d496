"""Training on the whole graph: a partitioned graph, and how ranks exchange rows."""
