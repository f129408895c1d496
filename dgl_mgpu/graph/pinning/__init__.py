"""Where data lie that GPUs read: in the host's memory, pinned, and in a cache on the GPU."""
