"""What the names of ``torch.distributed`` need beyond our collectives: lists of tensors, tags."""
