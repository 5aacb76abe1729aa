"""The engine: hooks into autograd and optimizers, buckets, and the schedule of their exchanges."""
