"""Algorithms for the Trainer of Hugging Face Transformers, and what derives from it."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from bagua import observe
from bagua.algorithms import Algorithm, DistributedAlgorithm
from bagua.checks import install_command
from bagua.comm import is_initialized
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.integrations import _attached
from bagua.integrations.accelerate import check_in_place_of_ddp

__all__ = ["attach"]


def attach(trainer: Any, algorithm: Algorithm | DistributedAlgorithm | str, **options: Any) -> None:
    """Let ``trainer.train()`` go through ``with_bagua`` in place of torch's DDP: ``attach(trainer, "bytegrad")``.

    Called once, before ``train``, also for classes that derive from Trainer. Checkpoints of the Trainer then hold,
    beside its own files, one file for each rank: what the algorithm remembers, and where ranks have different
    weights, these and the state of the optimizer. ``train(resume_from_checkpoint=...)`` goes on from there, bit by
    bit. What the Trainer saves itself is rank 0's.

    Args:
        trainer: a ``transformers.Trainer``.
        algorithm: the name of what is exchanged, and when; or a declaration, which has its options already.
        options: options of an algorithm that is given by its name, and of ``with_bagua``.

    Raises:
        ConfigurationError: an option out of its range; or a Trainer that FSDP or DeepSpeed trains, or that has bagua
            already.
        InvalidTypeError: not a Trainer.
        UnsupportedAlgorithmException: there is no such algorithm.
    """
    module = _module_of_transformers()
    if not isinstance(trainer, module.Trainer):
        raise InvalidTypeError(
            "this is not a Trainer",
            argument="trainer",
            expected="a transformers.Trainer",
            seen=type(trainer).__name__,
            advice="For an accelerator there is bagua.integrations.accelerate.attach.",
        )
    if any(isinstance(callback, _Engine) for callback in trainer.callback_handler.callbacks):
        raise ConfigurationError(
            "this Trainer exchanges gradients through bagua already",
            argument="trainer",
            expected="one call of attach",
            seen="a second one",
            advice="Make a new Trainer.",
        )
    declared, options = _attached.declare(algorithm, options)
    check_in_place_of_ddp(trainer.accelerator)
    make_accelerator = trainer.create_accelerator_and_postprocess

    @functools.wraps(make_accelerator)
    def make_one_that_leaves_models_unwrapped() -> None:
        make_accelerator()
        _leave_unwrapped(trainer.accelerator)

    _leave_unwrapped(trainer.accelerator)
    # Each trial of a search for hyperparameters makes a new one.
    trainer.create_accelerator_and_postprocess = make_one_that_leaves_models_unwrapped
    # Transformers need not be installed where this module is imported.
    engine = type(_Engine.__name__, (_Engine, module.TrainerCallback), {})(trainer, declared, options)
    train = trainer.train

    @functools.wraps(train)
    def train_from(resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        engine.resumed = _folder(trainer, resume_from_checkpoint)  # Callbacks are not told.
        return train(resume_from_checkpoint, *arguments, **keywords)

    trainer.train = train_from
    trainer.add_callback(engine)
    # Before those that report: they all get the same dictionary.
    reporter = type(_Reporter.__name__, (_Reporter, module.TrainerCallback), {})()
    trainer.callback_handler.callbacks.insert(0, reporter)


def _leave_unwrapped(accelerator: Any) -> None:
    """Let Accelerate do everything to a model but wrap it."""
    accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)


def _module_of_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"bagua.integrations.transformers needs Transformers and Accelerate: {install_command('transformers')}"
        ) from error


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


class _Engine:
    """Puts the engine on the model for as long as the Trainer trains it; a file for each rank in each checkpoint."""

    def __init__(self, trainer: Any, algorithm: Algorithm, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._algorithm = algorithm
        self._options = options
        #: The checkpoint that training goes on from.
        self.resumed: Path | None = None
        self._wrapped: Any = None
        self._paused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - as in Transformers
        """Wrap the model: the Trainer has loaded it and its optimizer from the checkpoint, and prepared both."""
        scaler, model = getattr(self._trainer.accelerator, "scaler", None), self._trainer.model
        optimizer = self._trainer.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate puts its own around it.
        if self._wrapped is model:  # An attempt that ended with an error, as for lack of memory, left it.
            model.bagua_close()
        self._wrapped = model
        _attached.wrap(model, [optimizer], self._algorithm, scaler, self._options)
        self._paused = False
        folder, self.resumed = self.resumed, None
        if folder is not None:
            found = _attached.read_on_all_ranks(model, folder, args.process_index, args.world_size)
            _attached.restore(model, found[0] if found else {})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Averaging in the background goes on."""
        if self._paused:
            _attached.go_on(self._trainer.model)
        self._paused = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Before anything looks at the weights on some ranks only, all end what they owe each other."""
        if control.should_save or control.should_evaluate or control.should_training_stop:
            _attached.pause(self._trainer.model)
            self._paused = True

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Save what this rank remembers in the checkpoint that was just made."""
        if args.save_only_model:
            return
        # In a search for hyperparameters, each trial has a folder of its own.
        folder = Path(self._trainer._get_output_dir(self._trainer._trial))  # noqa: SLF001 - no public name says it
        folder /= f"checkpoint-{state.global_step}"
        _attached.write_own_file(folder, args.process_index, args.world_size, [_attached.collect(self._trainer.model)])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Take the engine off the model, which stays, with equal weights on all ranks."""
        self._trainer.model.bagua_finish()
        self._trainer.model.bagua_close()
