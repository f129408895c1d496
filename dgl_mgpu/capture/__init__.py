"""Models as CUDA graphs: padded mini-batches, and the models of unmodified scripts."""
