"""Samples of graphs made of tensors: neighbours, walks, mini-batches, and DGL's DataLoader."""
