"""Forming buckets: the arguments, the agreement of all ranks, the first backward pass, and starting over."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Sequence
from functools import partial

import torch
from typing_extensions import Never

from bagua.algorithms import Algorithm, AlgorithmImpl, DistributedAlgorithm
from bagua.buckets import Bucket, check_align_bytes
from bagua.comm import Communicator, Group, ProcessGroup, get_default_group
from bagua.comm.lifetime.closer import close_with
from bagua.comm.startup.adoption import as_group
from bagua.comm.startup.rendezvous import exchange
from bagua.engine.agreement import compare_or_refuse
from bagua.engine.autotune.search import Setting
from bagua.engine.autotune.settings import AutotuneSettings, tuning_from
from bagua.engine.belongings import Belongings
from bagua.engine.layout import agreed_order, bucket_lists, cut, foreign, name_of, positions_of
from bagua.engine.options import (
    BucketType,
    check_bucket_bytes,
    check_leader,
    check_optional_flag,
    check_what_engines_get,
    chosen_algorithm,
    optimizer_list,
    refuse_unknown,
    with_hierarchy,
)
from bagua.engine.registration import Registration, buffers_of
from bagua.engine.saving import Remembered, collect, restore
from bagua.engine.scheduler import Scheduler, twice
from bagua.errors import BaguaError, CommunicationError, blame

__all__ = ["DEFAULT_BUCKET_BYTES", "BucketFormation"]

DEFAULT_BUCKET_BYTES = 10_000_000
_UNLIMITED = 2**63


class BucketFormation:
    """The half of ``Reducer``, which see, that ends when buckets exist."""

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
        process_group: Group | None = None,
        algorithm: Algorithm | DistributedAlgorithm | str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        find_unused_parameters: bool = False,
        delay_reduce: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        intra_comm_root_rank: int = 0,
        autotune: bool | AutotuneSettings | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, BucketFormation.__init__.__kwdefaults__ or ())
        check_what_engines_get(
            module,
            grad_scaler,
            fusion=fusion,
            find_unused_parameters=find_unused_parameters,
            delay_reduce=delay_reduce,
        )
        self.module = module
        self.optimizers = optimizer_list(optimizers)
        self.declaration = chosen_algorithm(algorithm, bucket_type, hierarchical_reduce, decentralize_reduce, chunking)
        self._align_bytes = check_align_bytes(align_bytes)
        self._bucket_bytes = check_bucket_bytes(bucket_bytes)
        self._chunking = chunking
        self._fusion = fusion
        self._find_unused, self._delay = find_unused_parameters, delay_reduce
        self._grad_scaler = grad_scaler
        self.tuning, self.autotune = tuning_from(autotune)
        self._wanted = bucket_lists(buckets)
        user_group = get_default_group() if process_group is None else as_group(process_group, "process_group")
        self.algorithm = self.declaration.reify(user_group)
        leader = check_leader(intra_comm_root_rank, user_group)
        refusal = self._register()
        self.group = user_group.duplicate("model", leader=leader)
        self.belongings = self._own(self.group)
        self.step = 0
        self.buckets: list[Bucket] = []
        self._order: list[int] = []
        self.arrival: list[torch.nn.Parameter] = []
        self._arrived: set[int] = set()
        self._scheduler: Scheduler | None = None
        self._phase: Hashable = None
        self.between_steps = False
        self._remembered: Remembered | None = None
        self._rebuilt = 0
        self._failure = ""
        try:
            self._agree(refusal)
        except BaseException:
            self.group.close()
            raise

    def _own(self, group: ProcessGroup) -> Belongings:
        """Have ``group`` closed when this object is garbage, and not before exchanges have ended."""
        belongings = Belongings(group)
        group.when_closing(partial(_end_exchanges, weakref.ref(self), belongings))
        self._close_soon = close_with(self, belongings)
        return belongings

    def _register(self) -> BaguaError | None:
        """Register the module as it is now; if it cannot be trained, say why to ``_agree``.

        Raising here would leave ranks that have no reason to refuse waiting for this one.
        """
        try:
            self.registration = Registration(self.module)
            self._known = frozenset(map(id, self.registration.parameters))
            named = dict(zip(self.registration.names, self.registration.parameters, strict=True))
            self.algorithm.check_model(named, self.optimizers)
            if self.algorithm.process_group.size > 1:
                served = self.algorithm.process_group.global_communicator.device_types
                self.registration.refuse_other_devices(served)
        except BaguaError as error:
            return error
        return None

    def _agree(self, refusal: BaguaError | None = None) -> None:
        """Make sure that all ranks mean the same, and form the buckets that the user wants."""
        facts = self._facts() if refusal is None else []
        compare_or_refuse(facts, self.group.global_communicator, "models", refusal)
        if self._wanted:
            self._form(positions_of(self.registration, self._wanted))
        elif self.algorithm.traits.background and not self.idle:
            # Ranks need not come to the end of a first step together. Gradients appear about in this order.
            self._order = list(reversed(range(len(self.registration.names))))
            self._form(self.layout(self._bucket_bytes))

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
            "autotune": f"{self.tuning.value}, {self.autotune.agreed}",
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

    bucket_initialized = initialized

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a parameter without a gradient counts as zero."""
        return self._find_unused

    def end_exchanges(self) -> None:
        """Wait for what is under way, and apply nothing."""
        if self._scheduler is not None:
            self._scheduler.settle()

    @property
    def communicator(self) -> Communicator:
        """The private communicator, for calls of the thread that trains: exchanges in other threads are over."""
        self.end_exchanges()
        return self.group.global_communicator

    # The first backward pass.

    def add_param(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of ``param`` is there, in a backward pass before buckets exist.

        Raises:
            ConfigurationError: it was there before in the same backward pass, or is no parameter of the module.
        """
        if id(param) not in self._known:
            raise foreign(param)
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
        order = agreed_order(
            self.registration,
            arrival,
            self.communicator,
            find_unused=self._find_unused,
            same_order=self.algorithm.traits.same_order,
        )
        self._order = order
        self._form(self.layout(self._bucket_bytes))
        return [list(bucket.parameters) for bucket in self.buckets]

    def layout(self, bucket_bytes: int) -> list[list[int]]:
        """Positions of the parameters of each bucket, if buckets are closed at so many bytes.

        Buckets that the user wants are what they are.
        """
        if self.algorithm.bucketing(self.step).one_bucket:
            return cut(self.registration, self._order, _UNLIMITED)
        if self._wanted:
            return positions_of(self.registration, self._wanted)
        return cut(self.registration, self._order, bucket_bytes)

    def _form(self, members: Sequence[Sequence[int]]) -> None:
        if not self._order:
            self._order = [position for positions in members for position in positions]
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
        self.between_steps = self.algorithm.between_steps(self.step)
        self.register_bagua_buckets()

    def register_bagua_buckets(self) -> None:
        """Give the buckets their flat memory and state, and schedule them."""
        try:
            self._allocate()
        except BaseException as error:  # Other ranks may have no reason to fail, and would wait.
            self._failure = repr(error)
            culprit, told = blame(error, self.group.ranks[self.group.rank], "the making of its buckets")
            self.group.abort(told, culprit)
            raise
        self.registration.remember_storages()
        self._scheduler = Scheduler(self.buckets, self.algorithm, self.group, delay=self._delay)
        self.belongings.executors = self._scheduler.executors
        remembered, self._remembered = self._remembered, None
        if remembered is not None:
            restore(self.buckets, remembered)
            if remembered["buckets"] == [list(bucket.names) for bucket in self.buckets]:
                self._scheduler.resume(remembered["exchanged"])
        if self.algorithm.traits.background:
            self.algorithm.attach(self.buckets, partial(buffers_of, self.module), self.group, self.step)

    def _allocate(self) -> None:
        for bucket in self.buckets:
            bucket.fuse_weights(exchangeable=self.algorithm.traits.sends_weights)
            if self.algorithm.traits.gathers_gradients and not self.between_steps:
                bucket.allocate_gradients()
            bucket.state = self.algorithm.init_state(bucket)

    # Starting over.

    def _form_anew(self) -> None:
        """The algorithm has changed its ways: buckets of another kind, in the same order."""
        self._put_aside(settle=False)
        self._form(self.layout(self._bucket_bytes))

    @property
    def setting(self) -> Setting:
        """What tuning may change, as it is now."""
        return Setting(self._bucket_bytes, bool(getattr(self.declaration, "hierarchical", False)))

    def recut(self, setting: Setting) -> None:
        """Go on at once with another setting, which all ranks chose together in the same step.

        Parameters keep their order, and what the algorithm remembers is carried over.
        """
        if setting.hierarchical != self.setting.hierarchical:
            declaration = with_hierarchy(self.declaration, setting.hierarchical)
            algorithm = self._bind(declaration)
        else:
            declaration, algorithm = self.declaration, self.algorithm
        self._put_aside()
        self.declaration, self.algorithm = declaration, algorithm
        self._bucket_bytes = setting.bucket_bytes
        self._form(self.layout(setting.bucket_bytes))

    def _bind(self, declaration: Algorithm) -> AlgorithmImpl:
        """Another declaration on the same ranks, for the same model."""
        algorithm = declaration.reify(self.algorithm.process_group)
        named = dict(zip(self.registration.names, self.registration.parameters, strict=True))
        algorithm.check_model(named, self.optimizers)
        return algorithm

    def _put_aside(self, *, settle: bool = True) -> None:
        """Take the buckets apart, and keep what the algorithm remembers for those to come."""
        if settle:
            self.algorithm.settle()
        if self._scheduler is not None:
            self._scheduler.flush()
            self._scheduler.dissolve()
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
        self.algorithm.settle()  # This rank serves the others in the background until they are here.
        try:
            exchange(group.store, topic, group.rank, group.ranks, difference, group.timeout_s)
        except BaseException:
            told = f"it waited for a change of the model that other ranks did not make: {difference}"
            group.abort(told, group.ranks[group.rank])
            raise
        self._put_aside(settle=False)
        self._order = []
        refusal = self._register()
        self._wanted = []
        self._agree(refusal)

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
        check_optional_flag(hierarchical_reduce=hierarchical_reduce)
        declaration = self.declaration
        if hierarchical_reduce is not None:
            declaration = with_hierarchy(declaration, hierarchical_reduce)
        wanted = bucket_lists(buckets or [])
        if wanted:
            positions_of(self.registration, wanted)
        if bucket_bytes is not None:
            self._bucket_bytes = check_bucket_bytes(bucket_bytes)
        self._put_aside()
        self.declaration = declaration
        self.algorithm = self._bind(declaration)
        self._wanted = wanted
        self._agree()


def _end_exchanges(reference: weakref.ref[BucketFormation], belongings: Belongings) -> None:
    """The group is closing: a slower rank may still need what this one sends in its last step."""
    formation = reference()
    if formation is not None:
        with contextlib.suppress(CommunicationError):  # Nobody will use what this rank would have received.
            formation.end_exchanges()
    else:
        belongings.wait_until_idle()
    belongings.groups.clear()
