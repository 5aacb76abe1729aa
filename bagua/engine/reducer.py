"""The bucket manager: collects gradients, forms buckets, and has them exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import Never

from bagua.algorithms import Algorithm, AlgorithmImpl, DistributedAlgorithm, GradientAllReduceAlgorithm, as_algorithm
from bagua.buckets import Bucket
from bagua.checks import check_flags, check_kind
from bagua.comm import Group
from bagua.engine.buckets.layout import changed_by_others, check_place, foreign, not_formed, unused
from bagua.engine.formation import Formation
from bagua.engine.options import (
    DEFAULT_BUCKET_BYTES,
    BucketType,
    EngineOptions,
    check_module,
    optimizer_list,
    refuse_unknown,
)
from bagua.engine.schedule.courses import sends_gradients
from bagua.engine.state import checkpoints
from bagua.engine.state.replicas import are_equal


def _tell_nobody(_: BaseException | str) -> None:
    """No islands want to know why training has ended here."""


#: Takes the gradient of a parameter.
Taker = Callable[[torch.nn.Parameter], None]


class Reducer:
    """Collects the gradients of a module in buckets, and has each bucket exchanged when it is complete.

    Building one is collective: it makes a private duplicate of the process group and
    compares the models of all ranks. In the first backward pass ``add_param`` notes in
    which order gradients appear; ``initialize_buckets`` then forms buckets in rank 0's
    order. Later, ``mark_tensor_ready`` takes each gradient as it arrives, and
    ``mark_on_complete`` ends the step.

    Args:
        module: module whose trainable parameters are exchanged.
        optimizers: optimizers that step them.
        bucket_type: gradients, or weights, which chooses a decentralized algorithm.
        hierarchical_reduce: inside each host first, then between hosts.
        align_bytes: buckets are padded to a multiple of this power of two.
        chunking: choose a scatter-gather algorithm, and pad buckets so that they split evenly over the ranks.
        fusion: gradients and weights of a bucket live in flat memory. Otherwise gradients are copied into it and back.
        decentralize_reduce: choose a decentralized algorithm.
        buckets: lists of parameters, or of their names, to use instead of forming buckets.
        process_group: the ranks; None means all.
        algorithm: overrides the choice by flags.
        bucket_bytes: a bucket is closed when it holds so many bytes.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it is an error.
        delay_reduce: start no exchange before the end of backward.
        grad_scaler, intra_comm_root_rank, check_every: as in ``EngineOptions``.
        unknown: refused.

    Attributes:
        group: private to this reducer.
        formation: agreement of all ranks; its phases and its scheduler are attributes here, too.

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

    #: Told why, after a step that could not be finished. It must not raise.
    after_failure: Callable[[BaseException | str], object] = staticmethod(_tell_nobody)

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
        check_every: int | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, Reducer.__init__.__kwdefaults__ or ())
        check_module(module)
        options = EngineOptions(
            bucket_bytes=bucket_bytes,
            align_bytes=align_bytes,
            chunking=chunking,
            fusion=fusion,
            buckets=buckets,
            find_unused_parameters=find_unused_parameters,
            delay_reduce=delay_reduce,
            grad_scaler=grad_scaler,
            intra_comm_root_rank=intra_comm_root_rank,
            check_every=check_every,
        )
        check_kind(BucketType, "a BucketType", bucket_type=bucket_type)
        check_flags(hierarchical_reduce=hierarchical_reduce, decentralize_reduce=decentralize_reduce)
        if algorithm is not None:
            declaration = as_algorithm(algorithm)
        elif decentralize_reduce or bucket_type is not BucketType.Gradient:
            declaration = Algorithm.init(DistributedAlgorithm.Decentralize, hierarchical=hierarchical_reduce)
        elif chunking:
            declaration = Algorithm.init(DistributedAlgorithm.ScatterGatherAllReduce, hierarchical=hierarchical_reduce)
        else:
            declaration = GradientAllReduceAlgorithm(hierarchical=hierarchical_reduce)
        self.drive(Formation(module, optimizer_list(optimizers), declaration, process_group, options))

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer | None,
        algorithm: Algorithm | DistributedAlgorithm | str,
        process_group: Group | None,
        options: EngineOptions,
    ) -> Reducer:
        """A reducer from checked options; the constructor has the documented arguments. Collective."""
        check_module(module)
        made = cls.__new__(cls)
        made.drive(Formation(module, optimizer_list(optimizers), as_algorithm(algorithm), process_group, options))
        return made

    def drive(self, formation: Formation) -> None:
        """Make the steps of ``formation``."""
        self.formation = formation
        # What lasts as long as the formation: each step asks for it.
        self.module, self.optimizers, self.group = formation.module, formation.optimizers, formation.group
        self.phases, self.scheduler = formation.phases, formation.scheduler
        self._versions: list[int] = []

    # What a caller may ask.

    @property
    def algorithm(self) -> AlgorithmImpl:
        """The algorithm, bound to the group."""
        return self.formation.algorithm

    @property
    def step(self) -> int:
        """Synchronized backward passes so far."""
        return self.phases.step

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which their gradients become complete; none before they are formed."""
        return self.scheduler.buckets

    @property
    def initialized(self) -> bool:
        """Whether buckets have been formed."""
        return self.scheduler.formed

    bucket_initialized = initialized

    # The first backward pass.

    def add_param(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of ``param`` is there, in a backward pass before buckets exist.

        Raises:
            ConfigurationError: it was there before in the same backward pass, or is no parameter of the module.
        """
        self.formation.order.add(param)

    def initialize_buckets(self) -> list[list[torch.Tensor]]:
        """Form the buckets in the order in which gradients appeared on rank 0. Collective.

        Returns:
            The parameters of each bucket.

        Raises:
            ConfigurationError: on all ranks, if some rank lacks gradients and
                ``find_unused_parameters`` is off.
        """
        if self.initialized and not self.phases.follows_gradients:
            self.formation.order.forget()
        else:
            self.formation.form_as_arrived()
        return [list(bucket.parameters) for bucket in self.buckets]

    def register_bagua_buckets(self) -> None:
        """Give the buckets their flat memory and state, and schedule them."""
        self.formation.begin()

    # Every backward pass.

    def fill_slot(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The tensor that is communicated for ``param``: its part of the bucket's flat memory.

        Before buckets are formed, what will be copied there: its gradient, or its weights.

        Raises:
            ConfigurationError: it is no parameter of the module, or has no gradient yet.
        """
        if param not in self.formation.registration:
            raise foreign(param)
        if not self.scheduler.formed:
            exchanges = self.formation.declaration.every_exchange()
            value = param.grad if sends_gradients(exchanges) else param.detach()
            if value is None:
                raise not_formed()
            return value
        bucket, position = self.scheduler.slots[id(param)]
        return bucket.gradient_views[position] if bucket.gathers else bucket.parameters[position].detach()

    def before_step(self) -> bool:
        """A training forward begins: a safe point. Whether hooks on parameters must come or go."""
        formation, phases, scheduler = self.formation, self.phases, self.scheduler
        if formation.equality.loads.before:
            formation.settle_loads()
        if not scheduler.formed:
            return False
        before = (phases.between_steps, phases.follows_gradients)
        if phases.several or scheduler.fresh:
            formation.follow_phase()
        if formation.acts_between:
            formation.algorithm.safe_point(phases.step)
        if scheduler.has_safe_points:
            with self.giving_up():
                scheduler.safe_point(phases.clock)
        return before != (phases.between_steps, phases.follows_gradients)

    def begin_step(self) -> Taker | None:
        """A synchronized backward pass starts, and no forward pass came before it."""
        self.formation.failure.check()
        self.compare_ranks()
        if self.scheduler.formed:
            self.formation.follow_phase()
        self.scheduler.rests_until = 0
        return self.begin_backward()

    def begin_backward(self) -> Taker | None:
        """A synchronized backward pass starts, after ``before_step``.

        Returns:
            What takes each gradient of it; None where none is followed.
        """
        phases, scheduler, formation = self.phases, self.scheduler, self.formation
        if scheduler.formed and not phases.between_steps and phases.step >= scheduler.rests_until:
            scheduler.begin(phases.clock)
            if not phases.follows_gradients:
                scheduler.launch_ready()
        if not phases.follows_gradients:
            return None
        take: Taker = scheduler.take if scheduler.formed else formation.order.add
        watched = phases.step == 0 and formation.options.buckets
        return formation.equality.watch_gradients(take) if watched else take

    def mark_tensor_ready(self, param: torch.Tensor) -> None:
        """Take the gradient of ``param``; start the exchange of its bucket if it was the last one.

        The exchange of the last bucket may wait for ``mark_on_complete``.

        Raises:
            ConfigurationError: its gradient was there before in the same backward pass, or it is no parameter of the
                module.
        """
        scheduler = self.scheduler
        if not scheduler.formed:
            raise not_formed()
        if id(param) not in scheduler.slots:
            raise foreign(param)
        if not scheduler.active:
            self.begin_step()
        scheduler.take(param)

    def mark_bucket_ready(self, bucket: Bucket | Sequence[torch.Tensor], bucket_idx: int | None = None) -> None:
        """Take the gradients of all parameters of a bucket.

        Args:
            bucket: one of the lists that ``initialize_buckets`` returned, or of ``buckets``.
            bucket_idx: its place among them; None means that it is not checked.

        Raises:
            ConfigurationError: there is another bucket in that place, or something else than a parameter in ``bucket``.
        """
        parameters = list(bucket.parameters if isinstance(bucket, Bucket) else bucket)
        if bucket_idx is not None:
            check_place(self.buckets, parameters, bucket_idx)
        for parameter in parameters:
            self.mark_tensor_ready(parameter)

    def mark_on_complete(self) -> None:
        """End the step: start what has not started, and wait for what this step needs.

        A backward pass that brought no gradient at all, as that of ``torch.autograd.grad``
        for the inputs, is no step, unless ``find_unused_parameters`` is on. Where no gradients are exchanged, hooks
        tell such a pass from a step, and a parameter may lack a gradient.

        Raises:
            ConfigurationError: parameters without a gradient, and ``find_unused_parameters`` is off.
            CommunicationError: an exchange failed, wherever it ran.
        """
        phases, scheduler, formation = self.phases, self.scheduler, self.formation
        if not scheduler.formed:
            raise not_formed()
        if phases.between_steps:
            phases.advance()
            return
        stride = 1
        if scheduler.active or phases.step >= scheduler.rests_until:
            find_unused = formation.options.find_unused_parameters
            missing = scheduler.missing() if phases.follows_gradients else []
            if missing and not find_unused:
                if len(missing) == len(scheduler.slots):
                    return
                raise unused({self.group.rank: [bucket.names[position] for bucket, position in missing]})
            without = scheduler.fill_missing(missing) if missing else set()
            scheduler.complete()
            if find_unused and self.group.size > 1 and sends_gradients(phases.exchanges):
                formation.restore_unused(without)
            stride = scheduler.clock.stride
        equality = formation.equality
        if equality.due <= phases.step or equality.loads.step == phases.step:
            formation.concern_step()
        phases.advance(stride)
        self._versions = formation.registration.versions if scheduler.owes else []

    # Between backward passes.

    @property
    def rests(self) -> bool:
        """Whether there is nothing to do in the next step."""
        phases, scheduler, formation = self.phases, self.scheduler, self.formation
        step, equality = phases.step, formation.equality
        if step >= scheduler.rests_until or step >= equality.due or (phases.several and phases.is_over):
            return False
        return not (scheduler.fresh or equality.loads.before or formation.failure.problem)

    def compare_ranks(self) -> None:
        """Compare what must be equal on all ranks, once optimizers have stepped, after steps for which that is due."""
        if self.formation.to_compare is not None:
            with self.giving_up():
                self.formation.compare_ranks()

    def weights_will_be_loaded(self) -> None:
        """Wait for what is sent from where the weights lie."""
        self.scheduler.settle()
        self.formation.equality.loads.begin(self.formation.registration.trained_now())

    def weights_were_loaded(self) -> None:
        """Whether that changes anything is found out when training goes on: an evaluation may put them back."""
        self._versions = []
        self.formation.equality.loads.end()

    def after_optimizers(self, *, stepped: bool = True, late: bool = True) -> None:
        """Exchange what waited for the optimizers.

        Args:
            stepped: False if none of them has told of a step since the last backward pass.
            late: False if the last of them has told of its step just now.

        Raises:
            ConfigurationError: none has, and the weights are others than at the end of that pass.
        """
        scheduler, formation = self.scheduler, self.formation
        if not late:
            formation.model.noted_rates.clear()
        if not scheduler.owes:
            return
        watched = not stepped and bool(self.optimizers)
        if watched and self._versions not in ([], formation.registration.versions):
            with self.giving_up():
                raise changed_by_others()
        self._versions = []
        with self.giving_up():
            scheduler.after_optimizers()

    def flush(self) -> None:
        """Leave no exchange owed or under way. Collective if the algorithm is."""
        with self.giving_up():
            self.formation.flush()

    def finish(self) -> None:
        """See ``EngineAccess.bagua_finish``."""
        self.formation.failure.check()
        self.flush()
        formation, executed = self.formation, self.scheduler
        self.phases.ending.merged_at = self.step
        closing = self.phases.made(formation.declaration.closing())
        if not closing:
            return
        equal = are_equal(formation.registration.parameters, formation.communicator)
        with self.giving_up():
            executed.once(closing, formation.model, formation.options, self.phases.clock)
        if not equal:
            executed.weights_were_replaced()

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """What fails half-way here, others have taken in: this rank must not go on with something else."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, reason: BaseException | str) -> None:
        """End a step that cannot be finished here; ranks that wait for the rest of it get ``PeerLostError``."""
        self.formation.failure.tell(reason, "a training step", self.scheduler.lanes.apart)
        self.algorithm.close()
        self.scheduler.forget()
        self.formation.close_soon()
        self.after_failure(reason)

    def close(self) -> None:
        """Give back threads and communicators; the module keeps working on its own. Idempotent.

        Exchanges under way end first, and what is owed to other ranks is not sent any more.
        """
        self.formation.close()

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """What the algorithm remembers on this rank; the weights are in the module's own ``state_dict``.

        Every rank saves its own. Made of numbers, strings, lists, dictionaries and tensors; copies, if ``copy``.
        """
        self.after_optimizers()
        self.phases.ending.tell(self.group.global_communicator, saving=True)
        return checkpoints.save(self.formation, copy=copy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, in the same buckets. Collective.

        Args:
            state_dict: state of this rank. Where it is the same on all ranks, as for gradient allreduce, that of any
                rank will do.

        Raises:
            ConfigurationError: it belongs to another algorithm or to other parameters; or to another
                rank, or number of ranks, and it matters.
            CollectiveMismatchError: ranks load different checkpoints.
        """
        checkpoints.load(self.formation, state_dict)
