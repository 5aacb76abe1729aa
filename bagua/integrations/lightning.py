"""``Trainer(strategy="bagua")`` for Lightning 2: importing this module registers the names.

For the package ``lightning``; where that is not installed, for ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagua import observe
from bagua.algorithms import Algorithm, DistributedAlgorithm, as_algorithm, registry
from bagua.checks import install_command
from bagua.comm import get_default_group, init_process_group, is_initialized
from bagua.errors import ConfigurationError
from bagua.integrations._attached import go_on, pause
from bagua.parallel import DistributedDataParallel
from bagua.utilities.distributed import all_gather_ddp_if_available, sync_ddp_if_available

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError:
    try:
        from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    except ImportError as error:
        raise ImportError(f"bagua.integrations.lightning needs Lightning 2: {install_command('lightning')}") from error

__all__ = ["BaguaStrategy"]


#: Where a checkpoint of Lightning holds what is ours.
KEY = "bagua"

#: What Lightning's classes take for torch's DDP, and would not use here.
_FOR_HOOKS_OF_TORCH = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class BaguaStrategy(DDPStrategy):
    """Trains a ``LightningModule`` with an algorithm of bagua, one process for each device.

    ``fit`` goes through the engine; ``validate``, ``test`` and ``predict`` run the plain module on each rank.
    Gradients are not exchanged while they are accumulated. Metrics logged with ``sync_dist=True`` are
    reduced on our communicator. Checkpoints hold what the algorithm remembers on each rank.
    ``AsyncModelAverage`` rests during validation, and ends with equal weights.

    Args:
        algorithm: or the name of one.
        backend: as for ``bagua.comm.init_process_group``; None chooses.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it is an error.
        forward_sync_buffers: take rank 0's buffers before each forward pass; None does so where the algorithm keeps
            weights equal.
        strategy_options: options of Lightning's ``DDPStrategy``, except those for torch's DDP: ``accelerator``,
            ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``,
            ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        UnsupportedAlgorithmException: there is no such algorithm.
        TypeError: an unknown keyword.
        ConfigurationError: when training begins: several optimizers, and an algorithm that needs one.

    Example:
        >>> BaguaStrategy("bytegrad").strategy_name
        'bagua'
    """

    strategy_name = "bagua"
    model: Any
    _resumed: Mapping[str, Any] | None = None
    _own_optimizer_states: list[Any] | None = None
    _logged_step = 0

    def __init__(
        self,
        algorithm: Algorithm | DistributedAlgorithm | str = "gradient_allreduce",
        *,
        backend: str | None = None,
        bucket_bytes: int | None = None,
        find_unused_parameters: bool = False,
        forward_sync_buffers: bool | None = None,
        **strategy_options: Any,
    ) -> None:
        self._algorithm = as_algorithm(algorithm)
        self._bagua_backend = backend
        self._connected = False
        if forward_sync_buffers is None:  # Where ranks train alone for many steps, buffers must not meet in each.
            forward_sync_buffers = not self._algorithm.ranks_differ
        self._engine_options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "find_unused_parameters": find_unused_parameters,
            "forward_sync_buffers": forward_sync_buffers,
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

    # Start.

    def setup_distributed(self) -> None:
        """Connect all ranks, with torch's group first, which some parts of Lightning use."""
        super().setup_distributed()
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

    def setup(self, trainer: Any) -> None:
        """Set everything up, then wrap the module for training."""
        super().setup(trainer)
        resumed, self._resumed = self._resumed, None
        if str(trainer.state.fn.value) != "fit":
            return
        after_steps = any("stepped" in (one.at, one.until) for one in self._algorithm.every_exchange())
        needs_one = after_steps or self._algorithm.optimizer_class is not None
        if needs_one and len(self.optimizers) != 1:
            raise ConfigurationError(
                f"{self._algorithm!r} goes by the steps of one optimizer",
                argument="configure_optimizers",
                expected="one optimizer",
                seen=f"{len(self.optimizers)} optimizers",
                advice="Use an algorithm that exchanges gradients, as gradient_allreduce.",
            )
        scaler = getattr(self.precision_plugin, "scaler", None)
        how = {"algorithm": self._algorithm, "grad_scaler": scaler, **self._engine_options}
        self.model = DistributedDataParallel(self.lightning_module, optimizers=self.optimizers, **how)
        if resumed is not None:
            ranks = resumed["ranks"]
            fits = len(ranks) == get_default_group().size
            own = ranks[self.global_rank] if fits else {"algorithm_state": ranks[0]["algorithm_state"]}
            if "weights" in own:
                self.lightning_module.load_state_dict(own["weights"], strict=self.lightning_module.strict_loading)
            self._own_optimizer_states = own.get("optimizer_states")
            self.model.bagua_load_state_dict(own["algorithm_state"])

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Tell the engine of a backward pass inside the forward pass, as manual optimization has it."""
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self.model._bagua_engine.after_forward(closure_loss)  # noqa: SLF001 - ours

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what communication costs, as often as Lightning logs."""
        super().on_train_batch_start(batch, batch_idx)
        trainer = self.lightning_module.trainer
        step, every = trainer.global_step, trainer.log_every_n_steps
        if trainer.loggers and every and step and step % every == 0 and step != self._logged_step:
            self._logged_step = step
            for logger in trainer.loggers:
                logger.log_metrics(observe.metrics(), step=step)

    # Training with averages in the background.

    # Lightning evaluates in inference mode, where no tensor may be made that training needs later.

    @torch.inference_mode(False)
    def on_validation_start(self) -> None:
        """Ranks end what they owe each other before they evaluate their weights."""
        if isinstance(self.model, DistributedDataParallel):
            pause(self.model)

    @torch.inference_mode(False)
    def on_validation_end(self) -> None:
        """Averaging goes on."""
        if isinstance(self.model, DistributedDataParallel):
            go_on(self.model)

    def on_train_end(self) -> None:
        """Ranks end with equal weights, whatever the algorithm."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.bagua_finish()

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the plain module, after everything that is owed to it was exchanged."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.reducer.after_optimizers()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with what the algorithm remembers on each rank; and each rank's weights where they differ."""
        if isinstance(self.model, DistributedDataParallel) and "optimizer_states" in checkpoint:  # not weights alone
            own: dict[str, Any] = {"algorithm_state": self.model.bagua_state_dict()}
            if self._algorithm.ranks_differ:
                own["weights"] = self.lightning_module.state_dict()
                own["optimizer_states"] = [optimizer.state_dict() for optimizer in self.optimizers]
            communicator = get_default_group().global_communicator
            everyone = communicator.gather_object(own, allow_pickle=True)
            checkpoint = {**checkpoint, KEY: {"algorithm": repr(self._algorithm), "ranks": everyone}}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights. What was a rank's own waits for ``setup``: the engine needs the buckets for it."""
        super().load_model_state_dict(checkpoint, strict=strict)
        self._resumed = checkpoint.get(KEY)
        self._own_optimizer_states = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, each rank its own where they differ."""
        if self._own_optimizer_states is not None:
            checkpoint = {**checkpoint, "optimizer_states": self._own_optimizer_states}
        super().load_optimizer_state_dict(checkpoint)

    # The end.

    def teardown(self) -> None:
        """Take the engine off the module."""
        wrapped = self.model
        if isinstance(wrapped, DistributedDataParallel):
            self.model = self.lightning_module
            wrapped.bagua_close()
        super().teardown()

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
    """Make ``strategy="bagua"`` and ``strategy="bagua_<algorithm>"`` known to a Trainer.

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


register(StrategyRegistry, BaguaStrategy)
