"""The algorithm that ``bagua advise`` found to be the fastest, from the file that it wrote."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from bagua import env
from bagua.errors import ConfigurationError

#: Where it is looked for, in the working directory, unless ``BAGUA_ADVICE`` names another file.
ADVICE_FILE = "bagua_advice.json"
_NO_ADVICE = "gradient_allreduce"

_log = logging.getLogger("bagua")


def advised_choice() -> tuple[str, dict[str, Any]]:
    """Name and options of the algorithm that was advised; ``gradient_allreduce`` and a warning without any advice.

    Raises:
        ConfigurationError: ``BAGUA_ADVICE`` names a file that is not there, or the file is none of ours.
    """
    named = env.advice_file()
    path = Path(named or ADVICE_FILE)
    if not named and not path.exists():
        _log.warning(
            'no advice for Algorithm.init("auto"): BAGUA_ADVICE is not set, and there is no %s here. '
            "Training goes on with %s, as plain DDP does. Run: bagua advise --hosts N --link RATE,DELAY SCRIPT",
            ADVICE_FILE, _NO_ADVICE,
        )  # fmt: skip
        return _NO_ADVICE, {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        name, options = found["algorithm"], found["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(path, error) from error
    if not isinstance(name, str) or not isinstance(options, dict):
        raise _unusable(path, None)
    return name, options


def _unusable(path: Path, error: Exception | None) -> ConfigurationError:
    return ConfigurationError(
        "this is no advice" if error is None else f"the advice cannot be read: {type(error).__name__}: {error}",
        argument="BAGUA_ADVICE",
        expected="a file that bagua advise has written",
        seen=str(path),
    )
