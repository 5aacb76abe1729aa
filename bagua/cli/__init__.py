"""The commands ``bagua`` and ``baguarun``."""

__all__: list[str] = []
