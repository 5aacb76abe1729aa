"""Making the state of all ranks equal: rank 0's at the start, the mean at a switch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagua.comm import Communicator, Group, NonMember, ReduceOp, communicator_of
from bagua.engine.buckets.registration import ignored_names
from bagua.engine.state.agreement import compare
from bagua.engine.state.saving import digest_of


def tensors_of(module: torch.nn.Module, *, parameters: bool, buffers: bool) -> list[torch.Tensor]:
    """Parameters and buffers of ``module`` that are not ignored."""
    ignored = ignored_names(module)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        if parameters:
            yield from module.named_parameters()
        if buffers:
            yield from module.named_buffers()

    return [tensor.detach() for name, tensor in named() if name not in ignored]


def ignored_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of ``module`` that are a rank's own, an expert's say."""
    ignored = ignored_names(module)
    return [parameter for name, parameter in module.named_parameters() if name in ignored]


def broadcast_parameters(module: torch.nn.Module, broadcast_buffers: bool = True, *, comm: Group | None = None) -> None:
    """Give all ranks rank 0's parameters, and its buffers. Collective.

    Args:
        module: equal in names, shapes and dtypes on all ranks.
        broadcast_buffers: the buffers, too.
        comm: the ranks; None means all.

    Example:
        >>> from bagua.comm import solo_group
        >>> broadcast_parameters(torch.nn.Linear(2, 2), comm=solo_group().global_communicator)
    """
    tensors = tensors_of(module, parameters=True, buffers=broadcast_buffers)
    communicator_of(comm).broadcast_coalesced(tensors)


def broadcast_buffers_of(module: torch.nn.Module, root: int = 0, *, comm: Group | None = None) -> None:
    """Give all ranks the buffers of one of them. Collective.

    Args:
        module: equal in names, shapes and dtypes on all ranks.
        root: the rank whose buffers they are.
        comm: the ranks; None means all.
    """
    tensors = tensors_of(module, parameters=False, buffers=True)
    if tensors:
        communicator_of(comm).broadcast_coalesced(tensors, root)


def _average(tensors: Sequence[torch.Tensor], communicator: Communicator | NonMember) -> None:
    """Mean of floating-point tensors over all ranks; the others from rank 0."""
    floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    others = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
    communicator.allreduce_coalesced(floating, ReduceOp.AVG)
    communicator.broadcast_coalesced(others)


def allreduce_parameters(module: torch.nn.Module, *, comm: Group | None = None) -> None:
    """Replace floating-point parameters and buffers by their mean over all ranks, the rest by rank 0's.

    Args:
        module: equal in names, shapes and dtypes on all ranks.
        comm: the ranks; None means all.

    Example:
        >>> from bagua.comm import solo_group
        >>> allreduce_parameters(torch.nn.Linear(2, 2), comm=solo_group().global_communicator)
    """
    _average(tensors_of(module, parameters=True, buffers=True), communicator_of(comm))


def make_weights_equal(parameters: Sequence[torch.nn.Parameter], communicator: Communicator) -> None:
    """Replace parameters by their mean over all ranks, if any of them differs. Collective.

    Args:
        parameters: equal in names, shapes and dtypes on all ranks.
        communicator: communicator of the ranks.
    """
    if not are_equal(parameters, communicator):
        _average([parameter.detach() for parameter in parameters], communicator)


def are_equal(tensors: Sequence[torch.Tensor], communicator: Communicator) -> bool:
    """Whether all ranks hold the same. Collective.

    Args:
        tensors: equally many on all ranks.
        communicator: communicator of the ranks.
    """
    own = [digest_of(tensor) for tensor in tensors]
    return all(theirs == own for theirs in communicator.allgather_object(own))


def _facts(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    return [
        f"optimizer {number}: {type(optimizer).__name__}, parameter groups of "
        f"{[len(group['params']) for group in optimizer.param_groups]}"
        for number, optimizer in enumerate(optimizers)
    ]


def broadcast_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer], *, comm: Group | None = None, own: Sequence[torch.nn.Parameter] = ()
) -> None:
    """Give all ranks rank 0's optimizer states and settings. Collective.

    Args:
        optimizers: over the same parameters on all ranks.
        comm: the ranks; None means all.
        own: parameters that are each rank's own: their states stay, and the settings of groups that hold no others.

    Raises:
        CollectiveMismatchError: ranks have other optimizers or parameter groups.
        ConfigurationError: on all ranks, if a state holds more than numbers, strings,
            tensors and containers of these.

    Example:
        >>> from bagua.comm import solo_group
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        >>> broadcast_optimizer_state([optimizer], comm=solo_group().global_communicator)
    """
    communicator = communicator_of(comm)
    if not communicator or communicator.size == 1:
        return
    compare(_facts(optimizers), communicator, "optimizers")
    for optimizer in optimizers:
        received = communicator.broadcast_object(optimizer.state_dict() if communicator.rank == 0 else None)
        if communicator.rank != 0:
            optimizer.load_state_dict(_with_own(received, optimizer, own) if own else received)


def _with_own(
    received: dict[str, Any], optimizer: torch.optim.Optimizer, own: Sequence[torch.nn.Parameter]
) -> dict[str, Any]:
    """The state that was received, but for what belongs to the parameters in ``own``."""
    here, kept = optimizer.state_dict(), set(map(id, own))
    for place, group in enumerate(optimizer.param_groups):
        numbers = here["param_groups"][place]["params"]
        owned = [number for number, one in zip(numbers, group["params"], strict=True) if id(one) in kept]
        for number in owned:
            received["state"].pop(number, None)
            if number in here["state"]:
                received["state"][number] = here["state"][number]
        if owned and len(owned) == len(numbers):
            received["param_groups"][place] = here["param_groups"][place]
    return received


def _state_tensors(
    optimizer: torch.optim.Optimizer, own: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    kept = set(map(id, own))
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in enumerate(parameters):
        if id(parameter) in kept:
            continue
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"{key} of parameter {number}", value


def allreduce_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer], *, comm: Group | None = None, own: Sequence[torch.nn.Parameter] = ()
) -> None:
    """Replace floating-point optimizer state by its mean over all ranks, the rest by rank 0's. Collective.

    Args:
        optimizers: over the same parameters on all ranks.
        comm: the ranks; None means all.
        own: parameters that are each rank's own: their states stay.

    Raises:
        CollectiveMismatchError: ranks have other optimizers, or states of other structure.
    """
    communicator = communicator_of(comm)
    if not communicator or communicator.size == 1:
        return
    named = [item for optimizer in optimizers for item in _state_tensors(optimizer, own)]
    facts = [f"{name}: shape {list(tensor.shape)}, {tensor.dtype}" for name, tensor in named]
    compare([*_facts(optimizers), *facts], communicator, "optimizers")
    _average([tensor for _, tensor in named], communicator)
