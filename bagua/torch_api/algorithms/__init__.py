"""``bagua.torch_api.algorithms``: algorithms under their documented names."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from bagua.algorithms import (
    Algorithm,
    AlgorithmImpl,
)
from bagua.algorithms import (
    registry as GlobalAlgorithmRegistry,  # noqa: N812 (documented name)
)
from bagua.torch_api.algorithms import base, gradient_allreduce
from bagua.torch_api.algorithms._newer import MODULES

if TYPE_CHECKING:
    from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, q_adam

diloco = MODULES["diloco"]
dion = MODULES["dion"]
local_sgd = MODULES["local_sgd"]
loco = MODULES["loco"]
one_bit_adam = MODULES["one_bit_adam"]
one_bit_lamb = MODULES["one_bit_lamb"]
power_sgd = MODULES["power_sgd"]
scatter_gather = MODULES["scatter_gather"]
sign_sgd = MODULES["sign_sgd"]
slowmo = MODULES["slowmo"]
sparse_loco = MODULES["sparse_loco"]
top_k = MODULES["top_k"]

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "decentralized",
    "diloco",
    "dion",
    "gradient_allreduce",
    "local_sgd",
    "loco",
    "one_bit_adam",
    "one_bit_lamb",
    "power_sgd",
    "q_adam",
    "scatter_gather",
    "sign_sgd",
    "slowmo",
    "sparse_loco",
    "top_k",
]


def __getattr__(name: str) -> ModuleType:
    if name in ("async_model_average", "bytegrad", "decentralized", "q_adam"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
