"""The backends of ``torch.distributed``: Gloo, NCCL, or any that is registered."""
