"""Which tensors share a bucket."""
