"""Making the state of all ranks equal: rank 0's at the start, the mean at a switch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bagua.buckets import write_finite
from bagua.comm import Communicator, Group, NonMember, ReduceOp, communicator_of
from bagua.engine.buckets.registration import buffers_of, floating_buffers_of, ignored_names
from bagua.engine.state.agreement import gather_objects
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


def make_weights_equal(parameters: Sequence[torch.nn.Parameter], communicator: Communicator) -> None:
    """Replace parameters by their mean over all ranks, if any of them differs. Collective.

    Args:
        parameters: equal in names, shapes and dtypes on all ranks.
        communicator: communicator of the ranks.
    """
    if not are_equal(parameters, communicator):
        average([parameter.detach() for parameter in parameters], communicator)


def are_equal(tensors: Sequence[torch.Tensor], communicator: Communicator) -> bool:
    """Whether all ranks hold the same. Collective.

    Args:
        tensors: equally many on all ranks.
        communicator: communicator of the ranks.
    """
    own = [digest_of(tensor) for tensor in tensors]
    return all(theirs == own for theirs in gather_objects(communicator, "a comparison of weights", own))
