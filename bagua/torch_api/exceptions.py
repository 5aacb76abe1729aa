"""``bagua.torch_api.exceptions``: the errors that Bagua documented; the whole tree is in ``bagua.errors``."""

from bagua.errors import RepeatedInitializationError, UnsupportedAlgorithmException

__all__ = ["RepeatedInitializationError", "UnsupportedAlgorithmException"]
