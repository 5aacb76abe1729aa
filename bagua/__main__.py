"""``python -m bagua`` is the command ``bagua``."""

import sys

from bagua.cli import run_command

sys.exit(run_command())
