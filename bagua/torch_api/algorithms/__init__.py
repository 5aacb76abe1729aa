"""``bagua.torch_api.algorithms``: algorithms under their documented names."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

from bagua import algorithms
from bagua.late import late
from bagua.torch_api.algorithms import base, gradient_allreduce
from bagua.torch_api.algorithms.base import *


def _module(name: str, summary: str, *names: str) -> ModuleType:
    """A module that passes on names of ``bagua.algorithms``, and that ``import`` finds."""
    path = f"{__package__}.{name}"
    module = module_from_spec(ModuleSpec(path, loader=None))
    module.__doc__ = f"``{path}``: {summary}."
    find, every = late(path, dict.fromkeys(names, algorithms.__name__))
    vars(module).update(__getattr__=find, __dir__=every, __all__=[*names])
    return sys.modules.setdefault(path, module)


MODULES = {
    name: _module(name, summary, f"{algorithm}Algorithm", f"{algorithm}AlgorithmImpl", *others)
    for name, algorithm, summary, *others in (
        ("diloco", "DiLoCo", "training alone for many steps", "Outer"),
        ("dion", "Dion", "orthonormal directions of low rank"),
        ("local_sgd", "LocalSGD", "training alone for many steps"),
        ("loco", "LoCo", "gradients in four bits"),
        ("one_bit_adam", "OneBitAdam", "Adam that sends one bit for each element"),
        ("one_bit_lamb", "OneBitLamb", "LAMB that sends one bit for each element"),
        ("power_sgd", "PowerSGD", "gradients of low rank"),
        ("scatter_gather", "ScatterGatherAllReduce", "each rank adds up one slice"),
        ("sign_sgd", "SignSGD", "one bit for each element of a gradient"),
        ("slowmo", "SlowMo", "training alone for many steps", "SlowStep"),
        ("sparse_loco", "SparseLoCo", "training alone for many steps, and few elements sent then"),
        ("top_k", "TopK", "the largest elements of a gradient"),
    )
}


if TYPE_CHECKING:
    from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, q_adam


__all__ = ["async_model_average", "base", "bytegrad", "decentralized", "gradient_allreduce", "q_adam"]
__all__ += base.__all__
__all__ += list(MODULES)
globals().update(MODULES)


def __getattr__(name: str) -> ModuleType:
    if name in ("async_model_average", "bytegrad", "decentralized", "q_adam"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
