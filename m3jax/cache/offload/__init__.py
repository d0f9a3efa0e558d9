"""Keys and values of sparse layers in host memory, with a pool of recently used pages on the device (docs/cache.md)."""
