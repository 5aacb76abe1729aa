"""How long training takes to a loss that is wanted, on each link; ``python -m benchmarks.time_to_loss``."""
