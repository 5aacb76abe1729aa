"""What the names of ``torch.distributed`` need beyond our collectives: stores, lists of tensors, tags."""
