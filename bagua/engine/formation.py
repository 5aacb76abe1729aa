"""What all ranks agree on before they train a module together, and again when something about it changes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl
from bagua.buckets import Bucket
from bagua.comm import Communicator, Group, ProcessGroup, ReduceOp, as_group, close_with, get_default_group
from bagua.engine.buckets.layout import GradientOrder, bucket_lists, name_of, positions_of
from bagua.engine.buckets.registration import Registration, checked_model, warn_of_strangers
from bagua.engine.options import EngineOptions, Setting, check_bucket_bytes, check_leader, check_optional_flag
from bagua.engine.schedule.courses import follows_gradients, is_chunked, layout_of
from bagua.engine.schedule.lanes import ModelLanes, describe
from bagua.engine.schedule.phases import Phases
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.state.agreement import StepFailure, compare_or_refuse, meet
from bagua.engine.state.equality import Belief, EqualityCheck, warn_of_equal_gradients
from bagua.engine.state.replicas import are_equal, average
from bagua.errors import BaguaError, CommunicationError
from bagua.primitives import digest_of_gradients

_log = logging.getLogger("bagua")


class Formation:
    """A module, the ranks that train it, and the buckets in which its algorithm exchanges.

    Building one is collective, and so is everything that forms buckets.

    Args:
        module: module whose trainable parameters are exchanged.
        optimizers: optimizers that step them.
        declaration: algorithm that says what is exchanged.
        process_group: ranks; None means all.
        options: options of the engine.

    Attributes:
        module, optimizers, options: as given; ``reset`` and tuning change the options.
        declaration: the algorithm; ``algorithm`` is that bound to the ranks.
        group: private to this model.
        lanes: threads and connections to be given back.
        registration: parameters as they are trained now.
        model: facts about the module for the algorithm.
        order: order in which gradients appear.
        phases: the step that comes next, and what is exchanged in it.
        scheduler: buckets, and the exchanges in them.
        equality: comparison of what must be equal on all ranks.
        failure: record of what could not be finished here.
        idle: True if there is nothing to do, as on a group of one rank.
        acts_between: True if the algorithm wants to know of the beginning of each step.
        to_compare: step that ended last, if ranks have yet to compare what must be equal after it; else None.
    """

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
        self.phases = Phases(user_group.size, options.grad_scaler)
        self._rebuilt = 0
        refusal = self._register()
        self.group = user_group.duplicate("model", leader=leader)
        describe(self.group, partial(_whereabouts, weakref.ref(self)))
        self.lanes = ModelLanes(self.group)
        self.scheduler = Scheduler(self.group, self.lanes)
        self._own(self.group)
        self._bind(declaration, self.algorithm)
        self.equality = EqualityCheck(declaration, options)
        self.to_compare: int | None = None
        #: Parameters that got no gradient here, by step: in the last steps with these buckets.
        self._without: list[set[str]] = []
        self.failure = StepFailure(self.group)
        try:
            self._agree(refusal)
        except BaseException:
            self.group.close()
            raise
        if self.group.rank == 0:
            warn_of_strangers(self.module, self.optimizers)

    def _own(self, group: ProcessGroup) -> None:
        """Have ``group`` closed when this object is garbage, and not before exchanges have ended."""
        group.when_closing(partial(self.phases.ending.tell, group.global_communicator))
        group.when_closing(partial(self.lanes.end, weakref.WeakMethod(self.scheduler.settle)))
        self.close_soon = close_with(self, self.lanes)

    # What all ranks agree on.

    def _register(self) -> BaguaError | None:
        """Register the module as it is now; if it cannot be trained, say why to ``_agree``.

        Raising here would leave ranks that have no reason to refuse waiting for this one.
        """
        try:
            self.registration = Registration(self.module)
            self.order = GradientOrder(self.registration)
            self.model = checked_model(self.module, self.registration, self.optimizers, self.declaration)
            self.phases.bind(self.declaration, self.model)
            if not self._rebuilt:
                for one in self.declaration.every_exchange():
                    one.parts.check(self.model.parameters)
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

    @property
    def facts(self) -> list[str]:
        """What must be equal on all ranks: the algorithm, the options, and the parameters."""
        wanted = [[name_of(self.registration, member) for member in bucket] for bucket in self.options.buckets]
        return [f"algorithm {self.declaration!r}", *self.options.facts, f"buckets={wanted}", *self.registration.facts]

    @property
    def communicator(self) -> Communicator:
        """The private communicator, for calls of the thread that trains: exchanges in other threads are over."""
        self.scheduler.settle()
        return self.group.global_communicator

    # Forming buckets.

    def form_at_once(self) -> None:
        """Form buckets where nothing depends on the order of gradients: a rank may have none of some parameters."""
        background = self.declaration.in_background
        if not self.idle and (background or not follows_gradients(self.phases.coming)):
            self.order.suppose_reversed()
            self.form(self.layout(self.options.bucket_bytes))

    def form_as_arrived(self) -> None:
        """After a backward pass: form buckets in the order in which gradients appeared on rank 0."""
        digests = self.order.agree(
            self.communicator,
            find_unused=self.options.find_unused_parameters,
            same_order=any(one.parts.same_order for one in self.declaration.every_exchange()),
            told=digest_of_gradients(self.order.arrived) if self.phases.step == 0 else "",
        )
        warn_of_equal_gradients(digests, self.group.rank)
        self.form(self.layout(self.options.bucket_bytes))

    def layout(self, bucket_bytes: int) -> list[list[int]]:
        """Positions of the parameters of each bucket, if buckets are closed at so many bytes.

        Buckets that the user wants are what they are.
        """
        if self.options.buckets:
            return positions_of(self.registration, self.options.buckets)
        return self.order.cut(bucket_bytes)

    def form(self, members: Sequence[Sequence[int]]) -> None:
        """Form buckets of the parameters in these positions, and begin to exchange in them."""
        self.order.suppose(members)
        self.phases.enter()
        chunked = self.options.chunking or is_chunked(self.phases.exchanges)
        registered = self.registration
        buckets = [
            Bucket(
                index,
                [registered.names[position] for position in positions],
                [registered.parameters[position] for position in positions],
                self.group.global_communicator,
                align_bytes=self.options.align_bytes,
                shares=self.group.size if chunked else 1,
                fusion=self.options.fusion,
            )
            for index, positions in enumerate(members)
        ]
        if _log.isEnabledFor(logging.DEBUG):
            told = "; ".join(f"{one.nbytes:,} bytes, {one.names[0]} to {one.names[-1]}" for one in buckets)
            where = (self.group.rank, self.phases.step, self.declaration, told)
            _log.debug("rank %d: from step %d on %r, buckets of %s", *where)
        self.scheduler.take_buckets(buckets)
        self.begin()

    def begin(self) -> None:
        """Give the buckets their flat memory and state, and have the exchanges of the phase executed in them."""
        with self._whole("the making of its buckets"):
            self.scheduler.execute(self.phases.exchanges, self.model, self.options)
        self.registration.remember_storages()
        self.scheduler.go_on()
        self.algorithm.attach(self.scheduler.buckets, self.group, self.phases.step)

    @contextlib.contextmanager
    def _whole(self, doing: str) -> Iterator[None]:
        """What fails half-way in this block, or is interrupted, ends training: others may have no reason to fail."""
        try:
            yield
        except BaseException as error:
            self.failure.tell(error, doing, self.scheduler.lanes.apart)
            raise

    # The end of a backward pass.

    def restore_unused(self, without: set[str]) -> None:
        """Gradients that no rank has stay None, so that optimizers skip them as without bagua. Collective.

        Args:
            without: names of those that got none here.
        """
        sent = [one for one in self.phases.exchanges if "gradients" in one.needs]
        steps = 1 + max((one.lag for one in sent), default=0)
        self._without = [*self._without, without][-steps:]
        # Gradients of each of these steps may be there now.
        unused_here = set.intersection(*self._without) if len(self._without) == steps else set()
        # What earlier exchanges have lost is sent once, and must not be dropped.
        feeds_back = any(one.how is not None and one.how.state() for one in sent)
        parameters, communicator = self.model.parameters, self.communicator
        flags = [name not in unused_here for name in parameters]
        place = torch.device("cpu") if "cpu" in communicator.device_types else next(iter(parameters.values())).device
        used = torch.tensor(flags, dtype=torch.uint8, device=place)
        communicator.allreduce(used, ReduceOp.MAX)
        for parameter, flag in zip(parameters.values(), used.tolist(), strict=True):
            if not flag and not (feeds_back and parameter.grad is not None and parameter.grad.any()):
                parameter.grad = None

    def concern_step(self) -> None:
        """The backward pass of a step has ended in which there is something to compare. Collective, unless paused."""
        step = self.phases.step
        if self.equality.paused:
            self.equality.postpone(step)
            return
        self.scheduler.settle()
        self.equality.look_at_gradients(step, self.model, self.group)
        self.to_compare = step
        if self.equality.at_once:
            self.compare_ranks()

    def compare_ranks(self) -> None:
        """Compare what must be equal on all ranks after the step ``to_compare``.

        Raises:
            CollectiveMismatchError: on all ranks, if there is a difference beyond rounding.
        """
        step, self.to_compare = self.to_compare, None
        assert step is not None, "somebody has asked for to_compare"
        self.scheduler.settle()
        belief = Belief(self.model, self.scheduler.buckets, self.scheduler.places)
        self.equality.look(step, belief, self.group)

    # What starts from weights.

    def settle_loads(self) -> None:
        """Training goes on, or is saved: begin again from weights that were loaded, unless they were put back.

        What belongs to them may have been restored in the same step: that stays.

        Raises:
            ConfigurationError: others count on the weights that were there before.
        """
        step, loads = self.phases.step, self.equality.loads
        if not loads.before:
            return
        loaded = loads.differ(self.registration.trained_now)
        if loaded:
            self.scheduler.check_loads()
        loads.settle(step, loaded=loaded)
        if loaded and not self.declaration.ranks_differ:
            loads.tell(self.group)
        if loaded and self.phases.restored_at != step:
            self.scheduler.weights_were_replaced()

    def flush(self) -> None:
        """Leave no exchange owed or under way. Collective if the algorithm is."""
        self.settle_loads()
        self.algorithm.settle()
        self.scheduler.flush()

    def close(self) -> None:
        """Give back threads and communicators, when exchanges under way have ended. Idempotent."""
        self.algorithm.close()
        with contextlib.suppress(CommunicationError):  # What this rank would have received is not used.
            self.scheduler.settle()
        self.scheduler.owe_nothing()
        self.lanes.close()

    # Starting over.

    def follow_phase(self) -> None:
        """Have the exchanges of this step's phase executed, and make what starts from the weights as they are now."""
        if self.phases.is_over:
            self._change_phase()
        if self.scheduler.fresh:
            executed = self.scheduler
            shared = executed.fresh_and_shared
            if self.group.size > 1 and shared:
                if loads := self.equality.loads.unmet():
                    meet(self.group, f"load{loads}", "weights were loaded")
                weights = [self.model.parameters[name].detach() for name in shared]
                if not are_equal(weights, self.communicator):
                    average(weights, self.communicator)
            executed.begin_from_weights()

    def _change_phase(self) -> None:
        """The algorithm has changed its ways: other exchanges, in other buckets only if they need such."""
        if layout_of(self.phases.exchanges) != layout_of(self.phases.coming):
            self.put_aside(settle=False)
            self.form(self.layout(self.options.bucket_bytes))
            return
        with self._whole("a change of phase"):
            self.scheduler.leave()
            self.phases.enter()
            self.scheduler.enter(self.phases.exchanges, self.model, self.options)

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
            algorithm = self._bound(declaration)
        with self._whole("the end of its buckets"):
            self.scheduler.keep_parts()
        self.put_aside()
        self._take(declaration, algorithm, dataclasses.replace(self.options, bucket_bytes=setting.bucket_bytes))
        self.form(self.layout(setting.bucket_bytes))

    def _bound(self, declaration: Algorithm) -> AlgorithmImpl:
        """Another declaration on the same ranks, for the same model."""
        algorithm = declaration.reify(self.algorithm.process_group)
        declaration.check(self.model)
        return algorithm

    def _take(self, declaration: Algorithm, algorithm: AlgorithmImpl, options: EngineOptions) -> None:
        if algorithm is not self.algorithm:
            self.algorithm.close()
        self.options = options
        self._bind(declaration, algorithm)
        self.phases.bind(declaration, self.model)

    def _bind(self, declaration: Algorithm, algorithm: AlgorithmImpl) -> None:
        self.declaration, self.algorithm = declaration, algorithm
        self.idle = self.group.size == 1 and not declaration.acts_alone
        self.acts_between = type(algorithm).safe_point is not AlgorithmImpl.safe_point

    def put_aside(self, *, settle: bool = True) -> None:
        """Take the buckets apart, and keep what the algorithm remembers for those to come."""
        if settle:
            self.algorithm.settle()
        self.settle_loads()
        with self._whole("the end of its buckets"):
            self.scheduler.take_apart()
        self._without = []
        self.order.forget()

    def rebuild(self, difference: str) -> None:
        """Register the module anew, because it has changed on all ranks. Collective.

        The next backward pass forms new buckets. What the algorithm remembers belongs to a parameter, whatever it is
        called now, and begins anew for one that is another object, or has another shape.

        Args:
            difference: difference that has appeared here.

        Raises:
            CollectiveTimeoutError: the module has not changed on all ranks.
            CollectiveMismatchError: it has not, or has become different on different ranks.
        """
        self._rebuilt += 1
        self.algorithm.settle()  # This rank serves the others in the background until they are here.
        meet(self.group, f"rebuild{self._rebuilt}", difference)
        self.put_aside(settle=False)
        before = self.registration
        refusal = self._register()
        kept = before.kept_by(self.registration)
        forgotten = self.scheduler.follow(kept)
        anew = [name for name in forgotten if name in self.registration.names and name not in kept.values()]
        if anew and self.group.rank == 0:
            algorithm = type(self.declaration).__name__
            _log.warning("%s: what %s remembers of %s begins anew", difference, algorithm, ", ".join(anew))
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
        options = dataclasses.replace(self.options, buckets=wanted, bucket_bytes=size)
        self._take(declaration, self._bound(declaration), options)
        self._agree()


def _whereabouts(reference: weakref.ref[Formation]) -> str:
    """The step that is under way, and the bucket that is waited for: for messages."""
    formation = reference()
    if formation is None:
        return ""
    bucket = next((lane.at_work for lane in formation.lanes.lanes if lane.at_work is not None), None)
    names = "" if bucket is None else f", bucket {bucket.index} ({bucket.names[0]} to {bucket.names[-1]})"
    return f"step {formation.phases.step}{names}"
