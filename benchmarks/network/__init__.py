"""A network of several hosts on one Linux machine, and training on it; ``python -m benchmarks.network``."""
