"""Algorithms for Hugging Face Accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bagua import env
from bagua.algorithms import Algorithm, DistributedAlgorithm
from bagua.checks import install_command
from bagua.errors import ConfigurationError
from bagua.integrations._attached import collect, declare, read_on_all_ranks, restore, wrap, write_own_file
from bagua.parallel import BaguaModule

try:
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(f"bagua.integrations.accelerate needs Accelerate: {install_command('accelerate')}") from error

__all__ = ["attach"]


def attach(accelerator: Any, algorithm: Algorithm | DistributedAlgorithm | str, **options: Any) -> None:
    """Let the models that ``accelerator.prepare`` will be given go through ``with_bagua`` in place of torch's DDP.

    Called once, before ``prepare``, which gets a model together with its optimizers, or after them. The model stays
    the same object, and has ``bagua_finish()`` for the end of training. ``accelerator.save_state`` then saves a file
    for each rank beside its own: what the algorithm remembers, with weights and optimizers where ranks have different
    ones. ``accelerator.load_state`` goes on from there, bit by bit. All ranks call both.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        algorithm: the name of what is exchanged, and when; or a declaration, which has its options already.
        options: options of an algorithm that is given by its name, and of ``with_bagua``.

    Raises:
        ConfigurationError: FSDP, DeepSpeed or Megatron trains the models; models were prepared already; a second call;
            or, in ``prepare``, a model without an optimizer.
        UnsupportedAlgorithmException: there is no such algorithm.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # This is one process.
        ...     attach(accelerator, "diloco", sync_every=50)
        >>> layer = torch.nn.Linear(2, 2)
        >>> model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> model.bagua_algorithm.options.sync_every
        50
    """
    declared, options = declare(algorithm, options)
    if "prepare" in vars(accelerator) or accelerator._models:  # noqa: SLF001 - there is no other way to ask
        raise ConfigurationError(
            "this accelerator was attached already, or has prepared models",
            argument="accelerator",
            expected="a new one",
            seen=f"{len(accelerator._models)} models",  # noqa: SLF001
            advice="Call attach once, before accelerator.prepare.",
        )
    check_in_place_of_ddp(accelerator)
    _Attached(accelerator, declared, options)


class _Attached:
    """What an accelerator does otherwise, once an algorithm is attached to it."""

    def __init__(self, accelerator: Any, algorithm: Algorithm, options: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._algorithm = algorithm
        self._options = options
        self._folder: Path | None = None
        self._preparing = False
        self._prepare, self._prepare_model = accelerator.prepare, accelerator.prepare_model
        self._load_state = accelerator.load_state
        accelerator.prepare, accelerator.prepare_model = self.prepare, self.prepare_model
        accelerator.load_state = self.load_state
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.note_folder)

    def prepare(self, *parts: Any, **keywords: Any) -> Any:
        """As in Accelerate; then put the engine on the models."""
        self._preparing = True
        try:
            prepared = self._prepare(*parts, **keywords)
        finally:
            self._preparing = False
        for part in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(part, torch.nn.Module) and not isinstance(part, BaguaModule):
                self._wrap(part)
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As in Accelerate, which calls this for each model: everything but wrapping it in torch's DDP."""
        prepared: torch.nn.Module = self._prepare_model(model, device_placement, evaluation_mode=True)
        if not (self._preparing or evaluation_mode or isinstance(prepared, BaguaModule)):
            self._wrap(prepared)
        return prepared

    def _wrap(self, model: torch.nn.Module) -> None:
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if not trained:
            return
        prepared = (one.optimizer for one in self._accelerator._optimizers)  # noqa: SLF001 - there is no other way
        optimizers = [one for one in prepared if not trained.isdisjoint(_parameters_of(one))]
        if not optimizers:
            raise ConfigurationError(
                "a model was prepared without the optimizer that steps it",
                argument="accelerator.prepare",
                expected="a model together with its optimizer, or after it",
                seen=type(model).__name__,
                advice="Write prepare(model, optimizer, ...); a model that is not trained needs no prepare.",
            )
        wrap(model, optimizers, self._algorithm, self._accelerator.scaler, self._options)

    def save(self, models: list[torch.nn.Module], _: list[Any], folder: str) -> None:
        """Save what this rank remembers in the checkpoint that is being made."""
        here = self._accelerator
        own = [collect(model) for model in _ours(models)]
        write_own_file(Path(folder), here.process_index, here.num_processes, own)

    def note_folder(self, _: list[torch.nn.Module], folder: str) -> None:
        """Note the checkpoint that Accelerate has chosen."""
        self._folder = Path(folder)

    def load_state(self, *arguments: Any, **keywords: Any) -> None:
        """As in Accelerate, which loads rank 0's weights and optimizers; then go on from what was this rank's."""
        self._load_state(*arguments, **keywords)
        here = self._accelerator
        assert self._folder is not None
        models = _ours(here._models)  # noqa: SLF001 - there is no other way to ask
        if not models:
            return
        saved = read_on_all_ranks(models[0], self._folder, here.process_index, here.num_processes)
        for model, own in zip(models, saved, strict=False):  # As Accelerate does it with its own files.
            restore(model, own)


def _ours(models: Iterable[torch.nn.Module]) -> list[BaguaModule]:
    return [model for model in models if isinstance(model, BaguaModule)]


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_in_place_of_ddp(accelerator: Any) -> None:
    """Refuse an ``Accelerator`` that trains models without torch's DDP; warn if one process trains them."""
    kind, started = accelerator.distributed_type, env.get_world_size() or 1
    if kind == DistributedType.NO and started > 1:
        warnings.warn(
            f"attach: the launcher started {started} processes, but Accelerate takes this for the only one, so "
            "no gradients are exchanged. Without GPUs write Accelerator(cpu=True) or TrainingArguments(use_cpu=True)",
            stacklevel=3,
        )
    elif kind == DistributedType.NO:
        warnings.warn(
            "attach: there is one process, so no gradients are exchanged. Start several with "
            "`torchrun --nproc_per_node N`: `accelerate launch --cpu` starts one, whatever its --num_processes says",
            stacklevel=3,
        )
    elif not kind.value.startswith("MULTI_"):
        raise ConfigurationError(
            f"{kind.value} exchanges gradients in its own way",
            argument="accelerator",
            expected="one whose models torch's DistributedDataParallel trains",
            seen=f"distributed_type {kind.value}",
            advice="Leave out its plugin; or, for a model that fully_shard was applied to, use "
            "bagua.integrations.ddp_comm_hooks.register_fsdp_hook.",
        )
