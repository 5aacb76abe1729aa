"""The Lightning strategy without its base class: ``lightning`` and ``pytorch_lightning`` each have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagua import observe
from bagua.comm import get_default_group
from bagua.integrations._lightning.batch_norm import SynchronizedBatchNorms
from bagua.integrations._lightning.ranks import KEY, RanksMixin
from bagua.integrations._pauses import finish, go_on, pause
from bagua.parallel import DistributedDataParallel


class StrategyMixin(RanksMixin):
    """What ``BaguaStrategy`` adds to Lightning's ``DDPStrategy``; see there."""

    # Of the base class, which is not known here.
    model: Any
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    precision_plugin: Any
    global_rank: int
    root_device: torch.device
    _layer_sync: Any

    _resumed: Mapping[str, Any] | None = None
    _own_optimizer_states: list[Any] | None = None
    _logged_step = 0

    # Start.

    def setup_distributed(self) -> None:
        """Connect all ranks, with torch's group first, which some parts of Lightning use."""
        super().setup_distributed()  # type: ignore[misc]
        self._connect()

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
        self.model = self._wrapped(self.lightning_module, self.optimizers, self.precision_plugin)
        if resumed is not None:
            self._go_on_from(resumed)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Tell the engine of a backward pass inside the forward pass, as manual optimization has it."""
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self.model._bagua_engine.after_forward(closure_loss)  # noqa: SLF001 - ours

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what communication costs, as often as Lightning logs."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
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
            finish(self.model)

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the plain module, after everything that is owed to it was exchanged."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.reducer.after_optimizers()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with what the algorithm remembers on each rank; and each rank's weights where they differ."""
        if isinstance(self.model, DistributedDataParallel) and "optimizer_states" in checkpoint:  # not weights alone
            own: dict[str, Any] = {"algorithm_state": self.model.bagua_state_dict()}
            if self._differs_between_ranks():
                own["weights"] = self.lightning_module.state_dict()
                own["optimizer_states"] = [optimizer.state_dict() for optimizer in self.optimizers]
            communicator = get_default_group().global_communicator
            everyone = communicator.gather_object(own, allow_pickle=True)
            checkpoint = {**checkpoint, KEY: {"algorithm": repr(self._algorithm), "ranks": everyone}}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights. What was a rank's own waits for ``setup``: the engine needs the buckets for it."""
        super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]
        self._resumed = checkpoint.get(KEY)
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
