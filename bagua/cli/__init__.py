"""The commands ``bagua`` and ``baguarun``."""

from bagua.cli.main import main as run_command

__all__ = ["run_command"]
