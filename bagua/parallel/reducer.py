"""The bucket manager: collects gradients, forms buckets, and has them exchanged."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm, DistributedAlgorithm
from bagua.buckets import Bucket, check_align_bytes
from bagua.comm import ProcessGroup, ReduceOp, get_default_group
from bagua.comm.rendezvous import exchange
from bagua.errors import CommunicatorClosedError, ConfigurationError
from bagua.parallel.agreement import compare
from bagua.parallel.layout import agreed_order, cut, name_of, positions_of, unused
from bagua.parallel.options import (
    BucketType,
    check_bucket_bytes,
    check_leader,
    chosen_algorithm,
    refuse_unknown,
    with_hierarchy,
)
from bagua.parallel.registration import Registration
from bagua.parallel.saving import Remembered, collect, restore
from bagua.parallel.scheduler import Scheduler, twice

__all__ = ["DEFAULT_BUCKET_BYTES", "BucketType", "Reducer"]

DEFAULT_BUCKET_BYTES = 10_000_000
_UNLIMITED = 2**63


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
        chunking: choose a scatter-gather algorithm, and pad buckets so that they split
            evenly over the ranks.
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
        intra_comm_root_rank: the local rank that speaks for its host in hierarchical
            exchanges, on every host.
        unknown: refused.

    Attributes:
        group: private to this reducer.
        algorithm: bound to the group.
        step: synchronized backward passes so far.
        buckets: empty before they are formed.

    Raises:
        CollectiveMismatchError: the models or options of the ranks differ.
        InvalidTensorError: a parameter that cannot be put into a bucket.
        ConfigurationError: an argument that cannot be used.
        TypeError: an argument that does not exist.

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
        buckets: Sequence[Sequence[torch.Tensor | str]] = [],  # the documented default; never changed
        *,
        process_group: ProcessGroup | None = None,
        algorithm: Algorithm | DistributedAlgorithm | str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        find_unused_parameters: bool = False,
        delay_reduce: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        intra_comm_root_rank: int = 0,
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, Reducer.__init__.__kwdefaults__ or ())
        self.module = module
        self.optimizers = list(optimizers)
        self.declaration = chosen_algorithm(algorithm, bucket_type, hierarchical_reduce, decentralize_reduce, chunking)
        self._align_bytes = check_align_bytes(align_bytes)
        self._bucket_bytes = check_bucket_bytes(bucket_bytes)
        self._chunking = chunking
        self._fusion = fusion
        self._find_unused = find_unused_parameters
        self._delay = delay_reduce
        self._grad_scaler = grad_scaler
        self._wanted = [list(bucket) for bucket in buckets]
        user_group = get_default_group() if process_group is None else process_group
        self.algorithm = self.declaration.reify(user_group)
        self.registration = Registration(module)
        self.group = user_group.duplicate("model", leader=check_leader(intra_comm_root_rank, user_group))
        self.step = 0
        self.buckets: list[Bucket] = []
        self.arrival: list[torch.nn.Parameter] = []
        self._arrived: set[int] = set()
        self._scheduler: Scheduler | None = None
        self._phase: Hashable = None
        self._remembered: Remembered | None = None
        self._rebuilt = 0
        self._failure = ""
        try:
            self._agree()
        except BaseException:
            self.group.close()
            raise

    def _agree(self) -> None:
        """Make sure that all ranks mean the same, and form the buckets that the user wants."""
        compare(self._facts(), self.group.global_communicator, "models")
        if self._wanted:
            self._form(positions_of(self.registration, self._wanted))

    def _facts(self) -> list[str]:
        wanted = [[name_of(self.registration, member) for member in bucket] for bucket in self._wanted]
        options = {
            "bucket_bytes": self._bucket_bytes,
            "align_bytes": self._align_bytes,
            "chunking": self._chunking,
            "fusion": self._fusion,
            "find_unused_parameters": self._find_unused,
            "delay_reduce": self._delay,
            "buckets": wanted,
        }
        return [
            f"algorithm {self.declaration!r}",
            *(f"{name}={value}" for name, value in options.items()),
            *self.registration.facts,
        ]

    # What a caller may ask.

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, as on a group of one rank."""
        return self.group.size == 1 and not self.algorithm.traits.active_alone

    @property
    def initialized(self) -> bool:
        """Whether buckets have been formed."""
        return self._scheduler is not None

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a parameter without a gradient counts as zero."""
        return self._find_unused

    @property
    def exchanging(self) -> bool:
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
        return bucket.views(bucket.buffer())[bucket.names.index(slot.name)]

    @property
    def taker(self) -> Callable[[torch.nn.Parameter], None]:
        """What hooks call for each gradient of this backward pass: ``add_param`` or ``mark_tensor_ready``."""
        return self.add_param if self._scheduler is None else self._scheduler.take

    # The first backward pass.

    def add_param(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of ``param`` is there, in a backward pass before buckets exist.

        Raises:
            ConfigurationError: it was there before in the same backward pass.
        """
        if id(param) in self._arrived:
            raise twice(name_of(self.registration, param))
        self._arrived.add(id(param))
        self.arrival.append(param)

    def forget_arrivals(self) -> None:
        """The backward pass that ``add_param`` was told about is over."""
        self.arrival = []
        self._arrived = set()

    def initialize_buckets(self) -> list[list[torch.Tensor]]:
        """Form the buckets in the order in which gradients appeared on rank 0. Collective.

        Returns:
            The parameters of each bucket.

        Raises:
            ConfigurationError: on all ranks, if some rank lacks gradients and
                ``find_unused_parameters`` is off.
        """
        arrival = self.arrival
        self.forget_arrivals()
        communicator = self.group.global_communicator
        order = agreed_order(self.registration, arrival, communicator, find_unused=self._find_unused)
        self._form(cut(self.registration, order, self._bytes_per_bucket()))
        return [list(bucket.parameters) for bucket in self.buckets]

    def _bytes_per_bucket(self) -> int:
        return _UNLIMITED if self.algorithm.bucketing(self.step).one_bucket else self._bucket_bytes

    def _form(self, members: Sequence[Sequence[int]]) -> None:
        chunked = self._chunking or self.algorithm.bucketing(self.step).chunked
        self.buckets = [
            Bucket(
                index,
                [self.registration.names[position] for position in positions],
                [self.registration.parameters[position] for position in positions],
                self.group.global_communicator,
                align_bytes=self._align_bytes,
                shares=self.group.size if chunked else 1,
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
        remembered, self._remembered = self._remembered, None
        if remembered is not None:
            restore(self.buckets, remembered)
            if remembered["buckets"] == [list(bucket.names) for bucket in self.buckets]:
                self._scheduler.resume(remembered["exchanged"])

    # Every backward pass.

    def begin_step(self) -> None:
        """A synchronized backward pass starts."""
        self.check_usable()
        if self._scheduler is None:
            return
        if self.algorithm.phase(self.step) != self._phase:
            self._form_anew()
        if self._grad_scaler is not None:
            self.algorithm.loss_scale = self._grad_scaler.get_scale()
        self._scheduler.begin(self.step)

    def _form_anew(self) -> None:
        """The algorithm has changed its ways: buckets of another kind, in the same order."""
        order = [self.registration.names.index(name) for bucket in self.buckets for name in bucket.names]
        self._put_aside()
        self._form(cut(self.registration, order, self._bytes_per_bucket()))

    def mark_tensor_ready(self, param: torch.nn.Parameter) -> None:
        """Take the gradient of ``param``; start the exchange of its bucket if it was the last one.

        Raises:
            ConfigurationError: its gradient was there before in the same backward pass.
        """
        assert self._scheduler is not None
        self._scheduler.take(param)

    def mark_bucket_ready(self, bucket: Bucket) -> None:
        """Take the gradients of all parameters of ``bucket``."""
        for parameter in bucket.parameters:
            self.mark_tensor_ready(parameter)

    def mark_on_complete(self) -> None:
        """End the step: start what has not started, and wait for what this step needs.

        A backward pass that brought no gradient at all, as that of ``torch.autograd.grad``
        for the inputs, is no step, unless ``find_unused_parameters`` is on.

        Raises:
            ConfigurationError: parameters without a gradient, and ``find_unused_parameters`` is off.
            CommunicationError: what happened in an exchange, wherever it ran.
        """
        scheduler = self._scheduler
        assert scheduler is not None
        missing = scheduler.missing()
        if missing and not self._find_unused:
            if len(missing) == len(scheduler.slots):
                return
            raise unused({self.group.rank: [slot.name for slot in missing]})
        without = scheduler.fill_missing(missing)
        scheduler.complete()
        if self._find_unused and self.algorithm.traits.gathers_gradients and self.group.size > 1:
            self._restore_unused({slot.name for slot in without})
        self.step += 1

    def _restore_unused(self, unused_here: set[str]) -> None:
        """Gradients that no rank has stay None, so that optimizers skip them as without bagua."""
        communicator = self.group.global_communicator
        device = torch.device("cpu") if "cpu" in communicator.device_types else self.buckets[0].device
        flags = [name not in unused_here for name in self.registration.names]
        used = torch.tensor(flags, dtype=torch.uint8, device=device)
        communicator.allreduce(used, ReduceOp.MAX)
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

    def give_up(self, reason: BaseException | str) -> None:
        """End a step that cannot be finished here; ranks that wait for the rest of it get ``PeerLostError``."""
        problem = reason if isinstance(reason, str) else getattr(reason, "problem", None) or repr(reason)
        self.group.abort(f"rank {self.group.rank}: {problem}")
        self._failure = self._failure or str(problem)
        if self._scheduler is not None:
            self._scheduler.give_up()

    def check_usable(self) -> None:
        """Raise if an earlier step could not be finished.

        Raises:
            CommunicatorClosedError: it could not.
        """
        if self._failure:
            raise CommunicatorClosedError(
                f"this model can no longer be synchronized: {self._failure}",
                rank=self.group.rank,
                advice="Wrap it anew on all ranks, from a checkpoint if need be.",
            )

    def _put_aside(self) -> None:
        """Take the buckets apart, and keep what the algorithm remembers for those to come."""
        if self._scheduler is not None:
            self._scheduler.flush()
            self._scheduler.close()
            self._remembered = collect(self.buckets, [-1] * len(self.buckets))
        self._scheduler = None
        self.buckets = []
        self.forget_arrivals()

    def rebuild(self, difference: str) -> None:
        """Register the module anew, because it has changed on all ranks. Collective.

        The next backward pass forms new buckets; what the algorithm remembers is carried
        over to parameters of the same name.

        Args:
            difference: what has changed here.

        Raises:
            CollectiveTimeoutError: the module has not changed on all ranks.
            CollectiveMismatchError: it has become different on different ranks.
        """
        self._rebuilt += 1
        topic = f"rebuild{self._rebuilt}"
        group = self.group
        try:
            exchange(group.store, topic, group.rank, group.ranks, difference, group.timeout_s)
        except BaseException:
            group.abort(
                f"rank {group.rank} waited for a change of the model that other ranks did not make: {difference}"
            )
            raise
        self._put_aside()
        self.registration = Registration(self.module)
        self._wanted = []
        self._agree()

    def reset(
        self,
        hierarchical_reduce: bool | None = None,
        buckets: Sequence[Sequence[torch.Tensor | str]] | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """Go on with other settings. Collective; what the algorithm remembers is carried over.

        Args:
            hierarchical_reduce: None leaves it as it is.
            buckets: lists of parameters or names; None forms buckets in the next backward pass.
            bucket_bytes: None leaves it as it is.

        Raises:
            ConfigurationError: the algorithm has no hierarchical form, or bad buckets.
            CollectiveMismatchError: ranks asked for different settings.
        """
        declaration = self.declaration
        if hierarchical_reduce is not None:
            declaration = with_hierarchy(declaration, hierarchical_reduce)
        if buckets is not None:
            positions_of(self.registration, buckets)
        if bucket_bytes is not None:
            self._bucket_bytes = check_bucket_bytes(bucket_bytes)
        self._put_aside()
        self.declaration = declaration
        self.algorithm = declaration.reify(self.algorithm.process_group)
        self._wanted = [list(bucket) for bucket in buckets or []]
        self._agree()

    def close(self) -> None:
        """Give back threads and communicators; the module keeps working on its own. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.close()
        self.group.close()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers on this rank; the weights are in the module's own ``state_dict``.

        Every rank saves its own. Made of numbers, strings, lists, dictionaries and tensors.
        """
        remembered = self._remembered
        if self._scheduler is not None:
            self._scheduler.after_optimizers()
            remembered = collect(self.buckets, self._scheduler.settle())
        return {"algorithm": repr(self.declaration), "step": self.step, **(remembered or collect([], []))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, in the same buckets. Collective.

        Args:
            state_dict: of this rank.

        Raises:
            ConfigurationError: it belongs to another algorithm or to other parameters.
            CollectiveMismatchError: ranks load different checkpoints.
        """
        kind = type(self.declaration).__name__
        if state_dict["algorithm"].partition("(")[0] != kind:
            raise ConfigurationError(
                "this state belongs to another algorithm",
                argument="state_dict",
                expected=kind,
                seen=state_dict["algorithm"],
            )
        members = positions_of(self.registration, state_dict["buckets"]) if state_dict["buckets"] else []
        facts = [f"step {state_dict['step']}", *(f"bucket {names}" for names in state_dict["buckets"])]
        compare(facts, self.group.global_communicator, "checkpoints")
        self._put_aside()
        self.step = state_dict["step"]
        self._remembered = Remembered(**{key: state_dict[key] for key in Remembered.__annotations__})  # type: ignore[typeddict-item]
        if members and not self.idle:
            self._form(members)
