"""The command ``bagua chaos``: run a training command under a schedule of faults, and say what became of it."""

__all__: list[str] = []
