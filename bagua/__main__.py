"""``python -m bagua`` is the command ``bagua``."""

import sys

from bagua.cli.main import main

sys.exit(main())
