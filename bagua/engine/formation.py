"""Forming buckets: the arguments, the agreement of all ranks, the first backward pass, and starting over."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl, Exchange
from bagua.buckets import Bucket
from bagua.comm import Communicator, Group, ProcessGroup, as_group, close_with, get_default_group
from bagua.engine.autotune.search import Setting
from bagua.engine.buckets.layout import (
    agreed_order,
    bucket_lists,
    cut,
    foreign,
    log_buckets,
    name_of,
    positions_of,
    twice,
)
from bagua.engine.buckets.registration import Registration, buffers_of, checked_model
from bagua.engine.gradients import Unused
from bagua.engine.meeting import meet
from bagua.engine.options import EngineOptions, check_bucket_bytes, check_leader, check_optional_flag
from bagua.engine.schedule import courses
from bagua.engine.schedule.belongings import Belongings
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.schedule.tracks import Clock
from bagua.engine.schedule.whereabouts import whereabouts
from bagua.engine.state.agreement import compare_or_refuse
from bagua.engine.state.digests import digest_of_gradients
from bagua.engine.state.equality import EqualityCheck, warn_of_equal_gradients
from bagua.engine.state.replicas import make_weights_equal
from bagua.engine.state.saving import Remembered
from bagua.errors import BaguaError, blame


def _tell_nobody(_: BaseException | str) -> None:
    """No islands want to know why training has ended here."""


class BucketFormation:
    """The half of ``Reducer`` that ends when buckets exist; see there."""

    #: Told why, after a step that could not be finished. It must not raise.
    after_failure: Callable[[BaseException | str], object] = staticmethod(_tell_nobody)

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        declaration: Algorithm,
        process_group: Group | None,
        options: EngineOptions,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.declaration = declaration
        self.options = options
        user_group = get_default_group() if process_group is None else as_group(process_group, "process_group")
        self.algorithm = declaration.reify(user_group)
        leader = check_leader(options.intra_comm_root_rank, user_group)
        refusal = self._register()
        self.group = user_group.duplicate("model", leader=leader)
        courses.describe(self.group, partial(whereabouts, weakref.ref(self)))
        self.belongings = self._own(self.group)
        self.step = 0
        self.equality = EqualityCheck(declaration, options)
        self.restored_at = -1
        self._versions: list[int] = []
        self.began = 0
        self._phase: Hashable = None
        self.between_steps = False
        self.follows_gradients = True
        self.buckets: list[Bucket] = []
        self._order: list[int] = []
        self.arrival: list[torch.nn.Parameter] = []
        self._arrived: set[int] = set()
        self._unused = Unused()
        self.scheduler: Scheduler | None = None
        self.courses = courses.Courses(
            self.group, self.belongings, courses.longest_period(self.declaration.every_exchange())
        )
        self.remembered: Remembered | None = None
        self.flights: list[dict[str, Any]] = []
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
        group.when_closing(partial(belongings.end, weakref.WeakMethod(self.end_exchanges)))
        self._close_soon = close_with(self, belongings)
        return belongings

    def _register(self) -> BaguaError | None:
        """Register the module as it is now; if it cannot be trained, say why to ``_agree``.

        Raising here would leave ranks that have no reason to refuse waiting for this one.
        """
        try:
            self.registration = Registration(self.module)
            self._known = frozenset(map(id, self.registration.parameters))
            self.model = checked_model(self.module, self.registration, self.optimizers, self.declaration)
            if self.algorithm.process_group.size > 1:
                served = self.algorithm.process_group.global_communicator.device_types
                self.registration.refuse_other_devices(served)
        except BaguaError as error:
            return error
        return None

    def _agree(self, refusal: BaguaError | None = None) -> None:
        """Make sure that all ranks mean the same, and form the buckets that the user wants."""
        facts = self.facts if refusal is None else []
        compare_or_refuse(facts, self.group.global_communicator, "models", refusal)
        if self.options.buckets:
            self.form(positions_of(self.registration, self.options.buckets))
        else:
            self.form_at_once()

    def form_at_once(self) -> None:
        """Form buckets where nothing depends on the order of gradients: a rank may have none of some parameters."""
        now = self.exchanges_of(self.declaration.phase(self.step, self.model))
        if not self.idle and (self.algorithm.plane is not None or not courses.follows_gradients(now)):
            self._order = list(reversed(range(len(self.registration.names))))  # About the order of gradients.
            self.form(self.layout(self.options.bucket_bytes))

    @property
    def facts(self) -> list[str]:
        """What must be equal on all ranks: the algorithm, the options, and the parameters."""
        wanted = [[name_of(self.registration, member) for member in bucket] for bucket in self.options.buckets]
        return [f"algorithm {self.declaration!r}", *self.options.facts, f"buckets={wanted}", *self.registration.facts]

    # What a caller may ask.

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, as on a group of one rank."""
        return self.group.size == 1 and not self.declaration.acts_alone

    @property
    def initialized(self) -> bool:
        """Whether buckets have been formed."""
        return self.scheduler is not None

    bucket_initialized = initialized

    def end_exchanges(self) -> None:
        """Wait for what is under way, and apply nothing."""
        if self.scheduler is not None:
            self.scheduler.settle()

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
        if self.scheduler is not None and not self.follows_gradients:
            return [list(bucket.parameters) for bucket in self.buckets]
        order, digests = agreed_order(
            self.registration,
            arrival,
            self.communicator,
            find_unused=self.options.find_unused_parameters,
            same_order=any(one.parts.same_order for one in self.declaration.every_exchange()),
            told=digest_of_gradients(arrival) if self.step == 0 else "",
        )
        warn_of_equal_gradients(digests, self.group.rank)
        self._order = order
        self.form(self.layout(self.options.bucket_bytes))
        return [list(bucket.parameters) for bucket in self.buckets]

    def layout(self, bucket_bytes: int) -> list[list[int]]:
        """Positions of the parameters of each bucket, if buckets are closed at so many bytes.

        Buckets that the user wants are what they are.
        """
        if self.options.buckets:
            return positions_of(self.registration, self.options.buckets)
        return cut(self.registration, self._order, bucket_bytes)

    def form(self, members: Sequence[Sequence[int]]) -> None:
        if not self._order:
            self._order = [position for positions in members for position in positions]
        phase = self._note_phase()
        chunked = self.options.chunking or courses.is_chunked(self.exchanges_of(phase))
        self.buckets = [
            Bucket(
                index,
                [self.registration.names[position] for position in positions],
                [self.registration.parameters[position] for position in positions],
                self.group.global_communicator,
                align_bytes=self.options.align_bytes,
                shares=self.group.size if chunked else 1,
                fusion=self.options.fusion,
            )
            for index, positions in enumerate(members)
        ]
        log_buckets(self.group.rank, self.step, self.declaration, self.buckets)
        self.courses.forget()
        self.register_bagua_buckets()

    def _note_phase(self) -> Hashable:
        phase = self.declaration.phase(self.step, self.model)
        if phase != self._phase:
            self.began = 0 if self._phase is None else self.step
            self._enter_phase(phase)
        return phase

    def _enter_phase(self, phase: Hashable) -> None:
        self._phase, exchanges = phase, self.exchanges_of(phase)
        self.between_steps = courses.is_between_steps(exchanges)
        self.follows_gradients = courses.follows_gradients(exchanges)

    def go_to(self, step: int, began: int) -> None:
        """Go on with step ``step``, of a phase that began with step ``began``: both come from a checkpoint."""
        self.step, self.began, self.restored_at = step, began, step
        self.equality.restart(step)
        self._enter_phase(self.declaration.phase(step, self.model))

    def exchanges_of(self, phase: Hashable) -> tuple[Exchange, ...]:
        """What is exchanged in this phase on a group of this size."""
        found = self.declaration.exchanges(phase)
        return tuple(one for one in found if self.group.size > 1 or one.alone)

    def register_bagua_buckets(self) -> None:
        """Give the buckets their flat memory and state, and schedule them."""
        try:
            self._allocate()
            self._enter()
        except BaseException as error:  # Other ranks may have no reason to fail, and would wait.
            self._failure = repr(error)
            culprit, told = blame(error, self.group.ranks[self.group.rank], "the making of its buckets")
            self.group.abort(told, culprit)
            raise
        self.registration.remember_storages()
        scheduler = self.scheduler
        assert scheduler is not None
        remembered, self.remembered = self.remembered, None
        if remembered is not None:
            self.courses.restore(remembered)
            self.courses.board(scheduler, self.flights)
            self.flights = []
        if self.algorithm.plane is not None:
            self.algorithm.plane.attach(self.buckets, partial(buffers_of, self.module), self.group, self.step)

    def _allocate(self) -> None:
        exchanges = self.exchanges_of(self._phase)
        sent = any(one.what is not None and one.what.exchangeable_weights for one in exchanges)
        for bucket in self.buckets:
            bucket.fuse_weights(exchangeable=sent)
            if courses.gathers(exchanges):
                bucket.allocate_gradients()

    def _enter(self) -> None:
        """Have the exchanges of the phase executed."""
        own = self.courses.of(self.exchanges_of(self._phase), self.buckets, self.model, self.options)
        self.scheduler = Scheduler(self.buckets, own, delay=self.options.delay_reduce)

    # What starts from weights.

    def begin_from_weights(self) -> None:
        """Make what starts from the weights, once they are what training begins with. Collective if it is shared."""
        if not self.courses.fresh:
            return
        shared = self.courses.fresh_and_shared
        if self.group.size > 1 and shared:
            if loads := self.equality.loads.unmet():
                meet(self.group, f"load{loads}", "weights were loaded")
            make_weights_equal([self.model.parameters[name] for name in shared], self.communicator)
        self.courses.begin_from_weights()

    def settle_loads(self) -> None:
        """Training goes on, or is saved: begin again from weights that were loaded, unless they were put back.

        What belongs to them may have been restored in the same step: that stays.
        """
        if self.equality.note_load(self.step, self.group, self.registration) and self.restored_at != self.step:
            self.courses.weights_were_replaced()

    @property
    def clock(self) -> Clock:
        """The training step that comes next, or is under way."""
        scaler = self.options.grad_scaler
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        return Clock(self.step, self.step - self.began + 1, loss_scale)

    # Starting over.

    def _follow_phase(self) -> None:
        """Have the exchanges of this step's phase executed, and make what starts from the weights as they are now."""
        if self.declaration.phase(self.step, self.model) != self._phase:
            self._change_phase()
        self.begin_from_weights()

    def _change_phase(self) -> None:
        """The algorithm has changed its ways: other exchanges, in other buckets only if they need such."""
        assert self.scheduler is not None
        before, after = self.exchanges_of(self._phase), self.exchanges_of(self.declaration.phase(self.step, self.model))
        if courses.layout_of(before) != courses.layout_of(after):
            self.put_aside(settle=False)
            self.form(self.layout(self.options.bucket_bytes))
            return
        self.scheduler.flush()
        self.scheduler.dissolve()
        self._note_phase()
        self._enter()

    @property
    def setting(self) -> Setting:
        """What tuning may change, as it is now."""
        return Setting(self.options.bucket_bytes, bool(self.declaration.is_hierarchical))

    def recut(self, setting: Setting) -> None:
        """Go on at once with another setting, which all ranks chose together in the same step.

        Parameters keep their order, and what the algorithm remembers is carried over, as are flights of parts, which
        are no buckets.
        """
        declaration, algorithm = self.declaration, self.algorithm
        if setting.hierarchical != self.setting.hierarchical:
            declaration = declaration.in_form(hierarchical=setting.hierarchical)
            algorithm = self._bind(declaration)
        if self.scheduler is not None:
            self.flights = courses.saved_flights(self.scheduler.withdraw_parts())
        self.put_aside()
        self.declaration, self.algorithm = declaration, algorithm
        self.options = dataclasses.replace(self.options, bucket_bytes=setting.bucket_bytes)
        self.form(self.layout(setting.bucket_bytes))

    def _bind(self, declaration: Algorithm) -> AlgorithmImpl:
        """Another declaration on the same ranks, for the same model."""
        algorithm = declaration.reify(self.algorithm.process_group)
        declaration.check(self.model)
        return algorithm

    def put_aside(self, *, settle: bool = True) -> None:
        """Take the buckets apart, and keep what the algorithm remembers for those to come."""
        if settle and self.algorithm.plane is not None:
            self.algorithm.plane.settle()
        self.settle_loads()
        if self.scheduler is not None:
            self.scheduler.flush()
            self.scheduler.dissolve()
            self.remembered = self.courses.remembered()
        self.scheduler = None
        self._unused = Unused()
        self.buckets = []
        self.forget_arrivals()

    def rebuild(self, difference: str) -> None:
        """Register the module anew, because it has changed on all ranks. Collective.

        The next backward pass forms new buckets; what the algorithm remembers is carried
        over to parameters of the same name.

        Args:
            difference: difference that has appeared here.

        Raises:
            CollectiveTimeoutError: the module has not changed on all ranks.
            CollectiveMismatchError: it has not, or has become different on different ranks.
        """
        self._rebuilt += 1
        if self.algorithm.plane is not None:
            self.algorithm.plane.settle()  # This rank serves the others in the background until they are here.
        meet(self.group, f"rebuild{self._rebuilt}", difference)
        self.put_aside(settle=False)
        self._order = []
        refusal = self._register()
        self.options = dataclasses.replace(self.options, buckets=())
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
            declaration = declaration.in_form(hierarchical=hierarchical_reduce)
        wanted = bucket_lists(buckets or [])
        if wanted:
            positions_of(self.registration, wanted)
        size = self.options.bucket_bytes if bucket_bytes is None else check_bucket_bytes(bucket_bytes)
        self.put_aside()
        self.declaration = declaration
        self.algorithm = self._bind(declaration)
        self.options = dataclasses.replace(self.options, buckets=wanted, bucket_bytes=size)
        self._agree()
