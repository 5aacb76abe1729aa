"""A small training problem with other data on each rank, and its mathematics in one process.

What the engine's tests and the contract of algorithms have in common. Ranks that train
``mlp()`` on ``loss_of(model, rank, step)`` can be compared with each other, and with
``reference``, which takes the gradients of all ranks one after the other.
"""

import contextlib
import copy
import functools
import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagua.compression import Codec, Metadata

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Losses = Callable[[nn.Module, int, int], torch.Tensor]
State = dict[str, torch.Tensor]

_seeding = threading.RLock()


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Torch's one global generator, for one thread at a time: ranks may be threads."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # Without CUDA's, for which torch formats a traceback each time.
        yield


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    """What ``function(number)`` returns in so many threads at once, or the first error."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count)))


def until(condition: Callable[[], object], patience_s: float = 60.0) -> None:
    """Wait for what another thread or process does; fail if that takes longer than any machine needs."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def stop_process(pid: int) -> None:
    """Stop a process, and return when all of its threads stand: until then one of them may answer."""
    os.kill(pid, signal.SIGSTOP)
    until(
        lambda: all(one.read_text().rpartition(") ")[2][0] == "T" for one in Path(f"/proc/{pid}/task").glob("*/stat"))
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum: scales with the gradients, so a wrong factor shows."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam: has state from the first step on."""
    return torch.optim.Adam(parameters, lr=0.01)


def home() -> torch.device:
    """Where tensors of the harness lie: ``TESTS_DEVICE``, or the CPU."""
    return torch.device(os.environ.get("TESTS_DEVICE", "cpu"))


def mlp(seed: int = 0) -> nn.Module:
    """A model with parameters of several sizes; equal on all ranks that use one seed."""
    with seeded(seed), torch.device("cpu"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model.to(home())


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``(6, 8)`` and targets ``(6, 4)`` of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = (torch.randn(6, width, generator=generator, device="cpu").to(home()) for width in (8, 4))
    return inputs, targets


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int], *, set_to_none: bool = True
) -> None:
    """The loop that every user writes."""
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def mean_gradients(model: nn.Module, size: int, losses: Callable[[nn.Module, int], torch.Tensor]) -> None:
    """Leave in ``model`` the mean over ranks of the gradients, computed one rank after the other."""
    totals: State = {}
    for rank in range(size):
        model.zero_grad()
        losses(model, rank).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.clone() if parameter.is_complex() else parameter.grad.double()
                totals[name] = totals[name] + gradient if name in totals else gradient
    for name, parameter in model.named_parameters():
        parameter.grad = (totals[name] / size).to(parameter.dtype) if name in totals else None


def reference(
    model: nn.Module, make_optimizer: OptimizerMaker, size: int, steps: Iterable[int], losses: Losses = loss_of
) -> State:
    """The state of ``model`` after training on the data of all ranks in this one process."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    for number in steps:
        mean_gradients(model, size, lambda model, rank, step=number: losses(model, rank, step))
        optimizer.step()
    return snapshot(model)


def coded(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """What comes out at the other end: of a tensor, or of each row by itself."""
    if tensor.dim() > 1:
        return torch.stack([coded(codec, row) for row in tensor])
    return codec.decompress(codec.compress(tensor), Metadata.of(tensor))


def live_tensors() -> list[torch.Tensor]:
    """All of this process."""
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


def live_bytes() -> int:
    """Of all tensors of this process; memory that several share counts once."""
    spans = set()
    for one in live_tensors():
        with contextlib.suppress(RuntimeError):  # Sparse; or undefined, which old versions of torch leave behind.
            start = one.untyped_storage().data_ptr()
            spans.add((start, start + one.untyped_storage().nbytes()))
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def snapshot(model: nn.Module) -> State:
    """A copy of the model's state, by name, on the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def gradients(model: nn.Module) -> State:
    """A copy of the gradients, by name; empty where there is none."""
    return {
        name: torch.empty(0) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def assert_same_on_all_ranks(states: Sequence[State]) -> None:
    """Raise ``AssertionError`` unless every rank ended with bitwise the same tensors."""
    for rank, state in enumerate(states[1:], start=1):
        assert state.keys() == states[0].keys()
        for name, value in state.items():
            assert torch.equal(value, states[0][name]), f"{name} differs between rank 0 and rank {rank}"


def assert_close(state: State, expected: State) -> None:
    """Raise ``AssertionError`` unless both agree within what another order of additions explains."""
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), (
            f"{name} is wrong by up to {(value - expected[name]).abs().max().item():.2g}"
        )


def on_ranks(
    size: int | str, check: Callable[[list[Any]], object] | None = None, *, pool: str = "thread_pool", **options: Any
) -> Callable[..., Any]:
    """The decorated test runs on ranks, with its arguments on each; a test at the top level also on processes.

    Args:
        size: number of ranks, or the argument of the test that says it.
        check: gets what the ranks return, in their order.
        pool: name of the fixture with the ranks: by default threads; ``rank_pool`` is all transports.
        options: those of ``RankPool.run``.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            ranks = arguments.pop(pool)
            number = arguments[size] if isinstance(size, str) else size
            returned = ranks.run(functools.partial(test, **arguments), size=number, **options)
            if check is not None:
                check(returned)

        ranks = inspect.Parameter(pool, inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*inspect.signature(test).parameters.values(), ranks])  # type: ignore[attr-defined]
        test.__qualname__ += ".__wrapped__"  # Under this name processes find what each rank does.
        return run

    return decorate


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step of a training loop. The loss may have been computed before the old gradients go."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
