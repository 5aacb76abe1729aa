"""The documented ways into the engine, and models that are trained through them on ranks that are threads."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests import harness
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, seeded, sgd, snapshot

#: Makes several buckets out of the small models of the tests.
SMALL = {"bucket_bytes": 1000}

on_ranks = harness.on_ranks

#: Wraps a model for an optimizer; returns what the training loop calls.
Wrap = Callable[..., nn.Module]


def by_bagua_init(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> nn.Module:
    return bagua.bagua_init(model, optimizer, **{**SMALL, **options})[0]


def by_with_bagua(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> nn.Module:
    algorithm = options.pop("algorithm", None) or bagua.algorithms.Algorithm.init("gradient_allreduce")
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return model.with_bagua(optimizers, algorithm, **{**SMALL, **options})


def by_data_parallel(model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, optimizers=optimizer, **{**SMALL, **options})


WRAPS: dict[str, Wrap] = {"bagua_init": by_bagua_init, "with_bagua": by_with_bagua, "data_parallel": by_data_parallel}


def of_this_rank() -> nn.Module:
    """Ranks start from different weights; rank 0's must win."""
    return mlp(bagua.get_rank())


class Made(nn.Module):
    """Parts with equal weights on all ranks, and what becomes of the inputs ``(6, 8)``."""

    def __init__(self, forward: Callable[..., Any], **parts: Callable[[], nn.Module | nn.Parameter]) -> None:
        super().__init__()
        self.call = forward
        with seeded():
            for name, make in parts.items():
                setattr(self, name, make())

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.call(self, *inputs, **more)


class Branches(nn.Module):
    """Uses ``left`` or ``right``, as its caller says; ``never`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.left, self.right, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, side: str) -> torch.Tensor:
        return self.left(inputs) if side == "left" else self.right(inputs)


class Recomputed(nn.Module):
    """Its hidden layers are computed anew in the backward pass, in a pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner[1:], self.inner[0](inputs), use_reentrant=True)


class Twice(nn.Module):
    """Reentrant checkpoints of one layer. With several, its gradient is not complete when it arrives first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.times = nn.Linear(8, 8), nn.Linear(8, 8), 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(self.times):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return hidden[:, :4]


class Loop:
    """A model that one rank trains.

    Attributes:
        rank: number of the calling rank.
        model: what the user wrote.
        optimizer: of all its parameters.
        wrapped: what the training loop calls.
        step: number of steps that were made.
        losses: loss of what is called, on a rank, in a step.
    """

    def __init__(
        self,
        wrap: Wrap | str = "bagua_init",
        make: Callable[[], nn.Module] = mlp,
        make_optimizer: harness.OptimizerMaker = sgd,
        losses: harness.Losses = loss_of,
        **options: Any,
    ) -> None:
        self.rank, self.step, self.losses = bagua.get_rank(), 0, losses
        self.model = make()
        self.optimizer = make_optimizer(self.model.parameters())
        self.wrapped = (WRAPS[wrap] if isinstance(wrap, str) else wrap)(self.model, self.optimizer, **options)

    def loss(self) -> torch.Tensor:
        """That of this rank in the next step, which is counted."""
        self.step += 1
        return self.losses(self.wrapped, self.rank, self.step - 1)

    def backward(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]

    @property
    def reducer(self) -> Any:
        """What exchanges for this model."""
        return self.wrapped._bagua_engine.reducer

    def switch_to(self, algorithm: str | bagua.algorithms.Algorithm) -> None:
        """Train with another algorithm from now on."""
        if self.wrapped is self.model:
            by_with_bagua(self.model, self.optimizer, algorithm=algorithm)
        else:
            self.wrapped.switch_to(algorithm)

    def train(self, steps: int = 1) -> State:
        """So many steps; the weights after them."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()
        return snapshot(self.model)


class Operations(TorchDispatchMode):
    """Notes each operation in a block, with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.noted.append((function, function(*arguments, **(keywords or {}))))
        return self.noted[-1][1]


def assert_trained(results: Sequence[State], expected: State) -> None:
    """Every rank has bitwise the same tensors, and these are the expected ones."""
    assert_same_on_all_ranks(results)
    assert_close(results[0], expected)


def branch_loss(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return loss_of(lambda inputs: model(inputs, "left" if rank == 0 else "right"), rank, step)


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def file_of(value: object) -> io.BytesIO:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
