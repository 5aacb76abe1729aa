"""What the strategies for Lightning's Trainer and for Fabric have in common: their options, and the ranks."""

from __future__ import annotations

from typing import Any

import torch

from bagua.algorithms import Algorithm, DistributedAlgorithm, as_algorithm, registry
from bagua.comm import get_default_group, init_process_group, is_initialized
from bagua.engine import AutotuneSettings
from bagua.errors import ConfigurationError
from bagua.parallel import DistributedDataParallel
from bagua.utilities import all_gather_ddp_if_available, sync_ddp_if_available

#: Where a checkpoint of Lightning holds what is ours.
KEY = "bagua"

#: What Lightning's classes take for torch's DDP, and would not use here.
_FOR_HOOKS_OF_TORCH = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class RanksMixin:
    """Options of both strategies; and what they ask other ranks, on our communicator."""

    strategy_name = "bagua"

    def __init__(
        self,
        algorithm: Algorithm | DistributedAlgorithm | str = "gradient_allreduce",
        *,
        backend: str | None = None,
        bucket_bytes: int | None = None,
        find_unused_parameters: bool = False,
        forward_sync_buffers: bool | None = None,
        autotune: bool | AutotuneSettings | None = None,
        **strategy_options: Any,
    ) -> None:
        self._algorithm = as_algorithm(algorithm)
        self._bagua_backend = backend
        self._connected = False
        self._engine_options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "find_unused_parameters": find_unused_parameters,
            # Where ranks train alone for many steps, buffers must not meet in each.
            "forward_sync_buffers": (
                not self._algorithm.ranks_differ if forward_sync_buffers is None else forward_sync_buffers
            ),
            "autotune": autotune,
        }
        self._bagua_timeout = strategy_options.get("timeout")
        unknown = [name for name in _FOR_HOOKS_OF_TORCH if name in strategy_options]
        super().__init__(**strategy_options)
        unknown += getattr(self, "_ddp_kwargs", {})
        if unknown:
            raise TypeError(
                f"unknown keyword arguments: {', '.join(unknown)}; known ones are algorithm, backend, "
                f"{', '.join(self._engine_options)}, and those of DDPStrategy that are not for torch's DDP"
            )

    def _connect(self) -> None:
        """Connect all ranks, when torch's are."""
        if not is_initialized():
            init_process_group(backend=self._bagua_backend, timeout=self._bagua_timeout)
            self._connected = True
        elif not self._connected and self._bagua_backend not in {None, get_default_group().backend}:
            raise ConfigurationError(
                "ranks are connected already, in another way",
                argument="backend",
                expected=get_default_group().backend,
                seen=self._bagua_backend,
                advice="Leave it out, or call bagua.comm.destroy_process_group() first.",
            )

    def _wrapped(self, module: torch.nn.Module, optimizers: list[Any], precision: Any) -> DistributedDataParallel:
        self._check_optimizers(optimizers)
        return DistributedDataParallel(
            module,
            optimizers=optimizers,
            algorithm=self._algorithm,
            grad_scaler=getattr(precision, "scaler", None),
            **self._engine_options,
        )

    def _check_optimizers(self, optimizers: list[Any]) -> None:
        after_steps = any("stepped" in (one.at, one.until) for one in self._algorithm.every_exchange())
        needs_one = after_steps or self._algorithm.optimizer_class is not None
        if needs_one and len(optimizers) != 1:
            raise ConfigurationError(
                f"{self._algorithm!r} goes by the steps of one optimizer",
                argument="configure_optimizers, or fabric.setup(module, optimizer)",
                expected="one optimizer",
                seen=f"{len(optimizers)} optimizers",
                advice="Use an algorithm that exchanges gradients, as gradient_allreduce.",
            )

    def _differs_between_ranks(self) -> bool:
        return self._algorithm.ranks_differ

    # Talking to other ranks.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` reduced over all ranks; other objects stay as they are."""
        return sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked."""
        return all_gather_ddp_if_available(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``. By pickle, as Lightning does it: ranks of one training trust each other."""
        if not is_initialized():
            return obj
        return get_default_group().global_communicator.broadcast_object(obj, src, allow_pickle=True)

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        if is_initialized():
            get_default_group().global_communicator.barrier()


class _Names(list[str]):
    """Names of strategies. Lightning refuses others without naming any of ours, so asking for one of these does."""

    def __contains__(self, name: object) -> bool:
        known = super().__contains__(name)
        if not known and isinstance(name, str) and name.startswith("bagua_"):
            as_algorithm(name.removeprefix("bagua_"))
        return known


def register(strategies: Any, strategy: type[Any]) -> None:
    """Make ``strategy="bagua"`` and ``strategy="bagua_<algorithm>"`` known to a Trainer, or to Fabric.

    Args:
        strategies: the registry of Lightning.
        strategy: the class.
    """
    names: dict[str, dict[str, Any]] = {
        "bagua": {"algorithm": "gradient_allreduce"},
        **{f"bagua_{name}": {"algorithm": name} for name in registry},
        "bagua_find_unused_parameters_true": {"algorithm": "gradient_allreduce", "find_unused_parameters": True},
    }
    for name, options in names.items():
        if name not in strategies:
            strategies.register(name, strategy, description=f"bagua with {options['algorithm']}", **options)
    available = strategies.available_strategies
    strategies.available_strategies = lambda: _Names(available())
