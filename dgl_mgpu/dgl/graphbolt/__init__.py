"""What `dgl.graphbolt` needs beside its Python files: its C++ library and torchdata's datapipes."""
