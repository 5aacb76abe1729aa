"""Making the state of all ranks equal: rank 0's at the start, the mean at a switch.

States of optimizers are given to other ranks, and written into the groups and the state that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch

from bagua.buckets import write_finite
from bagua.comm import Communicator, Group, NonMember, ReduceOp, communicator_of
from bagua.engine.buckets.registration import buffers_of, floating_buffers_of, ignored_names
from bagua.engine.state.agreement import compare, compare_or_refuse, gather_objects
from bagua.engine.state.saving import digest_of
from bagua.errors import ConfigurationError


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

    Autograd does not hear of it, as in torch's DDP: a forward pass before this one may wait for its backward pass.

    Args:
        module: equal in names, shapes and dtypes on all ranks.
        root: the rank whose buffers they are.
        comm: the ranks; None means all.
    """
    tensors = [buffer.data for buffer in buffers_of(module).values()]  # detach() would share the count of versions
    if tensors:
        communicator_of(comm).broadcast_coalesced(tensors, root)


def average(tensors: Sequence[torch.Tensor], communicator: Communicator | NonMember) -> None:
    """Mean of floating-point tensors over all ranks; the others from rank 0."""
    floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    others = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
    communicator.allreduce_coalesced(floating, ReduceOp.AVG)
    communicator.broadcast_coalesced(others)


def allreduce_parameters(module: torch.nn.Module, *, comm: Group | None = None) -> None:
    """Replace floating-point parameters and buffers by their mean over all ranks, the rest by rank 0's.

    A buffer whose mean is not finite stays as it is, as a mask does that is infinite on all ranks.

    Args:
        module: equal in names, shapes and dtypes on all ranks.
        comm: the ranks; None means all.

    Example:
        >>> from bagua.comm import solo_group
        >>> allreduce_parameters(torch.nn.Linear(2, 2), comm=solo_group().global_communicator)
    """
    communicator, held = communicator_of(comm), floating_buffers_of(module)
    rest = [buffer for name, buffer in buffers_of(module).items() if name not in held]
    average([*tensors_of(module, parameters=True, buffers=False), *rest], communicator)
    means = [buffer.to(torch.float64, copy=True) for buffer in held.values()]
    communicator.allreduce_coalesced(means, ReduceOp.AVG)
    write_finite(held, means)


def are_equal(tensors: Sequence[torch.Tensor], communicator: Communicator) -> bool:
    """Whether all ranks hold the same. Collective.

    Args:
        tensors: equally many on all ranks.
        communicator: communicator of the ranks.
    """
    own = [digest_of(tensor) for tensor in tensors]
    return all(theirs == own for theirs in gather_objects(communicator, "a comparison of weights", own))


#: In the place of a value that cannot be sent.
_LEFT_OUT = object()


def sendable(state: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer in plain types, without what cannot be sent, as functions and dtypes."""
    sent: dict[str, Any] = _sent(state)
    return sent


def plain(value: Any) -> Any:
    """``value`` without what is a rank's own, as devices and addresses: numbers, and names of what cannot be sent."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    sent = _sent(value)
    return _name_of(value) if sent is _LEFT_OUT else sent


def _sent(value: Any) -> Any:
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        pairs = ((key, _sent(item)) for key, item in value.items())
        return {key: item for key, item in pairs if item is not _LEFT_OUT}
    if type(value) in (list, tuple, set, frozenset):
        items = [_sent(item) for item in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else type(value)(items)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of NumPy
        return value.item()
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else _LEFT_OUT


def _name_of(value: Any) -> str:
    if isinstance(value, torch.dtype | torch.layout):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _options(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    """Where each setting and each part of the state is, and what it is."""
    for number, optimizer in enumerate(optimizers):
        where = f"optimizer {number} ({type(optimizer).__name__})"
        for place, group in enumerate(optimizer.param_groups):
            yield from ((f"{where}, parameter group {place}, {key}", group[key]) for key in group if key != "params")
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for place, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            yield from ((f"{where}, state of parameter {place}, {key}", value) for key, value in state.items())


def _facts(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    counted = [
        f"optimizer {number}: {type(optimizer).__name__}, parameter groups of "
        f"{[len(group['params']) for group in optimizer.param_groups]}"
        for number, optimizer in enumerate(optimizers)
    ]
    settings = ((where, value) for where, value in _options(optimizers) if ", parameter group " in where)
    return counted + [f"{where}: {_name_of(value)}" for where, value in settings if _sent(value) is _LEFT_OUT]


def _refusal(optimizers: Sequence[torch.optim.Optimizer]) -> ConfigurationError | None:
    """Why the state of this rank cannot be given to others: tensors would be left out."""
    for where, value in _options(optimizers):
        if _sent(value) is not _LEFT_OUT or not isinstance(value, Iterable):
            continue
        if any(isinstance(item, torch.Tensor) for item in value):
            return ConfigurationError(
                f"{where} cannot be sent to other ranks",
                argument="optimizers",
                expected="tensors by themselves, or in lists, tuples and dictionaries",
                seen=type(value).__qualname__,
            )
    return None


def take_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, but into the groups and the state that are there.

    A scheduler, another optimizer around this one, and the user's script may hold them. What cannot be sent stays.

    Args:
        optimizer: over the same parameters as the one whose ``state`` it is.
        state: from ``sendable``.
    """
    groups, held = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    if optimizer.param_groups is not groups:
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            _write({key: value for key, value in loaded.items() if key != "params"}, group, keep=("params",))
        optimizer.param_groups = groups
    if optimizer.state is not held:
        _write(optimizer.state, held)
        optimizer.state = held


def _write(loaded: MutableMapping[Any, Any], held: MutableMapping[Any, Any], keep: Sequence[str] = ()) -> None:
    for key in [key for key, value in held.items() if key not in loaded and key not in keep]:
        if _sent(held[key]) is not _LEFT_OUT:
            del held[key]
    for key, value in loaded.items():
        held[key] = _written(value, held.get(key))


def _written(loaded: Any, held: Any) -> Any:
    """``loaded``, as the object that is ``held`` if that can take its value."""
    if isinstance(loaded, dict) and isinstance(held, dict):
        _write(loaded, held)
        return held
    if not (isinstance(loaded, torch.Tensor) and isinstance(held, torch.Tensor)):
        return loaded
    if (loaded.shape, loaded.dtype, loaded.device) != (held.shape, held.dtype, held.device):
        return loaded
    with torch.no_grad():
        return held.copy_(loaded)


def broadcast_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer], *, comm: Group | None = None, own: Sequence[torch.nn.Parameter] = ()
) -> None:
    """Give all ranks rank 0's optimizer states and settings. Collective.

    Values are written into the groups that are there. Settings that cannot be sent, as functions and dtypes, are
    compared by name.

    Args:
        optimizers: over the same parameters on all ranks.
        comm: the ranks; None means all.
        own: parameters that are each rank's own: their states stay, and the settings of groups that hold no others.

    Raises:
        CollectiveMismatchError: ranks have other optimizers or parameter groups.
        ConfigurationError: a state holds tensors in something else than lists, tuples and dictionaries.

    Example:
        >>> from bagua.comm import solo_group
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        >>> broadcast_optimizer_state([optimizer], comm=solo_group().global_communicator)
    """
    communicator = communicator_of(comm)
    if not communicator or communicator.size == 1:
        return
    compare_or_refuse(_facts(optimizers), communicator, "optimizers", _refusal(optimizers))
    for optimizer in optimizers:
        received = communicator.broadcast_object(sendable(optimizer.state_dict()) if communicator.rank == 0 else None)
        if communicator.rank != 0:
            take_state(optimizer, _with_own(received, optimizer, own) if own else received)


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
    average([tensor for _, tensor in named], communicator)
