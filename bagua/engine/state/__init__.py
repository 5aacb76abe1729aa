"""What is remembered and must agree: replicas, shared state, checkpoints, the looks that compare them."""
