"""Train PyTorch models on many processes while communicating less.

Importing this package is cheap and does not import torch. The usual entry point is ``import bagua.torch_api as bagua``.
"""

import importlib.util
import sys
from typing import NoReturn

__all__ = ["__version__"]

__version__ = "0.1.0"

if sys.platform == "win32" or not importlib.util.find_spec("fcntl"):
    raise ImportError(f"bagua runs on Linux and macOS, not on {sys.platform}; on Windows, use it inside WSL")


def __getattr__(name: str) -> NoReturn:
    advice = "" if name.startswith("_") else "; write: import bagua.torch_api as bagua"
    raise AttributeError(f"module 'bagua' has no attribute {name!r}{advice}")
