"""The backend name ``bagua`` of ``torch.distributed``."""
