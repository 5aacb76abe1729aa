"""Codecs and reducers as communication hooks of torch's ``DistributedDataParallel``, and of FSDP2.

One line for an existing script: ``model.register_comm_hook(CodecState("minmax_uint8"), codec_hook)``.
"""

# Annotations are not strings here: torch compares those of a hook with its own types.
import functools
from collections.abc import Hashable
from typing import Any

import torch

from bagua.algorithms import (
    Algorithm,
    DistributedAlgorithm,
    Every,
    Exchange,
    Gradients,
    Mean,
    Model,
    Replace,
    Sum,
    as_algorithm,
)
from bagua.checks import check_kind, check_whole
from bagua.comm import GradBucket
from bagua.compression import Codec, TopK
from bagua.errors import ConfigurationError
from bagua.integrations._hook_state import HookState
from bagua.integrations._sharded import refuse_shared_mesh, sharded_parts
from bagua.primitives import AllGatherReducer, ErrorFeedback, PowerSGDReducer, ScatterGatherReducer, SumReducer

__all__ = [
    "AlgorithmState",
    "CodecState",
    "HookState",
    "PowerSGDState",
    "ReducerState",
    "TopKState",
    "codec_hook",
    "register_fsdp_hook",
]


class ReducerState(HookState):
    """What ``codec_hook`` exchanges gradients with, and what it remembers. One for each model.

    Ranks are connected when the first bucket is exchanged, on connections of this state's own. Buckets are
    exchanged one after the other in a background thread (on CUDA, on a stream), in the order in which DDP
    hands them over, which is the same on all ranks; meanwhile the backward pass goes on.

    Args:
        reducer: any reducer of ``bagua.primitives``, with ``ErrorFeedback`` or without.
        process_group: the ranks of the model, a group of ``bagua.comm`` or of ``torch.distributed``; None
            means all. If only ``torch.distributed`` is initialized, its group of all ranks is joined.
        average: divide by the number of ranks, as DDP does.
        hierarchical: sum inside each host in full precision, and use the reducer between hosts.
        warmup_steps: sum exactly in so many steps at the beginning.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.

    Attributes:
        step: backward passes whose gradients were exchanged.

    Raises:
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> ReducerState(ErrorFeedback(PowerSGDReducer(matrix_rank=2)))
        ReducerState(ErrorFeedback(reducer=PowerSGDReducer(matrix_rank=2, seed=0), decay=1.0))
    """

    def __init__(
        self,
        reducer: SumReducer,
        process_group: Any = None,
        *,
        average: bool = True,
        hierarchical: bool = False,
        warmup_steps: int = 0,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        check_kind(SumReducer, "a SumReducer of bagua.primitives", reducer=reducer)
        check_whole(0, warmup_steps=warmup_steps)
        super().__init__(process_group, grad_scaler)
        kind = Mean if average else Sum
        self.reducer, self.name = reducer, repr(reducer)
        self._exact, self._reduced = kind(None, hierarchical), kind(reducer, hierarchical)
        self._warmup_steps = warmup_steps

    def sum_at(self, step: int) -> Sum:
        """Exactly in the warm-up."""
        return self._exact if step < self._warmup_steps else self._reduced


class CodecState(ReducerState):
    """Gradients travel compressed, twice: scatter-gather, as in the algorithm ``bytegrad``.

    Args:
        codec: or the name of one, with default options.
        process_group: see ``ReducerState``, as are ``options``.
        error_feedback: add what was lost in one step to the gradients of the next one.
        options: ``average``, ``hierarchical``, ``warmup_steps``, ``grad_scaler``.

    Example:
        >>> CodecState("minmax_uint8")
        CodecState(ScatterGatherReducer(codec=MinMaxUInt8(block_numel=2048, seed=None)))
    """

    def __init__(
        self, codec: Codec | str, process_group: Any = None, *, error_feedback: bool = False, **options: Any
    ) -> None:
        reducer: SumReducer = ScatterGatherReducer(Codec.init(codec) if isinstance(codec, str) else codec)
        super().__init__(ErrorFeedback(reducer) if error_feedback else reducer, process_group, **options)


class TopKState(ReducerState):
    """Only the largest elements travel; the others wait in a residual.

    Args:
        ratio: part of the elements that is sent.
        process_group: see ``ReducerState``, as are ``options``.
        options: ``average``, ``hierarchical``, ``warmup_steps``, ``grad_scaler``.

    Example:
        >>> TopKState(0.05)
        TopKState(ErrorFeedback(reducer=AllGatherReducer(codec=TopK(ratio=0.05)), decay=1.0))
    """

    def __init__(self, ratio: float = 0.01, process_group: Any = None, **options: Any) -> None:
        super().__init__(ErrorFeedback(AllGatherReducer(TopK(ratio))), process_group, **options)


class PowerSGDState(ReducerState):
    """Matrices travel as products of two thin ones, with error feedback, as in the algorithm ``power_sgd``.

    Unlike torch's hook of this name it may have several buckets under way on every backend.

    Args:
        matrix_rank: columns of the thin matrices.
        process_group: see ``ReducerState``, as are ``options``.
        options: ``average``, ``hierarchical``, ``warmup_steps``, ``grad_scaler``.

    Example:
        >>> PowerSGDState(2)
        PowerSGDState(ErrorFeedback(reducer=PowerSGDReducer(matrix_rank=2, seed=0), decay=1.0))
    """

    def __init__(self, matrix_rank: int = 4, process_group: Any = None, **options: Any) -> None:
        super().__init__(ErrorFeedback(PowerSGDReducer(matrix_rank)), process_group, **options)


class AlgorithmState(HookState):
    """Gradients are summed as by an algorithm that has a name, with its warm-up and its other stages.

    For algorithms that replace each gradient by a sum in each step: ``gradient_allreduce``, ``bytegrad``,
    ``power_sgd``, ``top_k``, ``sign_sgd`` and ``loco``. A hook sees neither optimizers nor weights: the others need
    ``with_bagua``.

    Args:
        algorithm: or the name of one.
        process_group: see ``ReducerState``.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.

    Raises:
        UnsupportedAlgorithmException: there is no such algorithm.
        ConfigurationError: the algorithm exchanges something else, or at other times.

    Example:
        >>> AlgorithmState("loco").sum_at(0).reducer is None  # It begins with exact sums.
        True
    """

    def __init__(
        self,
        algorithm: Algorithm | DistributedAlgorithm | str,
        process_group: Any = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(process_group, grad_scaler)
        self.algorithm = as_algorithm(algorithm)
        self.name = repr(self.algorithm)
        self._nothing_known = Model({})
        self._sums = {phase: _sum_of(self.algorithm, phase) for phase in self.algorithm.phases}

    def sum_at(self, step: int) -> Sum:
        """As in the phase of the step."""
        return self._sums[self.algorithm.phase(step, self._nothing_known)]


def _sum_of(algorithm: Algorithm, phase: Hashable) -> Sum:
    """How gradients are summed in a phase.

    Raises:
        ConfigurationError: something else happens, too, or in its place.
    """
    first, *more = algorithm.exchanges(phase)
    how = first.how
    if not more and isinstance(how, Sum) and first == Exchange(Gradients(), Every(), how, Replace()):
        return how
    raise ConfigurationError(
        "a hook of torch's DDP sees gradients only, and this algorithm does more than to sum them",
        argument="algorithm",
        expected="gradient_allreduce, bytegrad, power_sgd, top_k, sign_sgd or loco",
        seen=repr(algorithm),
        advice="Use model.with_bagua([optimizer], algorithm) in place of DDP.",
    )


def codec_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange the gradients of a bucket as ``state`` says: ``model.register_comm_hook(state, codec_hook)``.

    Torch's wrappers compose with it: ``fp16_compress_wrapper(codec_hook)``.

    Args:
        state: state of the model.
        bucket: torch's ``GradBucket``.

    Returns:
        A future of the bucket's gradients.

    Raises:
        ConfigurationError: ``state`` is not one of this module.
    """
    _check_state(state)
    return state.exchange_bucket(bucket)


def _check_state(state: object) -> None:
    check_kind(HookState, "CodecState, TopKState, PowerSGDState, AlgorithmState or ReducerState", state=state)


def register_fsdp_hook(module: torch.nn.Module, state: HookState) -> None:
    """Exchange gradients between replicas of a model that FSDP2 shards, as ``state`` says.

    For models that ``fully_shard`` was applied to with a one-dimensional mesh: torch sums gradients inside the mesh,
    this hook averages the result over ``state``'s ranks, those that hold the same shard in other meshes. Collective
    among these.

    A shard has no matrices, so ``PowerSGDState`` would sum it exactly. Gradients inside the mesh travel in full:
    what hooks of torch see there is what has been summed already.

    Args:
        module: and its parts to which ``fully_shard`` was applied.
        state: its ``process_group`` holds the ranks with the same shard.

    Raises:
        ConfigurationError: ``fully_shard`` was applied to nothing in ``module``, or torch sums gradients over ranks
            of ``state`` already, because they share its mesh, or a part has several meshes.
    """
    _check_state(state)
    parts = sharded_parts(module)
    refuse_shared_mesh(parts.values(), state.group, "state")
    for name, part in parts.items():
        try:
            part.set_all_reduce_hook(functools.partial(state.exchange_part, name))
        except ValueError as error:
            raise ConfigurationError(
                "torch takes no hook for a part with several meshes",
                argument="module",
                expected="fully_shard without a shard_placement_fn that chooses meshes",
                seen=name,
            ) from error
