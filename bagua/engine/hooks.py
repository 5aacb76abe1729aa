"""The hooks into autograd, optimizers and forward passes that drive a reducer."""

from __future__ import annotations

import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bagua.engine.autotune import Autotuner
from bagua.engine.buckets import registration
from bagua.engine.buckets.layout import shared
from bagua.engine.joining import Joining
from bagua.engine.reducer import Reducer
from bagua.engine.schedule.lanes import nothing
from bagua.engine.wrapping import SWITCH, Wrapping
from bagua.errors import BaguaError, ConfigurationError
from bagua.torch_private import accumulates, active_ddp, backward_pass, do_not_compile, when_backward_ends

_log = logging.getLogger("bagua")
#: Updates in a row with several steps: an update that is skipped makes such a one now and then.
_UPDATES_UNTIL_TOLD = 3
_requires_grad = operator.attrgetter("requires_grad")


# What torch calls keeps no engine alive: a graph, a parameter or an optimizer may outlive it, and autograd keeps
# hooks out of the garbage collector's sight. Torch calls a ``partial`` faster than an object with ``__call__``.


def _tell(reference: weakref.ref[BackwardHooks], method: Callable[..., object], *arguments: Any) -> None:
    """Call ``method`` of an engine that is still there."""
    engine = reference()
    if engine is not None:
        method(engine, *arguments)


def _arrived(reference: weakref.ref[BackwardHooks], parameter: torch.nn.Parameter) -> None:
    """Tell an engine of a gradient."""
    engine = reference()
    if engine is None:
        return
    if engine.current is None:
        engine.begin()
    if engine.take is not None:
        try:
            engine.take(parameter)
        except BaseException as error:
            engine.reducer.give_up(error)
            raise


do_not_compile(_tell, _arrived, inside=True)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _refuse_graph(_: torch.nn.Parameter) -> None:
    """Refuse a gradient that has a graph of its own."""
    raise ConfigurationError(
        "gradients with a graph of their own cannot be put into a bucket",
        argument="create_graph",
        expected="backward(create_graph=False)",
        seen=True,
        advice="Use torch.autograd.grad(create_graph=True) for the inner derivative.",
    )


class BackwardHooks:
    """Tells a reducer when gradients are there and when a backward pass is over.

    Args:
        reducer: reducer that is told.

    Attributes:
        before_step: calls that ranks make together before each step, beside what the engine does.
        accumulates: True if the next backward pass only accumulates gradients, whatever its forward was.
        current: what autograd calls at the end of the backward pass that is under way; None between passes.
        take: function that gets each gradient of it; None if it only accumulates.
        resting: True while nothing is due: sentinels alone tell of steps, and forward passes go by unseen.
        listen: called with False when forward passes need not be told of, and with True when they have to.
        closed: True once ``close`` was called.
        joining: the ``join`` block that this rank is in; None outside.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._recorder, self._several = reducer.group.recorder, reducer.group.size > 1
        #: When the part of a step that goes on began, and its name: for the timeline.
        self._part: tuple[float, str] | None = None
        self.accumulates, self.closed, self.resting = False, False, False
        self.listen: Callable[[bool], object] = operator.truth
        self.before_step: Callable[[], object] = nothing
        self._handles: list[Any] = []
        self._reference = weakref.ref(self)
        weakref.finalize(self, _remove, self._handles).atexit = False
        self.current: weakref.ref[Callable[[], object]] | None = None
        self._passes = 0
        self.take: Callable[[torch.nn.Parameter], None] | None = None
        self._armed: bool | None = None  # As the forward pass before it was; None if none was seen.
        self._arrivals: list[torch.nn.Parameter] = []
        #: Parameters whose gradients were noted and not yet taken, and the hook of most parameters: see ``_only_note``.
        self._noted: list[torch.nn.Parameter] = []
        self._note = partial(_arrived, self._reference)
        #: ``Scheduler.ends`` when hooks were attached last; whether gradients have always come in the order of buckets.
        self._ends: frozenset[int] | None = None
        self._in_order = True
        #: Where no gradients are exchanged, parameters whose gradients tell of a pass; None for all of them.
        self._sentinels: tuple[torch.nn.Parameter, ...] | None = None
        self._sentinels_fail = self._told_of_unseen = False
        #: The pass of autograd that was seen last; whether each so far was a step that sentinels told of, and none had
        #: gradients in another pass inside it, as that of a reentrant checkpoint.
        self._pass, self._plain = -1, True
        #: Refers to what autograd calls at the end of the pass that goes by unseen, and holds until then.
        self._open: list[weakref.ref[Callable[[], object]]] = []
        #: Steps since an optimizer stepped last, and how many updates in a row had several.
        self._steps_of_update = self._wasteful_updates = 0
        #: Optimizers that have not stepped since the last pass that was seen, and those that an exchange waits for.
        self._due: set[int] = set()
        self._waiting_for: set[int] = set()
        self._retired = self._stepped = False
        #: Whether all parameters are frozen in this forward pass, as a discriminator's: others train through them.
        self._frozen = False
        #: Whether a forward pass came before the step that is next, and before the one that was last.
        self._entered = self._was_entered = False
        self.joining: Joining | None = None

    @functools.cached_property
    def tuner(self) -> Autotuner:
        """Finds better settings of the reducer."""
        return Autotuner(self.reducer)

    @property
    def synchronize(self) -> bool:
        """Whether the backward pass of the next forward pass is a step: the switch that PyTorch's DDP has, too."""
        return bool(getattr(self.reducer.module, SWITCH, True))

    @synchronize.setter
    def synchronize(self, value: bool) -> None:
        if not value:  # Who accumulates does so in each update.
            self._plain = False
            self.wake()
        setattr(self.reducer.module, SWITCH, value)

    @property
    def trained(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that are trained together, as they are now."""
        return self.reducer.formation.registration.parameters

    def _show(self, name: str) -> None:
        """In the timeline, a part of a step begins, which ends the one before."""
        if self._part is not None:
            self._recorder.span(self._part[1], self._part[0], track="model")
        self._part = (self._recorder.clock(), name)

    def create_hooks(self) -> None:
        """Attach to the parameters and optimizers of the reducer. Where one rank has nothing to do, attach to nothing.

        Parameters have one engine at a time. Wrapping the same ones anew detaches the earlier.

        Raises:
            ConfigurationError: an engine of another model exchanges some of them.
        """
        reducer = self.reducer
        self.remove_hooks()
        self._ends, self._in_order = reducer.scheduler.ends, True
        if reducer.formation.idle:
            counted = partial(_tell, self._reference, lambda engine, *_: engine.reducer.phases.advance())
            self._handles += [optimizer.register_step_post_hook(counted) for optimizer in reducer.optimizers[:1]]
            return
        self._replace_earlier()
        if reducer.group.size > 1 or not reducer.phases.follows_gradients:
            self._listen_to_parameters()
        module: Any = reducer.module
        begins = partial(_tell, self._reference, BackwardHooks._load)
        ends = partial(_tell, self._reference, lambda engine, *_: engine.reducer.weights_were_loaded())
        loads = [module.register_load_state_dict_pre_hook(begins), module.register_load_state_dict_post_hook(ends)]
        Wrapping.to(module).add(loads)
        self._handles += loads
        stepped = partial(_tell, self._reference, BackwardHooks.optimizer_stepped)
        self._handles += [optimizer.register_step_post_hook(stepped) for optimizer in reducer.optimizers]

    def _listen_to_parameters(self) -> None:
        """To each, where its gradient is exchanged; else to sentinels, once a pass has shown which do."""
        sentinels = None if self.reducer.phases.follows_gradients else self._sentinels
        listened = self.trained if sentinels is None else sentinels
        ends, arrived = self._ends, partial(_arrived, self._reference)
        for one in listened:
            hook = arrived if ends is None or id(one) in ends else self._note
            self._handles.append(one.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _replace_earlier(self) -> None:
        own = self.reducer.formation.registration
        names = dict(zip(map(id, own.parameters), own.names, strict=True))
        # With the frozen ones, which an earlier engine of this module may have exchanged.
        here = set(map(id, self.reducer.module.parameters()))
        with _guard:
            attached = list(_attached)
        for earlier in attached:
            common = [names[id(one)] for one in earlier.trained if id(one) in names]
            if common and not here.issuperset(map(id, earlier.trained)):
                raise shared(common[0])
            if common:
                earlier.retire()
                if self.reducer.group.rank == 0:
                    _log.warning("the model was wrapped before: the earlier wrapper exchanges nothing from now on")
        with _guard:
            _attached.add(self)

    def retire(self) -> None:
        """Leave the parameters to another engine, for good: forward passes no longer concern this one."""
        self.remove_hooks()
        self._retired = True
        self.reducer.algorithm.close()

    def close(self) -> None:
        """Leave the module to itself, and give back threads and communicators. Idempotent, not collective."""
        self.retire()
        self.closed = True
        self.reducer.close()

    def remove_hooks(self) -> None:
        """Detach from parameters and optimizers. Idempotent."""
        self.wake()
        _remove(self._handles)
        with _guard:
            _attached.discard(self)

    # Forward.

    def before_forward(self, training: bool) -> None:
        """A forward pass starts.

        Args:
            training: True if the module is in training mode.

        Raises:
            CommunicationError: the module has changed, but not in the same way on all ranks.
            ConfigurationError: the module is inside torch's ``DistributedDataParallel``.
        """
        reducer = self.reducer
        if self.resting:
            return
        if (outer := active_ddp()) is not None:
            registration.require_outside(reducer.module, outer)
        if reducer.formation.idle or self._retired:
            return
        trained = reducer.formation.registration.parameters
        self._frozen = bool(trained) and not any(map(_requires_grad, trained))
        if not training or not torch.is_grad_enabled() or self._frozen:
            return
        if self.joining is not None:
            reducer.formation.failure.check()
            self.announce()
        self.enter_step()

    def announce(self) -> bool:
        """In a ``join`` block, tell the others that a step begins, before its first forward pass; whether it does."""
        if self.joining is None or not self.synchronize or self.accumulates or not torch.is_grad_enabled():
            return False
        self.reducer.after_optimizers(stepped=self._stepped)  # Ranks without data have done so before they ask.
        return self.joining.announce()

    def enter_step(self) -> None:
        """A training forward begins, or a step without data."""
        reducer = self.reducer
        if reducer.formation.failure.problem:
            reducer.formation.failure.check()
        self._entered = True
        if self._recorder.trace is not None:
            self._show("forward pass")
        if reducer.scheduler.owes:
            reducer.after_optimizers(stepped=self._stepped)
        if reducer.formation.to_compare is not None:
            reducer.compare_ranks()
        if (difference := reducer.formation.registration.difference()) is not None:
            self.remove_hooks()
            self._sentinels = None
            with reducer.giving_up():  # Without hooks nothing would be exchanged from here on.
                reducer.formation.rebuild(difference)
                self.create_hooks()
        if reducer.before_step() or reducer.scheduler.ends is not self._ends:
            self.create_hooks()

    def after_forward(self, output: Any) -> None:
        """A forward pass has returned ``output``: its backward pass will be noticed there."""
        if self.resting or self.reducer.formation.idle or self._retired or not torch.is_grad_enabled() or self._frozen:
            return
        self._armed = synchronize = self.synchronize
        entered = partial(_tell, self._reference, BackwardHooks.enter, synchronize)
        for tensor in (output,) if isinstance(output, torch.Tensor) else registration.tensors_in(output):
            if not tensor.is_leaf:
                tensor.register_hook(entered)  # type: ignore[no-untyped-call]

    # Backward.

    def enter(self, synchronize: bool, *_: Any) -> None:
        """A backward pass has come to the output of a forward pass that was to be synchronized, or was not."""
        if self._retired:
            return
        synchronize = synchronize and not self.accumulates
        if self.current is None:
            self._armed = synchronize
            self.begin()
        elif synchronize and self.take is None:
            self._start_step()

    def begin(self) -> None:
        """The first sign of a backward pass."""
        if self.resting and self._counts_unseen():
            return
        # Autograd holds the only strong reference, and drops it when an error ends the pass: that is noticed at once.
        self._passes += 1
        ends = partial(self._complete, self._passes)
        when_backward_ends(ends)
        self.current = weakref.ref(ends, self._died)
        if self.resting:
            self.take = self._arrivals.append
            return
        if self._recorder.trace is not None:
            self._show("backward pass")
        if (self.synchronize if self._armed is None else self._armed) and not self.accumulates:
            self._start_step()
        else:
            self._plain = False
            self._only_note(True)

    def _only_note(self, only: bool) -> None:
        """Let most hooks note their parameter, which runs no Python, or tell of it, as the others always do.

        What autograd holds stays: a ``partial`` is a thing to call that can be made to call something else.
        """
        hook, arguments = (self._noted.append, ()) if only else (_arrived, (self._reference,))
        self._note.__setstate__((hook, arguments, {}, None))  # type: ignore[attr-defined]

    def _take_noted(self, parameter: torch.nn.Parameter) -> None:
        """Take the gradients that were noted, and then that of ``parameter``."""
        scheduler, noted = self.reducer.scheduler, self._noted
        if not noted:
            scheduler.take(parameter)
            return
        noted.append(parameter)
        if not scheduler.take_run(noted):
            self._in_order = False
            for one in noted:
                scheduler.take(one)
        noted.clear()

    def _start_step(self) -> None:
        self._was_entered, self._entered = self._entered, False
        try:
            if self.joining is not None:
                self.joining.check_announced()
            if self._was_entered:
                take = self.reducer.begin_backward()
            else:
                self.reducer.formation.registration.refuse_change()
                take = self.reducer.begin_step()
        except BaseException as error:
            self.reducer.give_up(error)
            raise
        if take is not None:
            self.take = _refuse_graph if torch.is_grad_enabled() else take
            if self._in_order and self._ends is not None and self.take == self.reducer.scheduler.take:
                self.take = self._take_noted
                self._only_note(True)
            return
        self.take, self._pass = self._take_sentinel, backward_pass()

    def _take_sentinel(self, parameter: torch.nn.Parameter) -> None:
        """Take the gradient of a pass that exchanges no gradients."""
        self._arrivals.append(parameter)
        self._plain = self._plain and backward_pass() == self._pass

    def _complete(self, number: int) -> None:
        """The backward pass of this number is over."""
        if self.current is None or number != self._passes:
            return
        phases = self.reducer.phases
        step = phases.step
        try:
            if self.resting:  # Before a forward pass that was seen, it would have taken in what has changed.
                self.enter_step()
                self.reducer.begin_step()
            if self._is_step() and (self.reducer.scheduler.formed or self._form_buckets()):
                self._complete_step()
            if phases.step != step:
                self._recorder.stepped(phases.step)
            if self.take is None or phases.step != step:
                self._due = set(map(id, self.reducer.optimizers))
        except BaseException as error:
            # Before there are buckets, all ranks refuse together, or their communicator is broken already.
            if self.reducer.initialized or not isinstance(error, BaguaError):
                self.reducer.give_up(error)
            raise
        finally:
            self._forget_pass()
            if self._recorder.trace is not None:
                self._show("between passes")

    def _forget_pass(self) -> None:
        self.current = self.take = self._armed = None
        self._open.clear()
        self._arrivals.clear()
        if self._note.func is not _arrived:
            self._only_note(False)
            self._noted.clear()

    def _is_step(self) -> bool:
        """Whether the backward pass that ends now is one that all ranks make together."""
        if self.take is None or not self.trained:
            return False
        if self.reducer.phases.follows_gradients:
            return True
        if not self._arrivals and self._sentinels is not None:  # It brought gradients to others than them, or to none.
            self._arrivals += filter(accumulates, self.trained)
        return bool(self._arrivals)

    def _form_buckets(self) -> bool:
        """After the first backward pass: form buckets, and take the gradients that arrived in it."""
        reducer = self.reducer
        arrived = self._with_gradients() if reducer.group.size == 1 else reducer.formation.order.arrived
        if not arrived and not reducer.formation.options.find_unused_parameters:
            return False
        reducer.formation.order.arrived = arrived
        reducer.initialize_buckets()
        reducer.begin_step()
        if reducer.group.size > 1:
            for parameter in arrived:
                reducer.mark_tensor_ready(parameter)
        return True

    def _complete_step(self) -> None:
        reducer = self.reducer
        if self._noted:  # They came after the gradient that should have been last, or that one did not come.
            self._take_noted(self._noted.pop())
        if not self._several and reducer.phases.follows_gradients:  # There are no hooks on parameters.
            for parameter in self._with_gradients():
                reducer.mark_tensor_ready(parameter)
        # A pass has shown which parameters tell of passes: listen to those alone, unless that has failed before.
        wanted = not (reducer.phases.follows_gradients or self._sentinels_fail) and bool(reducer.optimizers)
        if self._sentinels is None and wanted:
            self._sentinels = registration.sentinels_of(reducer.optimizers, self.trained, self._arrivals)
            self.create_hooks()
        reducer.mark_on_complete()
        if self.joining is not None:
            self.joining.rescale()
        self._stepped = False
        self._steps_of_update += 1
        if reducer.scheduler.owes or reducer.formation.to_compare is not None:
            # A GradScaler skips an update whose gradients are not finite, and tells no rank. Others would wait for this
            # rank until its next forward pass, and there may be none.
            stepping = registration.optimizers_of(reducer.optimizers, self._arrivals)
            self._waiting_for = {id(one) for one in stepping if registration.has_finite_gradients(one)}
            if reducer.optimizers and not self._waiting_for:
                reducer.after_optimizers()

    def _with_gradients(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.trained if parameter.grad is not None]

    def _died(self, _: object) -> None:
        """Autograd gave the backward pass up, because of an error in it.

        The other ranks make this step, and wait. Did this rank go on, its next steps would meet their earlier ones.
        """
        if self.current is None and not self._open:
            return
        synchronized = self.take is not None or bool(self._open)
        self._forget_pass()
        reducer = self.reducer
        reducer.formation.order.forget()
        if synchronized and reducer.group.size > 1 and not reducer.phases.between_steps:
            reducer.give_up("a backward pass failed before its end; the output of that rank has the exception")

    # Optimizers.

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """``optimizer`` has made its step: when the last has, exchange what waited for that."""
        if id(optimizer) not in self._due:
            self._step_unseen(optimizer)
        if self._steps_of_update:
            steps, self._steps_of_update = self._steps_of_update, 0
            self._wasteful_updates = self._wasteful_updates + 1 if steps > 1 else 0
            if self._wasteful_updates == _UPDATES_UNTIL_TOLD and self._several and self.reducer.group.rank == 0:
                buckets = self.reducer.buckets if self.reducer.phases.follows_gradients else ()
                registration.warn_of_accumulation(steps, sum(bucket.nbytes for bucket in buckets))
        self._stepped = True
        self._due.discard(id(optimizer))
        self._waiting_for.discard(id(optimizer))
        if not self._waiting_for:
            reducer = self.reducer
            if reducer.scheduler.owes or reducer.formation.model.noted_rates:
                reducer.after_optimizers(late=False)
            if reducer.formation.to_compare is not None:
                reducer.compare_ranks()
            if not self._was_entered and self.joining is None:  # A method of the model has the loss.
                self.enter_step()
                self._entered = False
            if self.resting or reducer.phases.step < reducer.scheduler.rests_until:
                self._look_ahead()

    def _step_unseen(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has stepped, and no backward pass was seen that brought gradients to it."""
        reducer = self.reducer
        stepped = set(self.trained).intersection(registration.stepped_by(optimizer))
        if self.joining is not None or not self.synchronize or self.accumulates or self._retired:
            return
        if all(one.grad is None for one in stepped):
            return
        if reducer.phases.follows_gradients:
            if not self._told_of_unseen and reducer.group.rank == 0 < reducer.group.size - 1:
                registration.warn_of_unseen(reducer.optimizers, optimizer)
            self._told_of_unseen = True
            return
        # A forward pass that went by unseen would have shown it: this program needs to have all of them looked at.
        self._sentinels, self._sentinels_fail = None, self._sentinels_fail or not self.resting
        self._plain = False
        self._due = set(map(id, reducer.optimizers))
        self.enter_step()
        reducer.begin_step()
        reducer.mark_on_complete()
        self.create_hooks()

    # Steps in which nothing is due.

    def _look_ahead(self) -> None:
        """Rest until something is due, if the steps of this model are seen in its sentinels alone; else wake."""
        if self.joining is not None or self._recorder.trace is not None or not self.reducer.rests:
            self.wake()
        elif self._plain and not (self.resting or self.reducer.formation.acts_between):
            self.resting = True
            self.listen(False)

    def _counts_unseen(self) -> bool:
        """Count a backward pass in which nothing is due as a step; whether there is no more to it."""
        number, reducer = backward_pass(), self.reducer
        if number == self._pass or self._open:  # Another sentinel has told of it, or of the one that this is part of.
            return True
        if self.accumulates or not (self.synchronize and reducer.rests):
            self.wake()
            return False
        if not reducer.formation.registration.flags_are_kept:
            return False
        self._pass, self._armed = number, None
        ends = partial(self._open.clear)
        self._open.append(weakref.ref(ends, self._died))
        when_backward_ends(ends)
        reducer.phases.advance()
        self._recorder.stepped(reducer.phases.step)
        self._steps_of_update += 1
        self._due = set(map(id, reducer.optimizers))
        return True

    def wake(self) -> None:
        """Look at forward passes again: something is due, or may be. Idempotent."""
        if self.resting:
            self.resting = self._entered = False  # The forward pass that was seen last is long over.
            self.listen(True)

    def _load(self, *_: Any) -> None:
        """Weights will be loaded: the forward pass after that takes them in."""
        self.wake()
        self.reducer.weights_will_be_loaded()


#: Engines that listen to parameters now.
_attached: weakref.WeakSet[BackwardHooks] = weakref.WeakSet()
_guard = threading.Lock()
