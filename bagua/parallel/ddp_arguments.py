"""What each constructor argument of torch's ``DistributedDataParallel`` means here, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import nn

from bagua.checks import check_kind, check_numbers, refuse
from bagua.comm import ProcessGroup, as_group
from bagua.engine import check_optional_flag
from bagua.errors import ConfigurationError

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


def refuse_what_is_missing(given: Mapping[str, object]) -> None:
    """Raise ``ConfigurationError`` for the first argument that asks for what does not exist here."""
    for argument, (nothing, advice) in _MISSING.items():
        refuse(argument, given[argument], nothing, advice, of="torch's DistributedDataParallel")


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
    check_optional_flag(broadcast_buffers=broadcast_buffers, forward_sync_buffers=forward_sync_buffers)
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


def check_devices(device_ids: object, output_device: object) -> None:
    """Raise ``InvalidTypeError`` for what cannot name devices."""
    expected = "a device, or its number"
    check_kind((list, tuple, NoneType), "a list of one device, or None", device_ids=device_ids)
    for device in device_ids if isinstance(device_ids, list | tuple) else ():
        check_kind((int, torch.device, str), expected, device_ids=device)
    check_kind((int, torch.device, str, NoneType), f"{expected}, or None", output_device=output_device)


def input_device(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
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
    homes = _devices(module.parameters())
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


def _devices(parameters: Iterable[nn.Parameter]) -> set[torch.device]:
    return {parameter.device for parameter in parameters}
