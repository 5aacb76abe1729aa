"""The Lightning strategy without its base class: ``lightning`` and ``pytorch_lightning`` each have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithmImpl, DistributedAlgorithm, as_algorithm, registry
from bagua.comm import get_default_group, init_process_group, is_initialized
from bagua.engine.autotune.settings import AutotuneSettings
from bagua.errors import ConfigurationError
from bagua.integrations._batch_norm import SynchronizedBatchNorms
from bagua.parallel import DistributedDataParallel
from bagua.utilities.distributed import all_gather_ddp_if_available, sync_ddp_if_available

__all__ = ["StrategyMixin", "register"]

#: Where a checkpoint of Lightning holds what is ours.
_KEY = "bagua"

#: What Lightning's class takes for torch's DDP, and would not use here.
_FOR_HOOKS_OF_TORCH = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class StrategyMixin:
    """What ``BaguaStrategy`` adds to Lightning's ``DDPStrategy``; see there."""

    strategy_name = "bagua"

    # Of the base class, which is not known here.
    model: Any
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    precision_plugin: Any
    global_rank: int
    root_device: torch.device
    _layer_sync: Any

    def __init__(
        self,
        algorithm: Algorithm | DistributedAlgorithm | str = "gradient_allreduce",
        *,
        backend: str | None = None,
        bucket_bytes: int | None = None,
        find_unused_parameters: bool = False,
        forward_sync_buffers: bool = True,
        autotune: bool | AutotuneSettings | None = None,
        **strategy_options: Any,
    ) -> None:
        self._algorithm = as_algorithm(algorithm)
        self._bagua_backend = backend
        self._connected = False
        self._engine_options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "find_unused_parameters": find_unused_parameters,
            "forward_sync_buffers": forward_sync_buffers,
            "autotune": autotune,
        }
        self._bagua_timeout = strategy_options.get("timeout")
        self._resumed: Mapping[str, Any] | None = None
        self._own_optimizer_states: list[Any] | None = None
        unknown = [name for name in _FOR_HOOKS_OF_TORCH if name in strategy_options]
        super().__init__(**strategy_options)
        unknown += getattr(self, "_ddp_kwargs", {})
        if unknown:
            raise TypeError(
                f"unknown keyword arguments: {', '.join(unknown)}; known ones are algorithm, backend, "
                f"{', '.join(self._engine_options)}, and those of DDPStrategy that are not for torch's DDP"
            )

    # Start.

    def setup_distributed(self) -> None:
        """Connect all ranks, with torch's group first, which some parts of Lightning use."""
        super().setup_distributed()  # type: ignore[misc]
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

    def configure_ddp(self) -> None:
        """Nothing yet: the engine needs the optimizers, which Lightning makes after this."""
        return

    def setup(self, trainer: Any) -> None:
        """Set everything up, then wrap the module for training."""
        if self._layer_sync is not None and self.root_device.type == "cpu":
            self._layer_sync = SynchronizedBatchNorms()  # Torch's layer, which Lightning takes, is for GPUs.
        super().setup(trainer)  # type: ignore[misc]
        resumed, self._resumed = self._resumed, None
        if str(trainer.state.fn.value) != "fit":
            return
        self._check_optimizers()
        self.model = DistributedDataParallel(
            self.lightning_module,
            optimizers=self.optimizers,
            algorithm=self._algorithm,
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
            **self._engine_options,
        )
        if resumed is not None:
            self._go_on_from(resumed)

    def _check_optimizers(self) -> None:
        traits = self._algorithm.implementation.traits
        needs_one = traits.after_optimizer or traits.owns_optimizers or self._algorithm.optimizer_class is not None
        if needs_one and len(self.optimizers) != 1:
            raise ConfigurationError(
                f"{self._algorithm!r} goes by the steps of one optimizer",
                argument="configure_optimizers",
                expected="one optimizer",
                seen=f"{len(self.optimizers)} optimizers",
                advice="Use an algorithm that exchanges gradients, as gradient_allreduce.",
            )

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Tell the engine of a backward pass inside the forward pass, as manual optimization has it."""
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self.model._bagua_engine.after_forward(closure_loss)  # noqa: SLF001 - ours

    # Talking to other ranks.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` reduced over all ranks; what is no tensor stays as it is."""
        return sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked."""
        return all_gather_ddp_if_available(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``. By pickle, as Lightning does it: ranks of a Trainer trust each other."""
        if not is_initialized():
            return obj
        return get_default_group().global_communicator.broadcast_object(obj, src, allow_pickle=True)

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        if is_initialized():
            get_default_group().global_communicator.barrier()

    # Training with averages in the background.

    def _averaging(self) -> AsyncModelAverageAlgorithmImpl | None:
        bound = self.model.bagua_algorithm if isinstance(self.model, DistributedDataParallel) else None
        return bound if isinstance(bound, AsyncModelAverageAlgorithmImpl) else None

    # Lightning evaluates in inference mode, where no tensor may be made that training needs later.

    @torch.inference_mode(False)
    def on_validation_start(self) -> None:
        """Ranks end what they owe each other before they evaluate their weights."""
        self._settle()
        if averaging := self._averaging():
            averaging.abort(self.model)

    @torch.inference_mode(False)
    def on_validation_end(self) -> None:
        """Averaging goes on."""
        if averaging := self._averaging():
            averaging.resume(self.model)

    def on_train_end(self) -> None:
        """Ranks end what they owe each other; averages in the background end with equal weights."""
        self._settle()
        if averaging := self._averaging():
            averaging.abort(self.model)

    def _settle(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.reducer.after_optimizers()

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the plain module, after everything that is owed to it was exchanged."""
        self._settle()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with what the algorithm remembers on each rank; and each rank's weights where they differ."""
        if isinstance(self.model, DistributedDataParallel) and not self._weights_only(checkpoint):
            own: dict[str, Any] = {"algorithm_state": self.model.bagua_state_dict()}
            if self._differs_between_ranks():
                own["weights"] = self.lightning_module.state_dict()
                own["optimizer_states"] = [optimizer.state_dict() for optimizer in self.optimizers]
            communicator = get_default_group().global_communicator
            everyone = communicator.gather_object(own, allow_pickle=True)
            checkpoint = {**checkpoint, _KEY: {"algorithm": repr(self._algorithm), "ranks": everyone}}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    @staticmethod
    def _weights_only(checkpoint: Mapping[str, Any]) -> bool:
        return "optimizer_states" not in checkpoint

    def _differs_between_ranks(self) -> bool:
        return self._algorithm.implementation.traits.result == "consensus"

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights. What was a rank's own waits for ``setup``: the engine needs the buckets for it."""
        super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]
        self._resumed = checkpoint.get(_KEY)
        self._own_optimizer_states = None

    def _go_on_from(self, saved: Mapping[str, Any]) -> None:
        """Give this rank what it had; with another number of ranks, what all had in common."""
        ranks = saved["ranks"]
        fits = len(ranks) == get_default_group().size
        own = ranks[self.global_rank] if fits else {"algorithm_state": ranks[0]["algorithm_state"]}
        if "weights" in own:
            self.lightning_module.load_state_dict(own["weights"], strict=self.lightning_module.strict_loading)
        self._own_optimizer_states = own.get("optimizer_states")
        self.model.load_bagua_state_dict(own["algorithm_state"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, each rank its own where they differ."""
        if self._own_optimizer_states is not None:
            checkpoint = {**checkpoint, "optimizer_states": self._own_optimizer_states}
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    # The end.

    def teardown(self) -> None:
        """Take the engine off the module."""
        wrapped = self.model
        if isinstance(wrapped, DistributedDataParallel):
            self.model = self.lightning_module
            wrapped.bagua_close()
        super().teardown()  # type: ignore[misc]


class _Names(list[str]):
    """Names of strategies. Lightning refuses others without naming any of ours, so asking for one of these does."""

    def __contains__(self, name: object) -> bool:
        known = super().__contains__(name)
        if not known and isinstance(name, str) and name.startswith("bagua_"):
            as_algorithm(name.removeprefix("bagua_"))
        return known


def register(strategies: Any, strategy: type[Any]) -> None:
    """Make ``strategy="bagua"`` and ``strategy="bagua_<algorithm>"`` known to a Trainer.

    Args:
        strategies: the registry of Lightning.
        strategy: the class.
    """
    names = {"bagua": "gradient_allreduce", **{f"bagua_{name}": name for name in registry}}
    for name, algorithm in names.items():
        if name not in strategies:
            strategies.register(name, strategy, description=f"bagua with {algorithm}", algorithm=algorithm)
    available = strategies.available_strategies
    strategies.available_strategies = lambda: _Names(available())
