"""The documented ways into the engine, and models that are trained through them on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn, optim

import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.harness import (
    Losses,
    OptimizerMaker,
    State,
    assert_close,
    assert_same_on_all_ranks,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
    reference,
    sgd,
    snapshot,
)

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


def wrapped_for_rank(
    make: Callable[[], nn.Module] = mlp,
    wrap: Wrap = by_bagua_init,
    make_optimizer: OptimizerMaker = sgd,
    **options: Any,
) -> tuple[int, nn.Module, optim.Optimizer, nn.Module]:
    """Number of the calling rank, its model, an optimizer, and what its training loop calls."""
    model = make()
    optimizer = make_optimizer(model.parameters())
    return bagua.get_rank(), model, optimizer, wrap(model, optimizer, **options)


def assert_trained(results: Sequence[State], expected: State) -> None:
    """Every rank has bitwise the same tensors, and these are the expected ones."""
    assert_same_on_all_ranks(results)
    assert_close(results[0], expected)


def check_training(
    thread_ranks: Callable[..., list[State]],
    make: Callable[[], nn.Module] = mlp,
    losses: Losses = loss_of,
    make_optimizer: OptimizerMaker = sgd,
    steps: Iterable[int] = range(4),
    wrap: Wrap = by_bagua_init,
    **options: Any,
) -> None:
    """Train on two ranks, and compare with one process that has the batches of both."""

    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank(make, wrap, make_optimizer, **options)
        for step in steps:
            optimizer.zero_grad()
            losses(wrapped, rank, step).backward()
            optimizer.step()
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(make(), make_optimizer, 2, steps, losses))


def gradients_of_two(losses: Callable[[nn.Module, int], Any]) -> State:
    """Mean gradients of ``mlp()`` over two ranks, for the losses of a model and a rank."""
    model = mlp()
    mean_gradients(model, 2, losses)
    return gradients(model)
