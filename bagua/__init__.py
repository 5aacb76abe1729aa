"""Train PyTorch models on many processes while communicating less.

Importing this package is cheap and does not import torch. It has the names of ``bagua.torch_api``, which is imported
when one of them is asked for: ``bagua.init_process_group()``, ``bagua.with_bagua(model, optimizer)``. Packages come
first: ``bagua.advise`` is the package, and ``bagua.advise.advise`` its function.
"""

import importlib
import importlib.util
import sys
from typing import Any

__all__ = ["__version__"]

__version__ = "0.1.0"

if sys.platform == "win32" or not importlib.util.find_spec("fcntl"):
    raise ImportError(f"bagua runs on Linux and macOS, not on {sys.platform}; on Windows, use it inside WSL")


def __getattr__(name: str) -> Any:
    # ``import bagua.comm`` after ``import bagua.torch_api as bagua`` binds the name to this package.
    problem = f"module 'bagua' has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(problem)
    if importlib.util.find_spec(f"bagua.{name}"):
        return importlib.import_module(f"bagua.{name}")
    entry = importlib.import_module("bagua.torch_api")
    try:
        return getattr(entry, name)
    except AttributeError as error:
        raise AttributeError(problem + str(error).partition(repr(name))[2]) from None
