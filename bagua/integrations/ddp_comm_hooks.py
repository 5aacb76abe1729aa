"""Codecs and reducers as communication hooks of torch's ``DistributedDataParallel``, and of FSDP2.

One line for an existing script: ``model.register_comm_hook(CodecState("minmax_uint8"), codec_hook)``.
"""

# Annotations are not strings here: torch compares those of a hook with its own types.
import functools
from typing import Any

import torch

from bagua.comm import (
    BackwardWatch,
    GradBucket,
    PendingWork,
    ProcessGroup,
    as_group,
    rank_among_all,
    size_of_all,
)
from bagua.compression import Codec, TopK
from bagua.engine import Executor, Remembered, check_owner, create_executor
from bagua.errors import ConfigurationError, blame
from bagua.integrations._hook_buckets import HookBuckets
from bagua.integrations._sharded import refuse_shared_mesh, sharded_parts
from bagua.primitives import (
    AllGatherReducer,
    ErrorFeedback,
    PowerSGDReducer,
    ScatterGatherReducer,
    SumReducer,
    allreduce_sum,
    reducer_sum,
)

__all__ = ["CodecState", "PowerSGDState", "ReducerState", "TopKState", "codec_hook", "register_fsdp_hook"]


class ReducerState:
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
        >>> from bagua.primitives import RandomKReducer
        >>> ReducerState(ErrorFeedback(RandomKReducer(ratio=0.1)))
        ReducerState(ErrorFeedback(reducer=RandomKReducer(ratio=0.1, seed=0), decay=1.0))
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
        if not isinstance(reducer, SumReducer):
            raise ConfigurationError(
                "not a reducer", argument="reducer", expected="a SumReducer of bagua.primitives", seen=repr(reducer)
            )
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise ConfigurationError(
                "not a number of steps", argument="warmup_steps", expected="an integer >= 0", seen=warmup_steps
            )
        self.reducer = reducer
        self.step = 0
        self._average = average
        self._hierarchical = hierarchical
        self._warmup_steps = warmup_steps
        self._grad_scaler = grad_scaler
        self._asked_for = process_group
        self._group: ProcessGroup | None = None
        self._executor: Executor | None = None
        self._places = HookBuckets(reducer)
        self._watch = BackwardWatch()
        self._parts: dict[str, torch.Tensor] = {}
        self._steps_of_parts: dict[str, int] = {}

    @property
    def group(self) -> ProcessGroup:
        """The ranks, on connections of this state's own. Collective the first time."""
        if self._group is None or self._group.closed:
            self._group = as_group(self._asked_for).duplicate("hook")
            self._executor = None
        return self._group

    def exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to exchange a bucket of DDP.

        Args:
            bucket: torch's ``GradBucket``.

        Returns:
            A future of the bucket's buffer, which then holds the result.
        """
        flat = bucket.buffer()
        parameters, group = bucket.parameters(), self.group
        executor = self._executor or create_executor(group, flat.device, blocking=True)
        self._executor, step = executor, self.step
        self.step += bucket.is_last()
        devices: list[int | str | torch.device] | None = [flat.device] if flat.device.type == "cuda" else None
        completion: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        failures: list[BaseException] = []

        def exchange() -> None:
            try:
                self._reduce(flat, parameters, step)
            except BaseException as error:
                failures.append(error)
                culprit, told = blame(error, group.ranks[group.rank], "an exchange of gradients")
                group.abort(told, culprit)
                raise
            finally:
                completion.set_result(flat)

        def outcome(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # What a callback raises is an error to C++ as well; what set_exception is given would be a result.
            if failures:
                raise failures[0]
            return flat

        future = completion.then(outcome)
        wait = executor.run(exchange)
        if flat.device.type == "cpu":
            self._watch.add(PendingWork(lambda _: wait(), completion.done))
        return future

    def exchange_part(self, name: str, flat: torch.Tensor) -> None:
        """Exchange the gradients of a part of a model in place, before returning.

        Called in one order on all ranks, with an equal size for each name in every step.

        Args:
            name: name of the part.
            flat: its gradients, one-dimensional and contiguous.
        """
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = torch.empty(flat.numel(), device="meta")
        step = self._steps_of_parts.get(name, self.step)
        self._steps_of_parts[name] = step + 1
        self._reduce(flat, [part], step)
        self.step = max(self.step, min(self._steps_of_parts.values()))

    @torch.no_grad()
    def _reduce(self, flat: torch.Tensor, parameters: list[torch.Tensor], step: int) -> None:
        group = self.group
        if self._average:
            flat.div_(group.size)
        memory = self._places.memory_of(flat, parameters, group.global_communicator)
        if step < self._warmup_steps:
            allreduce_sum(flat, group, hierarchical=self._hierarchical)
            return
        memory.step = step
        memory.loss_scale = 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()
        reducer_sum(flat, group, self.reducer, memory, hierarchical=self._hierarchical)
        memory.settle(flat)

    # Checkpoints.

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """What is remembered on this rank, by names of parameters. Every rank saves its own.

        Args:
            module: the model, or DDP around it.
        """
        parts = {name: part.numel() for name, part in self._parts.items()}
        return {
            "reducer": repr(self.reducer),
            "rank": rank_among_all(),
            "world_size": size_of_all(),
            "step": self.step,
            "parts": parts,
            **self._places.collect(self._names(module)),
        }

    def load_state_dict(self, state_dict: dict[str, Any], module: torch.nn.Module) -> None:
        """Go on where ``state_dict`` was taken.

        Args:
            state_dict: state of this rank.
            module: the model, or DDP around it.

        Raises:
            ConfigurationError: it belongs to another reducer or another model; or another rank, or another number of
                ranks, and something of it differs between ranks.
        """
        if state_dict["reducer"] != repr(self.reducer):
            raise ConfigurationError(
                "this state belongs to another reducer",
                argument="state_dict",
                expected=repr(self.reducer),
                seen=state_dict["reducer"],
            )
        if any((state_dict["parameters"], state_dict["others"])):  # else there is nothing that differs between ranks
            check_owner(state_dict, rank_among_all(), size_of_all())
        for name, numel in state_dict["parts"].items():
            self._parts[name] = torch.empty(numel, device="meta")
        remembered = Remembered(parameters=state_dict["parameters"], others=state_dict["others"])
        self._places.restore(remembered, self._names(module))
        self.step = state_dict["step"]
        self._steps_of_parts = {}

    def _names(self, module: torch.nn.Module) -> dict[int, str]:
        inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
        named = {id(parameter): name for name, parameter in inner.named_parameters()}
        return {**named, **{id(part): f"part {name}" for name, part in self._parts.items()}}

    def close(self) -> None:
        """Give back threads and connections. Idempotent; happens at the end of the process groups at the latest."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        if self._group is not None:
            self._group.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reducer!r})"


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


def codec_hook(state: ReducerState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
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
    if not isinstance(state, ReducerState):
        raise _no_state(state)
    return state.exchange_bucket(bucket)


def _no_state(seen: object) -> ConfigurationError:
    return ConfigurationError(
        "this hook needs a state that says how to compress",
        argument="state",
        expected="CodecState, TopKState, PowerSGDState or ReducerState",
        seen=repr(seen),
    )


def register_fsdp_hook(module: torch.nn.Module, state: ReducerState) -> None:
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
    if not isinstance(state, ReducerState):
        raise _no_state(state)
    parts = sharded_parts(module)
    others = set(state.group.ranks) - {state.group.ranks[state.group.rank]}
    for part in parts.values():
        refuse_shared_mesh(part, others, "state")
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
