"""What is computed on graphs made of tensors: message passing, reductions, products, neighbours."""
