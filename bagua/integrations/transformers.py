"""Algorithms and communication hooks for the Trainer of Hugging Face Transformers, and what derives from it."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bagua import observe
from bagua.algorithms import Algorithm, DistributedAlgorithm, as_algorithm
from bagua.checks import install_command
from bagua.comm import is_initialized
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.integrations._attached import (
    collect,
    declare,
    go_on,
    pause,
    read_on_all_ranks,
    read_own_file,
    restore,
    wrap,
    write_own_file,
)
from bagua.integrations._hook_state import HookState
from bagua.integrations.accelerate import check_takes_hooks
from bagua.integrations.ddp_comm_hooks import codec_hook
from bagua.utilities import register_ddp_comm_hook

__all__ = ["attach", "use_bagua", "use_comm_hook"]

DDP = torch.nn.parallel.DistributedDataParallel
Hook = Callable[..., Any]


def use_bagua(trainer: Any, algorithm: Algorithm | DistributedAlgorithm | str, **options: Any) -> None:
    """Let ``trainer.train()`` go through ``with_bagua`` in place of torch's DDP.

    Called once, before ``train``, also for classes that derive from Trainer. Checkpoints of the Trainer then hold,
    beside its own files, one file for each rank: what the algorithm remembers, and where ranks have different
    weights, these and the state of the optimizer. ``train(resume_from_checkpoint=...)`` goes on from there, bit by
    bit. What the Trainer saves itself is rank 0's.

    Args:
        trainer: a ``transformers.Trainer``.
        algorithm: algorithm that says what is exchanged, and when; or the name of it.
        options: options of ``with_bagua``.

    Raises:
        ConfigurationError: not a Trainer; or one that FSDP or DeepSpeed trains, or that has bagua already.
        UnsupportedAlgorithmException: there is no such algorithm.
    """
    _check_trainer(trainer)
    algorithm = as_algorithm(algorithm)
    check_takes_hooks(trainer.accelerator, "use_bagua")
    make_accelerator = trainer.create_accelerator_and_postprocess

    @functools.wraps(make_accelerator)
    def make_one_that_leaves_models_unwrapped() -> None:
        make_accelerator()
        _leave_unwrapped(trainer.accelerator)

    _leave_unwrapped(trainer.accelerator)
    # Each trial of a search for hyperparameters makes a new one.
    trainer.create_accelerator_and_postprocess = make_one_that_leaves_models_unwrapped
    _attach(trainer, _Engine, algorithm, options)


def _leave_unwrapped(accelerator: Any) -> None:
    """Let Accelerate do everything to a model but wrap it."""
    accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)


def attach(trainer: Any, algorithm: Algorithm | DistributedAlgorithm | str, **options: Any) -> None:
    """``use_bagua`` with an algorithm by its name, and its options: ``attach(trainer, "diloco", sync_every=50)``.

    Args:
        trainer: a ``transformers.Trainer``.
        algorithm: the name of what is exchanged, and when; or a declaration, which has its options already.
        options: options of the algorithm, and of ``with_bagua``.

    Raises:
        ConfigurationError: as for ``use_bagua``; or an option out of its range.
        UnsupportedAlgorithmException: there is no such algorithm.
    """
    declared, options = declare(algorithm, options)
    use_bagua(trainer, declared, **options)


def use_comm_hook(
    trainer: Any, state: Any, hook: Hook = codec_hook, wrapper: Callable[[Hook], Hook] | None = None
) -> None:
    """Let the model that ``trainer`` wraps in torch's DDP exchange gradients through ``hook``.

    Called once, before ``train``. Checkpoints of the Trainer then hold what one of our states remembers on each rank,
    and ``train(resume_from_checkpoint=...)`` goes on from there, up to what DDP changes by forming its buckets anew.

    Args:
        trainer: a ``transformers.Trainer``.
        state: for example ``CodecState("minmax_uint8")``.
        hook: communication hook of torch's DDP.
        wrapper: applied to the hook first, for example torch's ``fp16_compress_wrapper``.

    Raises:
        ConfigurationError: not a Trainer; or one that FSDP or DeepSpeed trains, or that has bagua already.
    """
    _check_trainer(trainer)
    check_takes_hooks(trainer.accelerator, "use_comm_hook")
    _attach(trainer, _Hook, state, hook, wrapper)


def _module_of_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"bagua.integrations.transformers needs Transformers and Accelerate: {install_command('transformers')}"
        ) from error


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, _module_of_transformers().Trainer):
        raise InvalidTypeError(
            "this is not a Trainer",
            argument="trainer",
            expected="a transformers.Trainer",
            seen=type(trainer).__name__,
            advice="For an accelerator there is bagua.integrations.accelerate.use_comm_hook.",
        )
    if any(isinstance(callback, _Exchange) for callback in trainer.callback_handler.callbacks):
        raise ConfigurationError(
            "this Trainer exchanges gradients through bagua already",
            argument="trainer",
            expected="one call of use_bagua or use_comm_hook",
            seen="a second one",
            advice="Make a new Trainer.",
        )


def _attach(trainer: Any, kind: type[_Exchange], *arguments: Any) -> None:
    """Have the Trainer call an exchange, and tell it which checkpoint it goes on from: callbacks are not told."""
    # Transformers need not be installed where this module is imported.
    callback = type(kind.__name__, (kind, _module_of_transformers().TrainerCallback), {})(trainer, *arguments)
    train = trainer.train

    @functools.wraps(train)
    def train_from(resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        callback.resumed = _folder(trainer, resume_from_checkpoint)
        return train(resume_from_checkpoint, *arguments, **keywords)

    trainer.train = train_from
    trainer.add_callback(callback)
    # Before those that report: they all get the same dictionary.
    reporter = type(_Reporter.__name__, (_Reporter, _module_of_transformers().TrainerCallback), {})()
    trainer.callback_handler.callbacks.insert(0, reporter)


class _Reporter:
    """Adds what communication costs to what a Trainer reports while it trains."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        if logs is not None and "loss" in logs and is_initialized():
            logs.update(observe.metrics())


def _folder(trainer: Any, resume_from_checkpoint: str | bool | None) -> Path | None:
    """The checkpoint that training goes on from."""
    if resume_from_checkpoint is not True:
        return Path(resume_from_checkpoint) if resume_from_checkpoint else None
    last = importlib.import_module("transformers.trainer_utils").get_last_checkpoint(trainer.args.output_dir)
    return Path(last) if last else None


class _Exchange(ABC):
    """What both ways have in common: a file for each rank in each checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.resumed: Path | None = None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - as in Transformers
        """Save what this rank remembers in the checkpoint that was just made."""
        if args.save_only_model or (saved := self.collect()) is None:
            return
        # In a search for hyperparameters, each trial has a folder of its own.
        folder = Path(self.trainer._get_output_dir(self.trainer._trial))  # noqa: SLF001 - no public name says it
        folder /= f"checkpoint-{state.global_step}"
        write_own_file(folder, args.process_index, args.world_size, [saved])

    @abstractmethod
    def collect(self) -> dict[str, Any] | None:
        """What this rank remembers, as ``remembered``; None if nothing is."""


class _Hook(_Exchange):
    """Registers a communication hook when DDP is there."""

    def __init__(self, trainer: Any, state: Any, hook: Hook, wrapper: Callable[[Hook], Hook] | None) -> None:
        super().__init__(trainer)
        self._state = state
        self._hook = hook
        self._wrapper = wrapper
        self._hooked: torch.nn.Module | None = None
        self._model: torch.nn.Module | None = None

    def saved(self, args: Any) -> dict[str, Any]:
        """What this rank saved in the checkpoint that training goes on from."""
        folder, self.resumed = self.resumed, None
        found = [] if folder is None else read_own_file(folder, args.process_index, args.world_size)
        return found[0] if found else {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Register the hook, and go on from a checkpoint."""
        wrapped = next((part for part in self.trainer.model_wrapped.modules() if isinstance(part, DDP)), None)
        saved = self.saved(args)
        if wrapped is None:
            return  # one process, which was warned of
        if wrapped is not self._hooked:
            if self._model not in {None, self.trainer.model} and isinstance(self._state, HookState):
                self._state.forget()
            self._model = self.trainer.model
            register_ddp_comm_hook(wrapped, self._state, self._hook, self._wrapper)
            self._hooked = wrapped
        if isinstance(self._state, HookState) and "remembered" in saved:
            self._state.load_state_dict(saved["remembered"], self.trainer.model)

    def collect(self) -> dict[str, Any] | None:
        """The state of the hook, if it is one of ours."""
        if self._hooked is None or not isinstance(self._state, HookState):
            return None
        return {"remembered": self._state.state_dict(self.trainer.model)}


class _Engine(_Exchange):
    """Puts the engine on the model for as long as the Trainer trains it."""

    def __init__(self, trainer: Any, algorithm: Algorithm, options: dict[str, Any]) -> None:
        super().__init__(trainer)
        self._algorithm = algorithm
        self._options = options
        self._wrapped: Any = None
        self._paused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Wrap the model: the Trainer has loaded it and its optimizer from the checkpoint, and prepared both."""
        scaler, model = getattr(self.trainer.accelerator, "scaler", None), self.trainer.model
        optimizer = self.trainer.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate puts its own around it.
        if self._wrapped is model:  # An attempt that ended with an error, as for lack of memory, left it.
            model.bagua_close()
        self._wrapped = model
        wrap(model, [optimizer], self._algorithm, scaler, self._options)
        self._paused = False
        folder, self.resumed = self.resumed, None
        if folder is not None:
            found = read_on_all_ranks(model, folder, args.process_index, args.world_size)
            restore(model, found[0] if found else {})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Averaging in the background goes on."""
        if self._paused:
            go_on(self.trainer.model)
        self._paused = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Before anything looks at the weights on some ranks only, all end what they owe each other."""
        if control.should_save or control.should_evaluate or control.should_training_stop:
            pause(self.trainer.model)
            self._paused = True

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Take the engine off the model, which stays, with equal weights on all ranks."""
        self.trainer.model.bagua_finish()
        self.trainer.model.bagua_close()

    def collect(self) -> dict[str, Any]:
        """What the algorithm remembers; with weights and optimizer where ranks differ."""
        return collect(self.trainer.model)
