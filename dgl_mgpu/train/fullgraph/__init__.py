"""Training on whole graphs, shared by ranks."""
