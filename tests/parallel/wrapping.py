"""The documented ways into the engine, so that a test can be run through each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn, optim

import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import DistributedDataParallel

#: Makes several buckets out of the small models of the tests.
SMALL_BUCKET_BYTES = 1000

#: Wraps a model for an optimizer; returns what the training loop calls.
Wrap = Callable[..., nn.Module]


def by_bagua_init(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> nn.Module:
    wrapped, _ = bagua.bagua_init(model, optimizer, **_small(options))
    return wrapped


def by_with_bagua(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> nn.Module:
    algorithm = options.pop("algorithm", None) or bagua.algorithms.Algorithm.init("gradient_allreduce")
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return model.with_bagua(optimizers, algorithm, **_small(options))


def by_data_parallel(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, optimizers=optimizer, **_small(options))


def _small(options: dict[str, Any]) -> dict[str, Any]:
    return {"bucket_bytes": SMALL_BUCKET_BYTES, **options}


WRAPS: dict[str, Wrap] = {
    "bagua_init": by_bagua_init,
    "with_bagua": by_with_bagua,
    "data_parallel": by_data_parallel,
}
