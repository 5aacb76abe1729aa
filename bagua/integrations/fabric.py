"""``Fabric(strategy="bagua")`` for Lightning 2: importing this module registers the names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bagua.checks import install_command
from bagua.comm import get_default_group
from bagua.errors import ConfigurationError
from bagua.integrations._lightning import KEY, RanksMixin, register
from bagua.integrations._pauses import finish, go_on, pause
from bagua.parallel import DistributedDataParallel

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
except ImportError:
    try:
        from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    except ImportError as error:
        raise ImportError(f"bagua.integrations.fabric needs Lightning 2: {install_command('lightning')}") from error

__all__ = ["BaguaStrategy", "FabricStrategy"]


class _BackwardSyncControl:
    """What ``fabric.no_backward_sync(model)`` asks."""

    def no_backward_sync(self, module: DistributedDataParallel, enabled: bool) -> AbstractContextManager[None]:
        """Whether backward passes of forwards in this block only accumulate gradients."""
        return module.no_sync() if enabled else nullcontext()


class FabricStrategy(RanksMixin, DDPStrategy):
    """Trains what ``fabric.setup(model, optimizer)`` is given with an algorithm of bagua.

    ``fabric.no_backward_sync`` accumulates gradients. ``fabric.save`` also saves what the algorithm remembers on each
    rank of the models that are in the state, with weights and optimizers where ranks differ; ``fabric.load`` goes on
    from there. Another number of ranks goes on with what ranks have in common.

    Args:
        algorithm: or the name of one.
        backend: as for ``bagua.comm.init_process_group``; None chooses.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it is an error.
        forward_sync_buffers: take rank 0's buffers before each forward pass; None does so where the algorithm keeps
            weights equal.
        autotune: as for ``with_bagua``.
        strategy_options: options of Fabric's ``DDPStrategy``, except those for torch's DDP.

    Raises:
        UnsupportedAlgorithmException: there is no such algorithm.
        TypeError: an unknown keyword.
        ConfigurationError: ``setup`` gets several optimizers or none, and an algorithm that needs one.

    Example:
        >>> FabricStrategy("bytegrad").strategy_name
        'bagua'
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._backward_sync_control = _BackwardSyncControl()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._connect()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap a module without its optimizers, for algorithms that do not need them."""
        return self._wrapped(module, [], self.precision)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Wrap a module with its optimizers."""
        wrapped = self._wrapped(module, optimizers, self.precision)
        return wrapped, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` reduced over all ranks; other objects stay as they are."""
        return self.reduce(tensor, group, reduce_op)

    def settle(self, model: torch.nn.Module) -> None:
        """End what ranks owe each other: after training, and before an evaluation on some ranks only. Collective.

        Averages in the background end with equal weights; ``fabric.strategy.resume(model)`` lets them go on.

        Args:
            model: model that ``fabric.setup`` returned.
        """
        pause(_wrapper_of(model))

    def resume(self, model: torch.nn.Module) -> None:
        """Let averages in the background go on, after ``settle``. Collective.

        Args:
            model: model that ``fabric.setup`` returned.
        """
        go_on(_wrapper_of(model))

    def finish(self, model: torch.nn.Module) -> None:
        """Make one model of those of all ranks: the last call of training. Collective.

        Fabric does not tell a strategy when training ends; see ``EngineAccess.bagua_finish`` for what it does.

        Args:
            model: model that ``fabric.setup`` returned.
        """
        finish(_wrapper_of(model))

    # Checkpoints.

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """The state of the plain module, after everything that is owed to it was exchanged."""
        if not isinstance(module, DistributedDataParallel):
            return dict(super().get_module_state_dict(module))
        module.reducer.after_optimizers()
        return dict(module.module.state_dict())

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load into the plain module."""
        plain = module.module if isinstance(module, DistributedDataParallel) else module
        super().load_module_state_dict(plain, state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - as in Lightning
    ) -> None:
        """Save, with what the algorithm remembers on each rank; and each rank's weights where they differ."""
        if any(isinstance(part, DistributedDataParallel) for part in state.values()):
            communicator = get_default_group().global_communicator
            everyone = communicator.gather_object(self._own(state), allow_pickle=True)
            state = {**state, KEY: {"algorithm": repr(self._algorithm), "ranks": everyone}}
        super().save_checkpoint(path, state, storage_options, filter)

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank remembers of the parts of ``state``, by their names."""
        engines = {name: part for name, part in state.items() if isinstance(part, DistributedDataParallel)}
        own: dict[str, Any] = {"algorithm_state": {name: part.bagua_state_dict() for name, part in engines.items()}}
        if self._differs_between_ranks():
            optimizers = {name: part for name, part in state.items() if isinstance(part, torch.optim.Optimizer)}
            own["weights"] = {name: part.module.state_dict() for name, part in engines.items()}
            own["optimizers"] = {name: part.state_dict() for name, part in optimizers.items()}
        return own

    def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load, with what was a rank's own."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *arguments, **options)
        if state and isinstance(state, dict) and KEY in rest:
            self._go_on_from(rest.pop(KEY), state)
        return rest

    def _go_on_from(self, saved: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        ranks = saved["ranks"]
        fits = len(ranks) == get_default_group().size
        own = ranks[self.global_rank] if fits else {"algorithm_state": ranks[0]["algorithm_state"]}
        for name, weights in own.get("weights", {}).items():
            if name in state:
                state[name].module.load_state_dict(weights)
        for name, values in own.get("optimizers", {}).items():
            if name in state:
                state[name].load_state_dict(values)
        for name, remembered in own["algorithm_state"].items():
            if name in state:
                state[name].load_bagua_state_dict(remembered)


def _wrapper_of(model: torch.nn.Module) -> DistributedDataParallel:
    wrapped = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
    if wrapped is None:
        raise ConfigurationError(
            "this model does not go through bagua",
            argument="model",
            expected="what fabric.setup returned, with strategy='bagua'",
            seen=type(model).__name__,
        )
    return wrapped


#: The name that the strategy has in each of Lightning's packages.
BaguaStrategy = FabricStrategy

register(STRATEGY_REGISTRY, BaguaStrategy)
