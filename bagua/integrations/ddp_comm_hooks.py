"""Algorithms as communication hooks of torch's ``DistributedDataParallel``, and of FSDP2.

One line for an existing script: ``model.register_comm_hook(HookState("bytegrad"), bagua_hook)``.
"""

# Annotations are not strings here: torch compares those of a hook with its own types.
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bagua import algorithms, comm
from bagua.checks import check_kind
from bagua.engine import Lane, Remembered, check_owner, collect, compare, create_lane, meet, merged, renamed, restore
from bagua.errors import ConfigurationError, blame
from bagua.integrations._sharded import refuse_shared_mesh, sharded_parts
from bagua.primitives import MatrixBlock, ReducerMemory, SumReducer, sum_over

__all__ = ["HookState", "bagua_hook", "register_fsdp_hook"]


class _HookBucket:
    """What is remembered of a bucket of DDP, which has its parameters one after the other, without gaps."""

    label = ""

    def __init__(
        self, names: list[str], parameters: list[torch.Tensor], reducer: SumReducer, memory: ReducerMemory
    ) -> None:
        self.names: Sequence[str] = names
        self.reducer = reducer
        self.memory = memory
        self._shapes = [parameter.shape for parameter in parameters]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""
        parts = flat.split_with_sizes([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class HookBuckets:
    """What is remembered of all buckets of a model. DDP forms them anew; parameters are known by their ``id``."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[str, ...], torch.dtype], _HookBucket] = {}
        self._kept = collect(())
        #: Buckets of a saved state, as names.
        self._restored: list[list[str]] = []
        #: Buckets other than those of DDP in which the next backward pass is exchanged, as names; none for DDP's own.
        #: Buckets in which this backward pass is to be exchanged, where they are others than DDP has.
        self.awaited: list[list[str]] = []
        #: Complete backward passes since then, the buckets of the last one, and those of one that is under way.
        self._passes = 0
        self._last: list[list[str]] = []
        self._coming: list[list[str]] = []

    @property
    def layout(self) -> list[list[str]]:
        """The parameters of each bucket, by their ``id``, in which the next backward pass is to be exchanged."""
        return self._restored if self._restored and self._passes < 2 else self._last

    def note(self, index: int, parameters: Sequence[torch.Tensor], *, is_last: bool) -> None:
        """Note a bucket that DDP hands over.

        Args:
            index: number of the bucket in its backward pass, from 0.
            parameters: parameters of the bucket.
            is_last: True for the last bucket of the pass.
        """
        if index == 0:
            self._coming = []
            if self._passes == 1 and not self._restored:
                self.awaited = self._last
        self._coming.append([str(id(parameter)) for parameter in parameters])
        if is_last:
            self._last, self._passes = self._coming, self._passes + 1

    def take_layout(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The buckets to exchange this backward pass in, made of ``parameters``; none if they are others. Once.

        DDP forms its buckets anew after the first pass of a process. A run that goes on has them; one that resumes
        has yet to make that pass. So the first pass after a load is exchanged in the buckets of the saved state.
        After the very first pass DDP's next buckets are not known, so the second pass takes those of the first.
        """
        saved, self.awaited = self.awaited, []
        known = {str(id(one)): one for one in parameters}
        if sorted(name for names in saved for name in names) != sorted(known):
            return []
        return [[known[name] for name in names] for names in saved]

    def memory_of(
        self, flat: torch.Tensor, parameters: list[torch.Tensor], communicator: comm.Communicator, reducer: SumReducer
    ) -> ReducerMemory:
        """The memory of a reducer for a bucket; a new one takes over what was remembered of its parameters."""
        names = [str(id(parameter)) for parameter in parameters]
        key = (tuple(names), flat.dtype)
        if key not in self._places or self._places[key].reducer != reducer:
            offsets = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
            blocks = [block for block in map(MatrixBlock.of, parameters, offsets) if block is not None]
            place = _HookBucket(names, parameters, reducer, reducer.memory(communicator, flat, blocks))
            former = [other for other in self._places if not set(names).isdisjoint(other[0])]
            self._kept = merged(self._kept, collect([self._places.pop(other) for other in former]))
            restore([place], self._kept)
            self._places[key] = place
        return self._places[key].memory

    def collect(self, names: Mapping[int, str]) -> Remembered:
        """Copies of everything that is remembered, by ``names``."""
        return renamed(
            merged(self._kept, collect(self._places.values())), {str(key): name for key, name in names.items()}
        )

    def restore(self, remembered: Remembered, names: Mapping[int, str], layout: Sequence[Sequence[str]]) -> None:
        """Go on with what ``collect`` returned; buckets take it up when they are exchanged first.

        Args:
            remembered: all that is remembered.
            names: names of the parameters, by their ``id``.
            layout: names of the parameters of each bucket.
        """
        keys = {name: str(key) for key, name in names.items()}
        self._kept = renamed(remembered, keys)
        self._places = {}
        self._restored = [[keys[name] for name in bucket if name in keys] for bucket in layout]
        self.awaited, self._passes, self._last = self._restored, 0, []


class _Held(NamedTuple):
    """A bucket of DDP that is on its way.

    Attributes:
        flat: its gradients, one parameter after the other.
        parameters: parameters of the bucket.
        completion: future that ends when they are exchanged.
        failures: reasons why they could not be.
    """

    flat: torch.Tensor
    parameters: list[torch.Tensor]
    completion: torch.futures.Future[torch.Tensor]
    failures: list[BaseException]


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with its part of the gradients in ``flat``."""
    return zip(parameters, flat.split_with_sizes([parameter.numel() for parameter in parameters]), strict=True)


_NOTHING_KNOWN = algorithms.Model({})


def _exchange(how: algorithms.Sum) -> algorithms.Exchange:
    return algorithms.Exchange(algorithms.Gradients(), algorithms.Every(), how, algorithms.Replace())


def _sum_of(algorithm: algorithms.Algorithm, phase: Hashable) -> algorithms.Sum:
    """How gradients are summed in a phase.

    Raises:
        ConfigurationError: something else happens, too, or in its place.
    """
    first, *more = algorithm.exchanges(phase)
    if not more and isinstance(first.how, algorithms.Sum) and first == _exchange(first.how):
        return first.how
    raise ConfigurationError(
        "a hook of torch's DDP sees gradients only, and this algorithm does more than to sum them",
        argument="algorithm",
        expected="gradient_allreduce, bytegrad, power_sgd, top_k, sign_sgd or loco",
        seen=repr(algorithm),
        advice="Use model.with_bagua([optimizer], algorithm) in place of DDP.",
    )


class HookState:
    """What ``bagua_hook`` exchanges gradients with, and what it remembers. One for each model.

    Ranks are connected when the first bucket is exchanged, on connections of this state's own. Buckets are
    exchanged one after the other in a background thread (on CUDA, on a stream), in the order in which DDP
    hands them over, which is the same on all ranks; meanwhile the backward pass goes on.

    Args:
        algorithm: an algorithm that replaces each gradient by a sum in each step, or its name: ``gradient_allreduce``,
            ``bytegrad``, ``power_sgd``, ``top_k``, ``sign_sgd`` or ``loco``, with its warm-up and its other stages. Or
            a reducer of ``bagua.primitives``, whose mean takes the place of each gradient. A hook sees neither
            optimizers nor weights: other algorithms need ``with_bagua``.
        process_group: the ranks of the model, a group of ``bagua.comm`` or of ``torch.distributed``; None
            means all. If only ``torch.distributed`` is initialized, its group of all ranks is joined.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.

    Attributes:
        step: backward passes whose gradients were exchanged.
        name: name of the algorithm that sums the gradients, with all options: saved states belong to it.

    Raises:
        UnsupportedAlgorithmException: there is no such algorithm.
        InvalidTypeError: neither an algorithm nor a reducer, as a codec alone.
        ConfigurationError: the algorithm exchanges something else, or at other times.

    Example:
        >>> HookState("bytegrad").name
        'ByteGradAlgorithm(hierarchical=True, average=True, warmup_steps=0)'
    """

    def __init__(
        self,
        algorithm: algorithms.Algorithm | algorithms.DistributedAlgorithm | str | SumReducer,
        process_group: Any = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        known = (algorithms.Algorithm, algorithms.DistributedAlgorithm, str, SumReducer)
        check_kind(known, "an algorithm, its name, or a reducer, as ScatterGatherReducer(codec)", algorithm=algorithm)
        if isinstance(algorithm, SumReducer):
            self.name, declared = repr(algorithm), algorithms.Algorithm.of(_exchange(algorithms.Mean(algorithm)))
        else:
            declared = algorithms.as_algorithm(algorithm)
            self.name = repr(declared)
        self._algorithm = declared
        self._sums = {phase: _sum_of(declared, phase) for phase in declared.phases}
        self._grad_scaler = grad_scaler
        self._asked_for = process_group
        self._group: comm.ProcessGroup | None = None
        self._lane: Lane | None = None
        self._held: list[_Held] = []
        self._watch = comm.BackwardWatch()
        #: The group on which ranks have compared what they go on from.
        self._compared: comm.ProcessGroup | None = None
        self._meetings = 0
        self.step = 0
        self._places = HookBuckets()
        self._parts: dict[str, torch.Tensor] = {}
        self._steps_of_parts: dict[str, int] = {}
        self._loaded, self._loads_to_compare = ["loaded state: none"], False

    @property
    def group(self) -> comm.ProcessGroup:
        """The ranks, on connections of this state's own. Collective the first time."""
        if self._group is None or self._group.closed:
            self._group = comm.as_group(self._asked_for).duplicate("hook")
            self._lane = None
        return self._group

    def exchange_bucket(self, bucket: comm.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to exchange a bucket of DDP.

        Args:
            bucket: torch's ``GradBucket``.

        Returns:
            A future of the bucket's buffer, which then holds the result.
        """
        flat = bucket.buffer()
        lane = self._lane or create_lane(self.group, flat.device, blocking=self.group.size > 1)
        self._lane, step = lane, self.step
        self.step += bucket.is_last()
        devices: list[int | str | torch.device] | None = [flat.device] if flat.device.type == "cuda" else None
        completion: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        failures: list[BaseException] = []

        def outcome(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # What a callback raises is an error to C++ as well; what set_exception is given would be a result.
            if failures:
                raise failures[0]
            return flat

        future = completion.then(outcome)
        if bucket.index() == 0:  # Those of a backward pass that failed are not exchanged.
            self._held = []
        self._held.append(_Held(flat, bucket.parameters(), completion, failures))
        self._places.note(bucket.index(), self._held[-1].parameters, is_last=bucket.is_last())
        if self._places.awaited and not bucket.is_last():
            return future
        held, self._held = self._held, []
        wait = lane.run(functools.partial(self._exchange, held, step))
        if flat.device.type == "cpu":
            self._watch.add(comm.Work(lambda _: wait(), completion.done))
        return future

    def _exchange(self, held: Sequence[_Held], step: int) -> None:
        """Exchange buckets of one backward pass; afterwards no rank waits for them, even if it failed."""
        try:
            self._reduce_all(held, step)
        except BaseException as error:
            for one in held:
                one.failures.append(error)
            culprit, told = blame(error, self.group.ranks[self.group.rank], "an exchange of gradients")
            self.group.abort(told, culprit)
            raise
        finally:
            for one in held:
                one.completion.set_result(one.flat)

    @torch.no_grad()
    def _reduce_all(self, held: Sequence[_Held], step: int) -> None:
        """Reduce buckets as they are; in two steps in others, see ``HookBuckets.take_layout``."""
        self._compare()
        layout = []
        if self._places.awaited:
            layout = self._places.take_layout([parameter for one in held for parameter in one.parameters])
        if not layout or len({one.flat.dtype for one in held}) > 1:
            for one in held:
                self._reduce(one.flat, one.parameters, step)
            return
        views = {id(parameter): view for one in held for parameter, view in _views(one.flat, one.parameters)}
        for parameters in layout:
            flat = torch.cat([views[id(parameter)] for parameter in parameters])
            self._reduce(flat, parameters, step)
            for parameter, part in _views(flat, parameters):
                views[id(parameter)].copy_(part)

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
        self._compare()
        step = self._steps_of_parts.get(name, self.step)
        self._steps_of_parts[name] = step + 1
        self._reduce(flat, [part], step)
        self.step = max(self.step, min(self._steps_of_parts.values()))

    def _compare(self) -> None:
        """Before the first exchange, and before the first one after a load: do all ranks go on from the same step?"""
        group = self.group
        if self._compared is group:
            if not self._loads_to_compare:
                return
            self._meetings += 1  # Ranks that have loaded nothing do not come; they cannot be asked on a communicator.
            meet(group, f"loaded/{self._meetings}", "load_state_dict of HookState")
        self._compared, self._loads_to_compare = group, False
        compare(self._loaded, group.global_communicator, "states of this hook")

    @torch.no_grad()
    def _reduce(self, flat: torch.Tensor, parameters: list[torch.Tensor], step: int) -> None:
        group, how = self.group, self._sums[self._algorithm.phase(step, _NOTHING_KNOWN)]
        reducer = how.reducer
        if (scale := how.share(group.size)) != 1:
            flat.mul_(scale)
        if reducer is None:
            sum_over(flat, group, lambda total, ranks: ranks.allreduce(total), hierarchical=how.hierarchical)
            return
        memory = self._places.memory_of(flat, parameters, group.global_communicator, reducer)
        memory.step = step
        memory.loss_scale = 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()
        sum_over(flat, group, lambda total, ranks: reducer.reduce(total, ranks, memory), hierarchical=how.hierarchical)
        memory.settle(flat)

    # Checkpoints.

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """What is remembered on this rank, by names of parameters. Every rank saves its own.

        Args:
            module: the model, or DDP around it.
        """
        parts = {name: part.numel() for name, part in self._parts.items()}
        return {
            "reducer": self.name,
            "rank": comm.rank_among_all(),
            "world_size": comm.size_of_all(),
            "step": self.step,
            "parts": parts,
            "buckets": self._layout(module),
            **self._places.collect(self._names(module)),
        }

    def load_state_dict(self, state_dict: dict[str, Any], module: torch.nn.Module) -> None:
        """Go on where ``state_dict`` was taken. To be called on all ranks before the same step, or on none.

        Args:
            state_dict: state of this rank.
            module: the model, or DDP around it.

        Raises:
            ConfigurationError: it belongs to another reducer or another model; or another rank, or another number of
                ranks, and something of it differs between ranks.
            CollectiveMismatchError: other ranks go on from another state; the next exchange of gradients raises it.
        """
        if state_dict["reducer"] != self.name:
            raise ConfigurationError(
                "this state belongs to another reducer",
                argument="state_dict",
                expected=self.name,
                seen=state_dict["reducer"],
            )
        if any((state_dict["parameters"], state_dict["others"])):  # else there is nothing that differs between ranks
            check_owner(state_dict, comm.rank_among_all(), comm.size_of_all())
        for name, numel in state_dict["parts"].items():
            self._parts[name] = torch.empty(numel, device="meta")
        remembered = Remembered(parameters=state_dict["parameters"], others=state_dict["others"])
        self._places.restore(remembered, self._names(module), state_dict.get("buckets", ()))
        self.step = state_dict["step"]
        self._steps_of_parts = {}
        buckets = [f"loaded bucket: {', '.join(names)}" for names in state_dict.get("buckets", ())]
        self._loaded, self._loads_to_compare = [f"loaded state: of step {self.step}", *buckets], True

    def _layout(self, module: torch.nn.Module) -> list[list[str]]:
        """Names of the parameters of each bucket; none for parts, which are always the same."""
        names = {str(key): name for key, name in self._names(module).items()}
        return [] if self._parts else [[names[key] for key in bucket if key in names] for bucket in self._places.layout]

    def _names(self, module: torch.nn.Module) -> dict[int, str]:
        inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
        named = {id(parameter): name for name, parameter in inner.named_parameters()}
        return {**named, **{id(part): f"part {name}" for name, part in self._parts.items()}}

    def close(self) -> None:
        """Give back threads and connections. Idempotent; happens at the end of the process groups at the latest."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        if self._group is not None:
            self._group.close()

    def __repr__(self) -> str:
        return f"HookState({self.name})"


def bagua_hook(state: HookState, bucket: comm.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange the gradients of a bucket as ``state`` says: ``model.register_comm_hook(state, bagua_hook)``.

    Torch's wrappers compose with it: ``fp16_compress_wrapper(bagua_hook)``.

    Args:
        state: state of the model.
        bucket: torch's ``GradBucket``.

    Returns:
        A future of the bucket's gradients.

    Raises:
        InvalidTypeError: ``state`` is no ``HookState``.
    """
    check_kind(HookState, "a HookState", state=state)
    return state.exchange_bucket(bucket)


def register_fsdp_hook(module: torch.nn.Module, state: HookState) -> None:
    """Exchange gradients between replicas of a model that FSDP2 shards, as ``state`` says.

    For models that ``fully_shard`` was applied to with a one-dimensional mesh: torch sums gradients inside the mesh,
    this hook averages the result over ``state``'s ranks, those that hold the same shard in other meshes. Collective
    among these.

    A shard has no matrices, so ``power_sgd`` would sum it exactly. Gradients inside the mesh travel in full:
    what hooks of torch see there is what has been summed already.

    Args:
        module: and its parts to which ``fully_shard`` was applied.
        state: its ``process_group`` holds the ranks with the same shard.

    Raises:
        ConfigurationError: ``fully_shard`` was applied to nothing in ``module``, or torch sums gradients over ranks
            of ``state`` already, because they share its mesh, or a part has several meshes.
    """
    check_kind(HookState, "a HookState", state=state)
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
