"""The bucket manager: collects gradients, forms buckets, and has them exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import Never

from bagua.algorithms import Algorithm, DistributedAlgorithm, Flight, as_algorithm
from bagua.buckets import Bucket
from bagua.comm import Group
from bagua.engine.autotune.settings import AutotuneSettings
from bagua.engine.buckets.layout import changed_by_others, check_place, foreign, not_formed, unused
from bagua.engine.formation import BucketFormation
from bagua.engine.gradients import restore_unused
from bagua.engine.options import (
    DEFAULT_BUCKET_BYTES,
    BucketType,
    EngineOptions,
    OnDifference,
    check_module,
    chosen_algorithm,
    optimizer_list,
    refuse_unknown,
)
from bagua.engine.schedule.courses import lag_of_gradients, sends_gradients
from bagua.engine.schedule.tracks import Track
from bagua.engine.state import checkpoints
from bagua.engine.state.equality import Belief
from bagua.engine.state.replicas import are_equal
from bagua.engine.state.saving import compare_states
from bagua.errors import CommunicationError, CommunicatorClosedError, blame


class Reducer(BucketFormation):
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
        grad_scaler, intra_comm_root_rank, autotune, check_every, on_difference: as in ``EngineOptions``.
        unknown: refused.

    Attributes:
        group: private to this reducer.
        algorithm: bound to the group.
        step: synchronized backward passes so far.
        buckets: empty before they are formed.
        options: options of the engine.

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
        process_group: Group | None = None,
        algorithm: Algorithm | DistributedAlgorithm | str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        find_unused_parameters: bool = False,
        delay_reduce: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        intra_comm_root_rank: int = 0,
        autotune: bool | AutotuneSettings | None = None,
        check_every: int | None = None,
        on_difference: OnDifference = "raise",
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
            autotune=autotune,
            check_every=check_every,
            on_difference=on_difference,
        )
        declaration = chosen_algorithm(
            algorithm,
            bucket_type,
            hierarchical_reduce=hierarchical_reduce,
            decentralize_reduce=decentralize_reduce,
            chunking=chunking,
        )
        super().__init__(module, optimizer_list(optimizers), declaration, process_group, options)

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
        BucketFormation.__init__(
            made, module, optimizer_list(optimizers), as_algorithm(algorithm), process_group, options
        )
        return made

    # Every backward pass.

    def fill_slot(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The tensor that is communicated for ``param``: its part of the bucket's flat memory.

        Before buckets are formed, what will be copied there: its gradient, or its weights.

        Raises:
            ConfigurationError: it is no parameter of the module, or has no gradient yet.
        """
        if id(param) not in self._known:
            raise foreign(param)
        if self.scheduler is None:
            value = param.grad if sends_gradients(self.declaration.every_exchange()) else param.detach()
            if value is None:
                raise not_formed()
            return value
        slot = self.scheduler.slots[id(param)]
        if slot.view is not None:
            return slot.view
        return slot.parameter.detach()

    @property
    def taker(self) -> Callable[[torch.nn.Parameter], None]:
        """What hooks call for each gradient of this backward pass: ``add_param`` or ``mark_tensor_ready``."""
        if not self.follows_gradients:
            return _leave_alone
        take = self.add_param if self.scheduler is None else self.scheduler.take
        return self.equality.watch_gradients(take) if self.options.buckets and self.step == 0 else take

    def before_step(self) -> bool:
        """A training forward begins: a safe point. Whether hooks on parameters must come or go."""
        self.settle_loads()
        if self.scheduler is None:
            return False
        plane, before = self.algorithm.plane, (self.between_steps, self.follows_gradients)
        self._follow_phase()
        if plane is not None:
            plane.safe_point(self.step)
        try:
            self.scheduler.safe_point(self.clock)
        except BaseException as error:
            self.give_up(error)
            raise
        return before != (self.between_steps, self.follows_gradients)

    def begin_step(self) -> None:
        """A synchronized backward pass starts."""
        self.check_usable()
        if self.scheduler is None or self.between_steps:
            return
        if self.algorithm.plane is not None:
            self.algorithm.plane.begin_step(self.step)  # A phase between steps begins with a forward pass.
        else:
            self._follow_phase()  # For those who drive a reducer by hand, without forward passes.
        self.scheduler.begin(self.clock)
        if not self.follows_gradients:
            self.scheduler.launch_ready()

    def mark_tensor_ready(self, param: torch.Tensor) -> None:
        """Take the gradient of ``param``; start the exchange of its bucket if it was the last one.

        Raises:
            ConfigurationError: its gradient was there before in the same backward pass, or it is no parameter of the
                module.
        """
        if self.scheduler is None:
            raise not_formed()
        if id(param) not in self.scheduler.slots:
            raise foreign(param)
        if not self.scheduler.active:
            self.begin_step()
        self.scheduler.take(param)

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
        scheduler = self.scheduler
        if scheduler is None:
            raise not_formed()
        if self.between_steps:
            self.step += 1
            return
        missing = scheduler.missing() if self.follows_gradients else []
        if missing and not self.options.find_unused_parameters:
            if len(missing) == len(scheduler.slots):
                return
            raise unused({self.group.rank: [slot.name for slot in missing]})
        without = {slot.name for slot in scheduler.fill_missing(missing)}
        scheduler.complete()
        if self.options.find_unused_parameters and self.group.size > 1:
            exchanges = self.exchanges_of(self._phase)
            if sends_gradients(exchanges):
                unused_here = self._unused.after(without, steps=1 + lag_of_gradients(exchanges))
                restore_unused(unused_here, self.model.parameters, self.communicator)
        if self.equality.concerns(self.step):
            self.end_exchanges()
            belief = Belief(self.module, self.model, self.buckets, self.courses.places)
            if self.equality.look(self.step, belief, self.group) and self.restored_at != self.step:
                self.courses.weights_were_replaced()
        self.step += 1
        self._versions = self.registration.versions if scheduler.owes else []

    # Between backward passes.

    def weights_will_be_loaded(self) -> None:
        """Wait for what is sent from where the weights lie."""
        self.end_exchanges()
        self.equality.loads.begin(self.registration.trained_now())

    def weights_were_loaded(self) -> None:
        """Whether that changes anything is found out when training goes on: an evaluation may put them back."""
        self._versions = []
        self.equality.loads.end()

    @property
    def owes(self) -> bool:
        """Whether an exchange waits for the optimizers."""
        return self.scheduler is not None and self.scheduler.owes

    def after_optimizers(self, *, stepped: bool = True, late: bool = True) -> None:
        """Exchange what waited for the optimizers.

        Args:
            stepped: False if none of them has told of a step since the last backward pass.
            late: False if the last of them has told of its step just now.

        Raises:
            ConfigurationError: none has, and the weights are others than at the end of that pass.
        """
        if self.scheduler is None:
            return
        if self.owes and not stepped and self.optimizers and self._versions not in ([], self.registration.versions):
            error = changed_by_others()
            self.give_up(error)
            raise error
        self._versions = []
        if not late:
            self.model.forget_rates()
        try:
            self.scheduler.after_optimizers()
        except BaseException as error:
            self.give_up(error)
            raise

    def flush(self) -> None:
        """Leave no exchange owed or under way. Collective if the algorithm is."""
        self.settle_loads()
        if self.algorithm.plane is not None:
            self.algorithm.plane.settle()
        if self.scheduler is not None:
            self.scheduler.flush()

    def finish(self) -> None:
        """See ``EngineAccess.bagua_finish``."""
        self.check_usable()
        self.flush()
        closing = tuple(one for one in self.declaration.closing() if self.group.size > 1 or one.alone)
        if not closing:
            return
        equal = are_equal(self.registration.parameters, self.communicator)
        try:
            self.courses.once(closing, self.buckets, self.model, self.options, self.clock)
        except BaseException as error:
            self.give_up(error)
            raise
        if not equal:
            self.courses.weights_were_replaced()

    def suspend_exchanges(self) -> list[tuple[Track, Flight]]:
        """Wait for exchanges under way, and set them aside for ``resume_exchanges``; later steps do not fold them."""
        if self.scheduler is None:
            return []
        flights = self.scheduler.settle()
        self.scheduler.forget()
        return flights

    def resume_exchanges(self, flights: list[tuple[Track, Flight]]) -> None:
        """Fold the results that ``suspend_exchanges`` set aside when their time comes, after all."""
        if self.scheduler is not None:
            self.scheduler.resume(flights)

    def give_up(self, reason: BaseException | str) -> None:
        """End a step that cannot be finished here; ranks that wait for the rest of it get ``PeerLostError``."""
        problem = reason if isinstance(reason, str) else getattr(reason, "problem", None) or repr(reason)
        rank = self.group.ranks[self.group.rank]
        culprit, told = (
            (rank, f"it gave up: {reason}") if isinstance(reason, str) else blame(reason, rank, "a training step")
        )
        for group in (self.group, *self.courses.groups):
            group.abort(told, culprit)
        self._failure = self._failure or str(problem)
        self.close_plane()
        if self.scheduler is not None:
            self.scheduler.forget()
        self._close_soon()
        self.after_failure(reason)

    def close_plane(self) -> None:
        """End what goes on between steps on this rank, not waiting for others. Idempotent."""
        if self.algorithm.plane is not None:
            self.algorithm.plane.close()

    def check_usable(self) -> None:
        """Raise if an earlier step could not be finished.

        Raises:
            CommunicatorClosedError: it could not.
        """
        if self._failure:
            raise CommunicatorClosedError(
                f"this model can no longer be synchronized: {self._failure}",
                rank=self.group.ranks[self.group.rank],
                advice="Wrap it anew on all ranks, from a checkpoint: ranks may have made different steps.",
            )

    def close(self) -> None:
        """Give back threads and communicators; the module keeps working on its own. Idempotent.

        Exchanges under way end first, and what is owed to other ranks is not sent any more.
        """
        self.close_plane()
        if self.scheduler is not None:
            with contextlib.suppress(CommunicationError):  # What this rank would have received is not used.
                self.end_exchanges()
            self.scheduler.owe_nothing()
        self.belongings.close()

    # Checkpoints.

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """What the algorithm remembers on this rank; the weights are in the module's own ``state_dict``.

        Every rank saves its own. Made of numbers, strings, lists, dictionaries and tensors; copies, if ``copy``.
        """
        self.after_optimizers()
        return checkpoints.save(self, copy=copy)

    def state_digest(self) -> str:
        """See ``EngineAccess.bagua_state_digest``."""
        self.after_optimizers()
        weights = {} if self.declaration.ranks_differ else self.model.parameters
        step = 0 if self.courses.apart else self.step  # Ranks have made different numbers of steps.
        return compare_states(step, weights, self.courses.places, self.communicator)

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
        checkpoints.load(self, state_dict)

    @property
    def remembers(self) -> bool:
        """Whether something is remembered from step to step."""
        return any(place.memory.state for place in self.courses.places)

    def prepare(self) -> None:
        """Have all exchanges make what they need now, instead of in the first backward pass. Collective."""
        self.courses.prepare(self.exchanges_of(self.declaration.phase(self.step, self.model)))


def _leave_alone(_: torch.nn.Parameter) -> None:
    """What is done with gradients where nothing is exchanged in a step."""
