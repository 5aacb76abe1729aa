"""The commands ``bagua`` and ``baguarun``, and what starts processes out of a notebook."""

from typing import TYPE_CHECKING

from bagua.cli.main import main as run_command
from bagua.late import late

if TYPE_CHECKING:
    from bagua.cli.notebook import notebook_launch

__all__ = ["notebook_launch", "run_command"]

__getattr__, __dir__ = late(__name__, {"notebook_launch": f"{__name__}.notebook"})
