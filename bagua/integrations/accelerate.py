"""Communication hooks for Hugging Face Accelerate, whose own list of them is closed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from bagua import env
from bagua.checks import install_command
from bagua.errors import ConfigurationError
from bagua.integrations.ddp_comm_hooks import codec_hook
from bagua.utilities.distributed import register_ddp_comm_hook

try:
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType
except ImportError as error:
    raise ImportError(f"bagua.integrations.accelerate needs Accelerate: {install_command('accelerate')}") from error

__all__ = ["CommHookKwargs", "use_comm_hook"]

Hook = Callable[..., Any]


@dataclasses.dataclass
class CommHookKwargs(DistributedDataParallelKwargs):
    """Accelerate's options of DDP with a hook that is not in its list; ``use_comm_hook`` makes one."""

    state: Any = None
    hook: Hook | None = None
    wrapper: Callable[[Hook], Hook] | None = None
    registered: bool = dataclasses.field(default=False, init=False)

    def to_dict(self, ignore_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """What torch's DDP takes."""
        plain = {field.name for field in dataclasses.fields(DistributedDataParallelKwargs)}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        ours = {"comm_hook", "comm_wrapper", "comm_state_option", *ignore_keys}
        return {name: value for name, value in values.items() if name in plain - ours}

    def register_comm_hook(self, model: Any) -> None:
        """Called by Accelerate when it has wrapped a model."""
        register_ddp_comm_hook(model, self.state, self.hook, self.wrapper)
        self.registered = True


def use_comm_hook(
    accelerator: Any, state: Any, hook: Hook = codec_hook, wrapper: Callable[[Hook], Hook] | None = None
) -> None:
    """Let the models that ``accelerator.prepare`` will wrap exchange gradients through ``hook``.

    Called before ``prepare``. Options of DDP that the accelerator was made with are kept. A ``UserWarning`` says if
    there is nothing to exchange, because there is one process, or if models were prepared already. In the first
    ``accelerator.backward`` it says if no model was prepared since.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        state: for example ``CodecState("minmax_uint8")``; one for each model.
        hook: communication hook of torch's DDP.
        wrapper: applied to the hook first, for example torch's ``fp16_compress_wrapper``.

    Raises:
        ConfigurationError: FSDP, DeepSpeed or Megatron trains the models, which knows no hooks.

    Example:
        >>> from accelerate import Accelerator
        >>> from bagua.integrations.ddp_comm_hooks import CodecState
        >>> accelerator = Accelerator(cpu=True)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # This is one process.
        ...     use_comm_hook(accelerator, CodecState("minmax_uint8"))
        >>> accelerator.ddp_handler.state
        CodecState(ScatterGatherReducer(codec=MinMaxUInt8(block_numel=2048, seed=None)))
    """
    check_takes_hooks(accelerator, "use_comm_hook")
    _warn_if_late(accelerator)
    before = accelerator.ddp_handler or DistributedDataParallelKwargs()
    options = {field.name: getattr(before, field.name) for field in dataclasses.fields(DistributedDataParallelKwargs)}
    # Set afterwards: Accelerator() finds its handlers by their exact class.
    accelerator.ddp_handler = handler = CommHookKwargs(**options, state=state, hook=hook, wrapper=wrapper)
    if accelerator.distributed_type != DistributedType.NO:
        _warn_if_unused(accelerator, handler)


def check_takes_hooks(accelerator: Any, asked_for: str) -> None:
    """Refuse what trains models without torch's DDP; warn if nothing trains them on several processes.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        asked_for: the function that was called.
    """
    kind, started = accelerator.distributed_type, env.get_world_size() or 1
    if kind == DistributedType.NO and started > 1:
        warnings.warn(
            f"{asked_for}: the launcher started {started} processes, but Accelerate takes this for the only one, so "
            "no gradients are exchanged. Without GPUs write Accelerator(cpu=True) or TrainingArguments(use_cpu=True)",
            stacklevel=3,
        )
    elif kind == DistributedType.NO:
        warnings.warn(
            f"{asked_for}: there is one process, so no gradients are exchanged. Start several with "
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


def _warn_if_unused(accelerator: Any, handler: CommHookKwargs) -> None:
    """Warn in the next backward pass if no model has taken the hook by then."""
    backward = accelerator.backward

    def first(*arguments: Any, **keywords: Any) -> None:
        if accelerator.backward is first:
            accelerator.backward = backward
        if not handler.registered:
            warnings.warn(
                "use_comm_hook: no model was prepared since, so none calls the hook; a model that DDP does not wrap "
                "exchanges no gradients at all. Call it before accelerator.prepare(model, ...)",
                stacklevel=2,
            )
        backward(*arguments, **keywords)

    accelerator.backward = first


def _warn_if_late(accelerator: Any) -> None:
    models = len(accelerator._models)  # noqa: SLF001 - there is no other way to ask
    if models and not isinstance(accelerator.ddp_handler, CommHookKwargs):
        warnings.warn(
            f"use_comm_hook: models were prepared already ({models}); these exchange gradients in full. Call it "
            "before accelerator.prepare",
            stacklevel=3,
        )
