"""A class with the constructor arguments of torch's ``DistributedDataParallel``, for scripts that use that.

First what each argument means here, or why it is refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any, NoReturn

import torch
from typing_extensions import Never

from bagua import engine
from bagua.algorithms import Algorithm, DistributedAlgorithm
from bagua.checks import check_flags, check_kind, check_numbers, refuse
from bagua.comm import ProcessGroup, as_group
from bagua.errors import ConfigurationError
from bagua.parallel.wrappers import OverlappingWrapper

__all__ = ["DistributedDataParallel"]

#: torch's default for the size of a bucket.
DEFAULT_BUCKET_CAP_MB = 25

#: Arguments with no counterpart here: the value that asks for nothing, and what to do instead.
_MISSING: dict[str, tuple[object, str]] = {
    "dim": (0, "Inputs are not scattered over devices; each process has one device."),
    "check_reduction": (False, "Every reduction is checked anyway; leave the argument out."),
    "delay_all_reduce_named_params": (None, "Name the parameters in module._bagua_params_and_buffers_to_ignore."),
    "param_to_hook_all_reduce": (None, "Name the parameters in module._bagua_params_and_buffers_to_ignore."),
    "mixed_precision": (None, "Use torch.autocast, or convert the module before it is wrapped."),
    "skip_all_reduce_unused_params": (False, "Use find_unused_parameters=True; unused parameters count as zero."),
    "bucket_cap_mb_list": (None, "All buckets have one size here; use bucket_cap_mb."),
    "batched_grad_copy": (False, "Gradients are copied into their bucket one by one, as they arrive; leave it out."),
    "lazy_bucket_allocation": (False, "Buckets keep their memory, and gradients are views of it; leave it out."),
}


def resolve_group(process_group: Any, device_mesh: Any) -> ProcessGroup:
    """The group to train on: ours, torch's, that of a one-dimensional mesh, or all ranks; torch's are joined."""
    if process_group is not None and device_mesh is not None:
        raise ConfigurationError(
            "a process group and a device mesh both say which ranks train together",
            argument="device_mesh",
            expected="one of process_group and device_mesh",
            seen="both",
        )
    if device_mesh is not None:
        if getattr(device_mesh, "ndim", None) != 1:
            raise ConfigurationError(
                "only a one-dimensional mesh is a group",
                argument="device_mesh",
                expected="a DeviceMesh with one dimension",
                seen=repr(device_mesh),
                advice="Pass device_mesh['name of a dimension'].",
            )
        return as_group(device_mesh.get_group(), "device_mesh")
    return as_group(process_group, "process_group")


def bucket_bytes_from(bucket_cap_mb: float | None, bucket_bytes: int | None) -> int:
    """The size of a bucket in bytes, from torch's argument in MiB or ours in bytes."""
    if bucket_cap_mb is not None and bucket_bytes is not None:
        raise ConfigurationError(
            "two arguments say how large buckets are",
            argument="bucket_bytes",
            expected="one of bucket_cap_mb and bucket_bytes",
            seen="both",
        )
    if bucket_bytes is not None:
        return bucket_bytes
    return bytes_from_megabytes(bucket_cap_mb=DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb)


def bytes_from_megabytes(**size: float) -> int:
    """The size of a bucket in bytes, from one argument in MiB."""
    check_numbers(lambda megabytes: 0 < megabytes < 2**40, "a number of MiB > 0", **size)
    return max(int(next(iter(size.values())) * 2**20), 1)


def buffer_policy(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers come from rank 0 at the start, and whether before each forward; as in torch 2.13.

    Example:
        >>> buffer_policy(None, None), buffer_policy(False, None), buffer_policy(None, False)
        ((True, True), (False, False), (True, False))
    """
    engine.check_optional_flag(broadcast_buffers=broadcast_buffers, forward_sync_buffers=forward_sync_buffers)
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None and broadcast_buffers != forward_sync_buffers:
            raise ConfigurationError(
                "broadcast_buffers and forward_sync_buffers contradict each other",
                argument="forward_sync_buffers",
                expected=repr(broadcast_buffers),
                seen=repr(forward_sync_buffers),
                advice="broadcast_buffers is torch's old name of it; leave it out.",
            )
        return True, forward_sync_buffers
    wanted = True if broadcast_buffers is None else broadcast_buffers
    return wanted, wanted


def input_device(
    module: torch.nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    """Where inputs are moved to: the one device in ``device_ids``, or None to leave them where they are.

    Raises:
        ConfigurationError: the module is not on that device, or outputs should go elsewhere.
    """
    if not device_ids:
        _check_output_device(output_device, None)
        return None
    if len(device_ids) != 1:
        raise ConfigurationError(
            "one process drives one device", argument="device_ids", expected="one device or None", seen=list(device_ids)
        )
    homes = {parameter.device for parameter in module.parameters()}
    wanted = _as_device(device_ids[0])
    if homes != {wanted}:
        raise ConfigurationError(
            "the module is not on the device that it is to be trained on",
            argument="device_ids",
            expected=f"a device that holds all parameters; they are on {', '.join(sorted(map(str, homes)))}",
            seen=wanted,
            advice="Move the module first; leave device_ids out for modules on the CPU or on several devices.",
        )
    _check_output_device(output_device, wanted)
    return wanted


def _check_output_device(output_device: int | torch.device | None, device: torch.device | None) -> None:
    if output_device is not None and (device is None or _as_device(output_device) != device):
        raise ConfigurationError(
            "outputs stay on the device of the module",
            argument="output_device",
            expected=f"None{'' if device is None else f' or {device}'}",
            seen=output_device,
        )


def _as_device(device: int | torch.device | str) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class DistributedDataParallel(OverlappingWrapper):
    """Trains a module on many ranks; takes the place of torch's class of this name.

    Each argument of torch's constructor is honoured, or refused with a
    ``ConfigurationError`` that says what to do instead. Two more choose how ranks
    communicate. As in torch, the keys of ``state_dict()`` begin with ``module.``, so
    existing checkpoints can be loaded, and the plain module is ``.module``.

    Args:
        module: the module to train.
        device_ids: the one device that holds the module, to which inputs are moved; None
            leaves inputs where they are.
        output_device: None, or the same device.
        dim: 0.
        broadcast_buffers: torch's old name of ``forward_sync_buffers``; False also leaves
            the buffers of each rank as they are at the start.
        init_sync: start from rank 0's parameters, buffers and optimizer state.
        process_group: a group of ``bagua.comm`` or of ``torch.distributed``; None means all ranks.
        bucket_cap_mb: a bucket is closed when it holds so many MiB; 25 by default.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it
            is an error.
        check_reduction: False.
        gradient_as_bucket_view: gradients are views of flat memory; otherwise they are
            copied into it and back.
        static_graph: the same parameters are used in every step: includes
            ``find_unused_parameters``.
        delay_all_reduce_named_params: None.
        param_to_hook_all_reduce: None.
        mixed_precision: None.
        device_mesh: a one-dimensional mesh, in place of ``process_group``.
        skip_all_reduce_unused_params: False.
        bucket_cap_mb_list: None.
        batched_grad_copy: False.
        forward_sync_buffers: take rank 0's buffers before each forward pass, with the
            exceptions that torch makes: not after a forward pass in ``no_sync()`` or
            without gradients. So an evaluation on one rank alone must call ``.module``.
        lazy_bucket_allocation: False; torch has this argument from 2.15 on.
        optimizers: those that step the parameters; some algorithms need them.
        algorithm: algorithm that says what is exchanged, and when.
        bucket_bytes: like ``bucket_cap_mb``, in bytes.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.
        unknown: anything else is a ``TypeError`` that names the above.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        ConfigurationError: an argument that cannot be honoured.

    Example:
        >>> import bagua.comm
        >>> layer = torch.nn.Linear(2, 2)
        >>> model = DistributedDataParallel(layer, process_group=bagua.comm.solo_group())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> list(model.state_dict())
        ['module.weight', 'module.bias']
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: None = None,
        param_to_hook_all_reduce: None = None,
        mixed_precision: None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
        algorithm: Algorithm | DistributedAlgorithm | str = DistributedAlgorithm.GradientAllReduce,
        bucket_bytes: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        **unknown: Never,
    ) -> None:
        engine.refuse_unknown(unknown, list(inspect.signature(DistributedDataParallel).parameters)[:-1], algorithm)
        for argument, (nothing, advice) in _MISSING.items():
            refuse(argument, locals()[argument], nothing, advice, of="torch's DistributedDataParallel")
        engine.check_module(module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError(
                "no parameter of the module requires a gradient",
                argument="module",
                expected="something to train",
                seen=type(module).__name__,
            )
        check_flags(
            init_sync=init_sync,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        engine.check_grad_scaler(grad_scaler)
        expected = "a device, or its number"
        check_kind((list, tuple, NoneType), "a list of one device, or None", device_ids=device_ids)
        for one in device_ids or ():
            check_kind((int, torch.device, str), expected, device_ids=one)
        check_kind((int, torch.device, str, NoneType), f"{expected}, or None", output_device=output_device)
        at_the_start, before_forward = buffer_policy(broadcast_buffers, forward_sync_buffers)
        device = input_device(module, device_ids, output_device)
        group = resolve_group(process_group, device_mesh)
        super().__init__(
            module,
            engine.optimizer_list(optimizers),
            fusion=gradient_as_bucket_view,
            process_group=group,
            algorithm=algorithm,
            bucket_bytes=bucket_bytes_from(bucket_cap_mb, bucket_bytes),
            find_unused_parameters=find_unused_parameters or static_graph,
            grad_scaler=grad_scaler,
        )
        self.process_group = group
        self._input_device = device
        self._buffer_group: ProcessGroup | None = None
        self._buffers_are_due = True
        if init_sync:
            engine.begin_training(self.reducer, average=False, broadcast_buffers=at_the_start)
        if before_forward and group.size > 1 and any(True for _ in module.buffers()):
            # Not the engine's own group: an exchange may still be going on there.
            self._buffer_group = group.duplicate("buffers")
            self.reducer.formation.lanes.groups.append(self._buffer_group)
            self._engine.before_step = partial(_take_buffers, weakref.ref(self))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self._begins_step():
            self._engine.before_step()
        if self._input_device is not None:
            inputs, kwargs = _moved((inputs, kwargs), self._input_device)
        output = super().forward(*inputs, **kwargs)
        self._buffers_are_due = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    def _begins_step(self) -> bool:
        """Whether buffers are due; in a ``join`` block, whether those who are out of data know of this step."""
        if self._engine.joining is None:
            return self._buffers_are_due
        return self.training and self._engine.announce()

    def take_buffers(self) -> None:
        """Take the buffers of the first rank that has data. Collective."""
        if self._buffer_group is not None:
            joining = self._engine.joining
            root = 0 if joining is None else joining.active[0]
            engine.broadcast_buffers_of(self.module, root, comm=self._buffer_group.global_communicator)

    def bagua_close(self) -> None:
        """See ``EngineAccess``."""
        self._buffer_group = None
        super().bagua_close()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass exchanges gradients; ``no_sync`` turns it off."""
        return self._engine.synchronize

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._engine.synchronize = value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module, with keys that begin with ``module.``, as torch's class has them."""
        self.reducer.after_optimizers()
        return torch.nn.Module.state_dict(self, *args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what ``state_dict`` returned, or the state of the plain module."""
        return torch.nn.Module.load_state_dict(self, *args, **kwargs)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:  # noqa: ARG002 - as in torch
        """Refused: an algorithm is what a communication hook is in torch.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "communication hooks of torch cannot be registered here",
            argument="hook",
            expected="an algorithm",
            seen=getattr(hook, "__name__", repr(hook)),
            advice="Pass algorithm=... to the constructor; see bagua.algorithms.",
        )


def _take_buffers(reference: weakref.ref[DistributedDataParallel]) -> None:
    """What the engine calls, which does not keep the wrapper alive."""
    wrapper = reference()
    if wrapper is not None:
        wrapper.take_buffers()


def _moved(value: Any, device: torch.device) -> Any:
    """``value`` with the tensors in tuples, lists and dictionaries moved to ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
