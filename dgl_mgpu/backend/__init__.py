"""How DGL sees this package: import compatibility, graphs and feature storages."""
