"""Helpers that user code of PyTorch Lightning 1.x calls, under their names, on ``bagua.comm``.

Where ``group`` is taken it is a group of ``bagua.comm`` or of ``torch.distributed``, or None for all ranks.
If ``torch.distributed`` is initialized and bagua is not, the first call for all ranks joins torch's group.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from bagua import env
from bagua.checks import check_kind
from bagua.comm import Communicator, ReduceOp, as_communicator, available, init_process_group, is_initialized
from bagua.errors import ConfigurationError, InvalidReduceOpError, InvalidTensorError
from bagua.utilities import rank_zero
from bagua.utilities.rank_zero import *  # noqa: F403 - names that it lists

__all__ = [
    "AllGatherGrad", "all_gather_ddp_if_available", "distributed_available", "gather_all_tensors",
    "get_default_process_group_backend_for_device", "init_dist_connection", "register_ddp_comm_hook", "sync_ddp",
    "sync_ddp_if_available", "tpu_distributed",
]  # fmt: skip
__all__ += rank_zero.__all__

_NAMED_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "mean": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}


def distributed_available() -> bool:
    """Whether a process group exists, ours or one of ``torch.distributed``.

    Example:
        >>> distributed_available()
        False
    """
    return available()


def tpu_distributed() -> bool:
    """Whether this runs on several TPU cores: never.

    Example:
        >>> tpu_distributed()
        False
    """
    return False


def get_default_process_group_backend_for_device(device: torch.device | str) -> str:
    """The backend of ``torch.distributed`` that serves tensors on ``device``.

    Example:
        >>> get_default_process_group_backend_for_device(torch.device("cpu"))
        'gloo'
    """
    return "nccl" if torch.device(device).type == "cuda" else "gloo"


def init_dist_connection(
    cluster_environment: Any,
    torch_distributed_backend: str | None,
    global_rank: int | None = None,
    world_size: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> None:
    """Connect all ranks, unless they are. ``torch.distributed`` is initialized, too; where it is already, bagua joins.

    Args:
        cluster_environment: Lightning's, or any object with ``main_address``, ``main_port``,
            ``global_rank()`` and ``world_size()``.
        torch_distributed_backend: as for ``bagua.comm.init_process_group``; None chooses.
        global_rank: global rank of this process; None asks ``cluster_environment``.
        world_size: number of processes; None asks ``cluster_environment``.
        timeout: default deadline of every call, in seconds or as a ``timedelta``. What else Lightning passes on to
            ``torch.distributed.init_process_group`` has no meaning here, and is a ``TypeError``.

    Raises:
        ConfigurationError: rank and size do not fit together.
        CollectiveTimeoutError: ranks that did not come in time.
    """
    if is_initialized():
        return
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    size = cluster_environment.world_size() if world_size is None else world_size
    if not available():
        address, port = cluster_environment.main_address, cluster_environment.main_port
        # As Lightning does: later calls find the same address there.
        env.overlay({"MASTER_ADDR": str(address), "MASTER_PORT": str(port)})
    init_process_group(backend=torch_distributed_backend, rank=rank, world_size=size, timeout=timeout)


# Reductions.


def sync_ddp_if_available(
    result: torch.Tensor, group: Any = None, reduce_op: ReduceOp.RedOpType | str | None = None
) -> torch.Tensor:
    """``sync_ddp`` where there is a group; ``result`` itself where there is none.

    Example:
        >>> sync_ddp_if_available(torch.tensor([1.0]), reduce_op="mean")
        tensor([1.])
    """
    return sync_ddp(result, group, reduce_op) if group is not None or available() else result


@torch.no_grad()
def sync_ddp(
    result: torch.Tensor, group: Any = None, reduce_op: ReduceOp.RedOpType | str | None = None
) -> torch.Tensor:
    """``result`` reduced over all ranks, as a new tensor without a graph. ``result`` stays as it is.

    Lightning reduced ``result`` in place; use what is returned.

    Args:
        result: equal in shape and dtype on all ranks.
        group: the ranks; None means all.
        reduce_op: ``sum`` (also None), ``avg`` or ``mean``, ``min``, ``max``, ``product``, ``band``, ``bor``,
            ``bxor``, or a ``ReduceOp``. The
            mean of integers has the default floating-point dtype.

    Raises:
        NotInitializedError: there is no group.
        InvalidReduceOpError: an unknown name.
        InvalidTensorError: ``result`` is no tensor.
    """
    _check_tensor("result", result)
    op = _as_op(reduce_op)
    communicator = as_communicator(group)
    exact = not (result.is_floating_point() or result.is_complex())
    if op == ReduceOp.AVG and exact:
        total = result.detach().to(torch.int64, copy=True)
        communicator.allreduce(total)
        return total / communicator.size
    reduced = result.detach().clone()
    communicator.allreduce(reduced, op)
    return reduced


def _check_tensor(argument: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidTensorError(
            "only tensors are exchanged", argument=argument, expected="a tensor", seen=type(value).__name__
        )


def _as_op(reduce_op: Any) -> ReduceOp.RedOpType:
    if not isinstance(reduce_op, str):
        op: ReduceOp.RedOpType = ReduceOp.SUM if reduce_op is None else reduce_op
        return op
    named = _NAMED_OPS.get(reduce_op.lower())
    if named is None:
        raise InvalidReduceOpError(
            "no reduction has this name", argument="reduce_op", expected=" or ".join(_NAMED_OPS), seen=repr(reduce_op)
        )
    return named


# Gathering.


class AllGatherGrad(torch.autograd.Function):
    """``AllGatherGrad.apply(tensor, group)``: the tensors of all ranks, stacked in rank order, with gradients.

    The gradient of each rank's tensor is the sum of its part of the gradients on all ranks, so
    backward is collective, too. Without a group this is a stack of one.

    Raises:
        InvalidTensorError: shapes or dtypes differ, on all ranks.

    Example:
        >>> tensor = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> AllGatherGrad.apply(tensor).mul(3).sum().backward()
        >>> tensor.grad
        tensor([3., 3.])
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Gather and stack."""
        _check_tensor("tensor", tensor)
        ctx.communicator = as_communicator(group) if group is not None or available() else None
        alone = ctx.communicator is None
        return tensor.detach().unsqueeze(0).clone() if alone else _stacked_if_alike(tensor, ctx.communicator)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum over ranks, and keep the own part."""
        (gradient,) = gradients
        if ctx.communicator is None:
            return gradient[0], None
        own = torch.empty_like(gradient[0], memory_format=torch.contiguous_format)
        ctx.communicator.reduce_scatter(own, gradient.contiguous())
        return own, None


def _stacked(tensor: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    gathered = tensor.new_empty((communicator.size, *tensor.shape))
    communicator.allgather(gathered, tensor.detach().contiguous())
    return gathered


def _stacked_if_alike(tensor: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    # Some backends kill the process when sizes differ, so ranks compare them first.
    kind = _kind(tensor)
    fingerprints = torch.empty(communicator.size, dtype=torch.int64, device=tensor.device)
    communicator.allgather(fingerprints, fingerprints.new_tensor([zlib.crc32(repr(kind).encode())]))
    if len(set(fingerprints.tolist())) > 1:
        raise _not_alike("tensor", communicator.allgather_object(kind), "one dtype and one shape on all ranks")
    return _stacked(tensor, communicator)


def _kind(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape)]


def _not_alike(argument: str, kinds: list[list[Any]], expected: str) -> InvalidTensorError:
    return InvalidTensorError(
        "tensors of different kinds cannot be gathered",
        argument=argument,
        expected=expected,
        seen="; ".join(f"rank {rank}: {dtype} {shape}" for rank, (dtype, shape) in enumerate(kinds)),
    )


def all_gather_ddp_if_available(tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
    """The tensors of all ranks, stacked: ``(ranks, *tensor.shape)``; ``tensor`` itself where there is no group.

    Args:
        tensor: equal in shape and dtype on all ranks.
        group: the ranks; None means all.
        sync_grads: let gradients flow back to all ranks; backward is collective then.

    Raises:
        InvalidTensorError: shapes or dtypes differ, on all ranks; ``gather_all_tensors`` takes different shapes.

    Example:
        >>> all_gather_ddp_if_available(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    _check_tensor("tensor", tensor)
    if group is None and not available():
        return tensor
    if sync_grads:
        gathered: torch.Tensor = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
        return gathered
    with torch.no_grad():
        return _stacked_if_alike(tensor, as_communicator(group))


@torch.no_grad()
def gather_all_tensors(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, without graphs. Their shapes may differ.

    Args:
        result: equal in dtype and number of dimensions on all ranks.
        group: the ranks; None means all. Without a group the list holds ``result`` alone.

    Raises:
        InvalidTensorError: dtypes or numbers of dimensions differ; on all ranks.

    Example:
        >>> gather_all_tensors(torch.tensor([1.0, 2.0]))
        [tensor([1., 2.])]
    """
    _check_tensor("result", result)
    if group is None and not available():
        return [result.detach()]
    communicator = as_communicator(group)
    kinds = communicator.allgather_object(_kind(result))
    shapes = [shape for _, shape in kinds]
    if len({(dtype, len(shape)) for dtype, shape in kinds}) > 1:
        raise _not_alike("result", kinds, "one dtype and one number of dimensions on all ranks")
    longest = max(math.prod(shape) for shape in shapes)
    padded = result.new_zeros(longest)
    padded[: result.numel()] = result.detach().reshape(-1)
    rows = _stacked(padded, communicator)
    return [row[: math.prod(shape)].reshape(shape) for row, shape in zip(rows, shapes, strict=True)]


# Communication hooks.

Hook = TypeVar("Hook", bound=Callable[..., Any])


def register_ddp_comm_hook(
    model: torch.nn.parallel.DistributedDataParallel,
    ddp_comm_state: object | None = None,
    ddp_comm_hook: Hook | None = None,
    ddp_comm_wrapper: Callable[[Hook], Callable[..., Any]] | None = None,
) -> None:
    """Register a communication hook on a model of torch's DDP; ``bagua.integrations.ddp_comm_hooks`` has some.

    Args:
        model: a ``torch.nn.parallel.DistributedDataParallel``, compiled or not, or another module that takes hooks.
        ddp_comm_state: handed to the hook.
        ddp_comm_hook: hook that exchanges a bucket; None leaves the model as it is.
        ddp_comm_wrapper: applied to the hook first, for example torch's ``fp16_compress_wrapper``.

    Raises:
        ConfigurationError: the model takes no hooks, or something is not callable.
    """
    if ddp_comm_hook is None:
        return
    functions = (Callable, type(None))
    check_kind(functions, "a function (state, bucket)", ddp_comm_hook=ddp_comm_hook, ddp_comm_wrapper=ddp_comm_wrapper)
    if not callable(getattr(model, "register_comm_hook", None)):
        raise ConfigurationError(
            "communication hooks belong to torch's DistributedDataParallel",
            argument="model",
            expected="a torch.nn.parallel.DistributedDataParallel",
            seen=type(model).__name__,
            advice="For models of bagua, choose an algorithm instead.",
        )
    hook: Callable[..., Any] = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
    model.register_comm_hook(ddp_comm_state, hook)
