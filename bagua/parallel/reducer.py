"""The bucket manager: collects gradients, forms buckets, and has them exchanged."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any

import torch

from bagua.algorithms import Algorithm, DistributedAlgorithm, GradientAllReduceAlgorithm, as_algorithm
from bagua.buckets import Bucket, check_align_bytes, form_buckets
from bagua.comm import ProcessGroup, ReduceOp, get_default_group
from bagua.errors import ConfigurationError
from bagua.parallel.agreement import compare
from bagua.parallel.registration import Registration
from bagua.parallel.scheduler import Scheduler, twice

__all__ = ["DEFAULT_BUCKET_BYTES", "BucketType", "Reducer"]

DEFAULT_BUCKET_BYTES = 10_000_000


class BucketType(Enum):
    """What the buckets of a ``Reducer`` are made of."""

    Gradient = 0
    Weight = 1
    Param = 2


def _chosen(
    algorithm: Algorithm | DistributedAlgorithm | str | None,
    bucket_type: BucketType,
    hierarchical_reduce: bool,
    decentralize_reduce: bool,
    chunking: bool,
) -> Algorithm:
    """The algorithm, by name or by the flags of the documented constructor."""
    if algorithm is not None:
        return as_algorithm(algorithm)
    if decentralize_reduce or bucket_type is BucketType.Weight:
        return Algorithm.init(DistributedAlgorithm.Decentralize, hierarchical=hierarchical_reduce)
    if chunking:
        return Algorithm.init(DistributedAlgorithm.ScatterGatherAllReduce, hierarchical=hierarchical_reduce)
    return GradientAllReduceAlgorithm(hierarchical=hierarchical_reduce)


class Reducer:
    """Collects the gradients of a module in buckets, and has each bucket exchanged when it is complete.

    Building one is collective: it makes a private duplicate of the process group and
    compares the models of all ranks. In the first backward pass ``add_param`` notes in
    which order gradients appear; ``initialize_buckets`` then forms buckets in rank 0's
    order. Later, ``mark_tensor_ready`` takes each gradient as it arrives, and
    ``mark_on_complete`` ends the step.

    Args:
        module: whose trainable parameters are exchanged.
        optimizers: that step them.
        bucket_type: gradients, or weights, which chooses a decentralized algorithm.
        hierarchical_reduce: inside each host first, then between hosts.
        align_bytes: buckets are padded to a multiple of this power of two.
        chunking: pad buckets so that they split evenly over the ranks.
        fusion: gradients and weights of a bucket live in flat memory. Otherwise gradients
            are copied into it and back.
        decentralize_reduce: choose a decentralized algorithm.
        buckets: lists of parameters, or of their names, to use instead of forming buckets.
        process_group: the ranks; None means all.
        algorithm: overrides the choice by flags.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it
            is an error.
        delay_reduce: start no exchange before the end of backward.
        grad_scaler: the ``GradScaler`` of the training loop, for algorithms that must know
            by how much gradients are scaled.

    Attributes:
        group: private to this reducer.
        algorithm: bound to the group.
        step: synchronized backward passes so far.
        buckets: empty before they are formed.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        InvalidTensorError: a parameter that cannot be put into a bucket.
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> from bagua.comm import solo_group
        >>> layer = torch.nn.Linear(2, 2)
        >>> reducer = Reducer(layer, [], BucketType.Gradient, False, 8, False, True, process_group=solo_group())
        >>> for parameter in layer.parameters():
        ...     reducer.add_param(parameter)
        >>> [len(bucket) for bucket in reducer.initialize_buckets()]
        [2]
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        bucket_type: BucketType,
        hierarchical_reduce: bool,
        align_bytes: int,
        chunking: bool,
        fusion: bool,
        decentralize_reduce: bool = False,
        buckets: Sequence[Sequence[torch.Tensor | str]] = [],  # noqa: B006 - documented; never changed
        *,
        process_group: ProcessGroup | None = None,
        algorithm: Algorithm | DistributedAlgorithm | str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        find_unused_parameters: bool = False,
        delay_reduce: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.declaration = _chosen(algorithm, bucket_type, hierarchical_reduce, decentralize_reduce, chunking)
        self._align_bytes = check_align_bytes(align_bytes)
        self._bucket_bytes = _check_bucket_bytes(bucket_bytes)
        self._chunking = chunking
        self._fusion = fusion
        self._find_unused = find_unused_parameters
        self._delay = delay_reduce
        self._grad_scaler = grad_scaler
        self._wanted = [list(bucket) for bucket in buckets]
        user_group = get_default_group() if process_group is None else process_group
        self.algorithm = self.declaration.reify(user_group)
        self.registration = Registration(module)
        self.group = user_group.duplicate("model")
        self.step = 0
        self.buckets: list[Bucket] = []
        self._scheduler: Scheduler | None = None
        self._phase: Hashable = None
        self._arrival: list[torch.nn.Parameter] = []
        self._arrived: set[int] = set()
        try:
            compare(self._facts(), self.group.global_communicator, "models")
            if self._wanted:
                self._form([self._members(bucket) for bucket in self._wanted])
        except BaseException:
            self.group.close()
            raise

    def _facts(self) -> list[str]:
        return [
            f"algorithm {self.declaration!r}",
            f"bucket_bytes={self._bucket_bytes}, align_bytes={self._align_bytes}, chunking={self._chunking}, "
            f"fusion={self._fusion}, find_unused_parameters={self._find_unused}, delay_reduce={self._delay}",
            f"buckets {[[self._as_name(member) for member in bucket] for bucket in self._wanted]}",
            *self.registration.facts,
        ]

    def _as_name(self, member: torch.Tensor | str) -> str:
        if isinstance(member, str):
            return member
        names = zip(self.registration.names, self.registration.parameters, strict=True)
        return next((name for name, parameter in names if parameter is member), "a tensor that is no parameter")

    # What a caller may ask.

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, as on a group of one rank."""
        return not self.registration.parameters or (self.group.size == 1 and not self.algorithm.traits.active_alone)

    @property
    def initialized(self) -> bool:
        """Whether buckets have been formed."""
        return self._scheduler is not None

    @property
    def partially_exchanged(self) -> bool:
        """Whether the backward pass under way has started exchanges already."""
        return self._scheduler is not None and self._scheduler.launched > 0

    def fill_slot(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The tensor that is communicated for ``param``: its part of the bucket's flat memory.

        Raises:
            ConfigurationError: buckets have not been formed, or ``param`` is not in them.
        """
        slot = None if self._scheduler is None else self._scheduler.slots.get(id(param))
        if slot is None:
            raise ConfigurationError(
                "this parameter is in no bucket", argument="param", expected="a registered parameter", seen=type(param)
            )
        if slot.view is not None:
            return slot.view
        bucket = slot.lane.bucket
        return bucket.views(bucket.buffer())[bucket.parameters.index(param)]

    # The first backward pass.

    def add_param(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of ``param`` is there, in a backward pass before buckets exist.

        Raises:
            ConfigurationError: it was there before in the same backward pass.
        """
        if id(param) in self._arrived:
            raise twice(self._as_name(param))
        self._arrived.add(id(param))
        self._arrival.append(param)

    def forget_arrivals(self) -> None:
        """The backward pass that ``add_param`` was told about did not end."""
        self._arrival = []
        self._arrived = set()

    def initialize_buckets(self) -> list[list[torch.Tensor]]:
        """Form the buckets in the order in which gradients appeared on rank 0. Collective.

        Returns:
            The parameters of each bucket.

        Raises:
            ConfigurationError: on all ranks, if some rank lacks gradients and
                ``find_unused_parameters`` is off.
        """
        members = form_buckets(
            self._agreed_order(),
            key=lambda position: (self._parameter(position).dtype, self._parameter(position).device),
            nbytes=lambda position: self._parameter(position).nbytes,
            bucket_bytes=self._bytes_per_bucket(),
        )
        self._form(members)
        return [list(bucket.parameters) for bucket in self.buckets]

    def _parameter(self, position: int) -> torch.nn.Parameter:
        return self.registration.parameters[position]

    def _bytes_per_bucket(self) -> int:
        wishes = self.algorithm.bucketing(self.step)
        return 2**63 if wishes.one_bucket else self._bucket_bytes

    def _agreed_order(self) -> list[int]:
        """Positions of the parameters, in the order of their gradients on rank 0."""
        positions = {id(parameter): position for position, parameter in enumerate(self.registration.parameters)}
        place = [-1] * len(positions)
        for arrived, parameter in enumerate(self._arrival):
            place[positions[id(parameter)]] = arrived
        self.forget_arrivals()
        everyone: list[list[int]] = self.group.global_communicator.allgather_object(place)
        if not self._find_unused:
            self._refuse_missing(everyone)
        first = everyone[0]
        return sorted(range(len(first)), key=lambda position: (first[position] < 0, first[position]))

    def _refuse_missing(self, everyone: list[list[int]]) -> None:
        lacking = {
            rank: [name for name, arrived in zip(self.registration.names, place, strict=True) if arrived < 0]
            for rank, place in enumerate(everyone)
        }
        lacking = {rank: names for rank, names in lacking.items() if names}
        if lacking:
            raise unused(lacking)

    def _members(self, bucket: Sequence[torch.Tensor | str]) -> list[int]:
        names = [self._as_name(member) for member in bucket]
        unknown = [name for name in names if name not in self.registration.names]
        if unknown:
            raise ConfigurationError(
                "a bucket holds something else than trainable parameters",
                argument="buckets",
                expected="parameters of the module, or their names",
                seen=", ".join(unknown),
            )
        return [self.registration.names.index(name) for name in names]

    def _form(self, members: Sequence[Sequence[int]]) -> None:
        counted = sorted(position for bucket in members for position in bucket)
        if counted != list(range(len(self.registration.parameters))):
            raise ConfigurationError(
                "buckets do not hold each trainable parameter exactly once",
                argument="buckets",
                expected=f"{len(self.registration.parameters)} parameters",
                seen=f"{len(counted)}, {len(set(counted))} of them different",
            )
        wishes = self.algorithm.bucketing(self.step)
        self.buckets = [
            Bucket(
                index,
                [self.registration.names[position] for position in positions],
                [self._parameter(position) for position in positions],
                self.group.global_communicator,
                align_bytes=self._align_bytes,
                shares=self.group.size if self._chunking or wishes.chunked else 1,
                fusion=self._fusion,
            )
            for index, positions in enumerate(members)
        ]
        self._phase = self.algorithm.phase(self.step)
        self.register_bagua_buckets()

    def register_bagua_buckets(self) -> None:
        """Give the buckets their flat memory and state, and schedule them."""
        for bucket in self.buckets:
            bucket.fuse_weights()
            if self.algorithm.traits.gathers_gradients:
                bucket.allocate_gradients()
            bucket.state = self.algorithm.init_state(bucket)
        self.registration.remember_storages()
        self._scheduler = Scheduler(self.buckets, self.algorithm, self.group, delay=self._delay)

    # Every backward pass.

    def begin_step(self) -> None:
        """A synchronized backward pass starts."""
        if self._scheduler is not None:
            self._scheduler.begin(self.step)

    def mark_tensor_ready(self, param: torch.nn.Parameter) -> None:
        """Take the gradient of ``param``; start the exchange of its bucket if it was the last one.

        Raises:
            ConfigurationError: its gradient was there before in the same backward pass.
        """
        assert self._scheduler is not None
        if self._scheduler.mark_ready(param) is not None:
            self._scheduler.launch_ready()

    def mark_bucket_ready(self, bucket: Bucket) -> None:
        """Take the gradients of all parameters of ``bucket``."""
        for parameter in bucket.parameters:
            self.mark_tensor_ready(parameter)

    def mark_on_complete(self) -> None:
        """End the step: start what has not started, and wait for what this step needs.

        Raises:
            ConfigurationError: parameters without a gradient, and ``find_unused_parameters`` is off.
            CommunicationError: what happened in an exchange, wherever it ran.
        """
        scheduler = self._scheduler
        assert scheduler is not None
        held = []
        if missing := scheduler.missing():
            if not self._find_unused:
                self._abandon_missing([slot.name for slot in missing])
            held = scheduler.fill_missing()
        scheduler.complete()
        if self._find_unused and self.algorithm.traits.gathers_gradients:
            unused_here = {slot.name: gradient for slot, gradient in held if gradient is None}
            self._restore_unused(unused_here)
        self.step += 1

    def _abandon_missing(self, names: list[str]) -> None:
        error = unused({self.group.rank: names})
        assert self._scheduler is not None
        try:
            self._scheduler.drain()
        finally:
            self.group.abort(f"rank {self.group.rank}: {error.problem}")
        raise error

    def _restore_unused(self, unused_here: dict[str, Any]) -> None:
        """Gradients that no rank has stay None, so that optimizers skip them as without bagua."""
        used = torch.tensor([name not in unused_here for name in self.registration.names], dtype=torch.uint8)
        device = self.buckets[0].device if "cpu" not in self.group.global_communicator.device_types else "cpu"
        used = used.to(device)
        self.group.global_communicator.allreduce(used, ReduceOp.MAX)
        for parameter, flag in zip(self.registration.parameters, used.tolist(), strict=True):
            if not flag:
                parameter.grad = None

    # Between backward passes.

    def after_optimizers(self) -> None:
        """The optimizers have stepped: exchange what waited for that."""
        if self._scheduler is not None:
            self._scheduler.after_optimizers()

    def flush(self) -> None:
        """Leave no exchange owed or under way. Collective if the algorithm is."""
        if self._scheduler is not None:
            self._scheduler.flush()

    def close(self) -> None:
        """Give back threads and communicators; the module keeps working on its own. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.close()
        self.group.close()


def _check_bucket_bytes(bucket_bytes: int) -> int:
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ConfigurationError(
            "buckets cannot have this size",
            argument="bucket_bytes",
            expected="a number of bytes >= 1",
            seen=bucket_bytes,
        )
    return bucket_bytes


def unused(lacking: dict[int, list[str]]) -> ConfigurationError:
    """The error for parameters without a gradient, by rank."""
    seen = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in lacking.items())
    return ConfigurationError(
        f"parameters without a gradient in this backward pass: {seen}",
        argument="find_unused_parameters",
        expected="a gradient for every trainable parameter",
        seen=f"none on {'; '.join(f'rank {rank} for {len(names)} parameters' for rank, names in lacking.items())}",
        advice="Pass find_unused_parameters=True, or freeze them with requires_grad_(False) on every rank.",
    )
