"""bagua on the workers of Ray Train."""

from __future__ import annotations

import math
from typing import Any

from bagua.checks import install_command
from bagua.comm import as_seconds, destroy_process_group, init_process_group, is_initialized

__all__ = ["torch_config"]


def _start(backend: str | None, timeout_s: float) -> None:
    if not is_initialized():
        init_process_group(backend=backend, timeout=timeout_s)


def torch_config(*, backend: str | None = None, timeout_s: float = 1800.0, **options: Any) -> Any:
    """A ``TorchConfig`` for ``ray.train.torch.TorchTrainer`` whose workers are connected by bagua, too.

    In the training function everything of ``bagua.torch_api`` works at once. Wrap models with bagua, and not with
    ``ray.train.torch.prepare_model``, or pass that ``parallel_strategy=None``.

    Args:
        backend: as for ``bagua.comm.init_process_group``; None chooses.
        timeout_s: default deadline of every call, in seconds. Ray's own calls have whole seconds, at least as many.
        options: options of Ray's ``TorchConfig``, except ``backend``: torch has Gloo here, or NCCL with GPUs.

    Raises:
        ConfigurationError: ``timeout_s`` is not positive.
        ImportError: Ray is not installed.
    """
    deadline_s = as_seconds(timeout_s, "timeout_s")
    try:
        from ray.train.torch import TorchConfig  # noqa: PLC0415 - only this function needs Ray
    except ImportError as error:
        raise ImportError(f"bagua.integrations.ray needs Ray Train: {install_command('ray')}") from error

    parent = TorchConfig().backend_cls

    class BaguaBackend(parent):  # type: ignore[misc, valid-type]  # known only at run time
        """Torch's backend, then ours."""

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            super().on_start(worker_group, backend_config)
            worker_group.execute(_start, backend, deadline_s)

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            worker_group.execute(destroy_process_group)
            super().on_shutdown(worker_group, backend_config)

    class BaguaConfig(TorchConfig):
        """Ray's options, with this backend."""

        @property
        def backend_cls(self) -> type[Any]:
            return BaguaBackend

    return BaguaConfig(timeout_s=math.ceil(deadline_s), **options)
