"""How training with the engine begins, and what a model can be asked about it, whichever way it came to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from typing_extensions import Self

from bagua.algorithms import Algorithm, AlgorithmImpl, Exchange, Sum
from bagua.buckets import Bucket
from bagua.checks import check_flags
from bagua.engine.hooks import BackwardHooks
from bagua.engine.joining import Joining, check_joinable
from bagua.engine.reducer import Reducer
from bagua.engine.state import checkpoints, replicas
from bagua.engine.state.equality import warn_of_other_settings
from bagua.errors import ConfigurationError


class GlobalAverage:
    """The model holds the mean of all ranks; at the end of a ``with`` block, its own weights again.

    Made by ``bagua_global_average()`` and ``DecentralizedDataParallel.global_avg()``. If it is neither used in a
    ``with`` block nor told to ``restore``, the mean stays, and what ranks had sent each other before
    is not mixed in any more.

    Args:
        reducer: reducer of the model.
        exchanges: exchanges that make the means; see ``Algorithm.closing``.

    Attributes:
        distance: the Euclidean distance of this rank's trainable parameters from the mean;
            also ``float(average)``.
    """

    def __init__(self, reducer: Reducer, exchanges: Sequence[Exchange]) -> None:
        self._reducer = reducer
        self._step = reducer.phases.ending.merged_at = reducer.step
        reducer.formation.failure.check()
        self._suspended = reducer.scheduler.suspend()
        self._layout = reducer.buckets
        trained = list(reducer.formation.registration.parameters)
        held = reducer.formation.model.buffers() if any("buffers" in one.needs for one in exchanges) else {}
        self._tensors: list[torch.Tensor] = [*trained, *held.values()]
        self._own = [tensor.detach().clone() for tensor in self._tensors]
        formation = reducer.formation
        try:
            reducer.scheduler.once(exchanges, formation.model, formation.options, formation.phases.clock)
        except BaseException:
            self._take_back()
            raise
        self.distance = _distance(trained, self._own[: len(trained)])

    @torch.no_grad()
    def _take_back(self) -> None:
        for tensor, kept in zip(self._tensors, self._own, strict=True):
            tensor.copy_(kept)
        self._own = []

    def restore(self) -> None:
        """Give the model its own weights back, and the exchanges that were under way. Once; later calls do nothing.

        Raises:
            ConfigurationError: the mean was trained on since.
        """
        if not self._own:
            return
        if self._reducer.step != self._step:
            self._own = []
            raise ConfigurationError(
                "the mean was trained on, so the weights from before cannot be restored",
                argument="average",
                expected="no training step before restore()",
                seen=f"{self._reducer.step - self._step} steps",
                advice="To go on from the mean, call bagua_finish(), or global_avg() without `with`.",
            )
        self._take_back()
        if self._reducer.buckets is self._layout:
            self._reducer.scheduler.resume(self._suspended)

    def __float__(self) -> float:
        return self.distance

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"GlobalAverage(distance={self.distance:.6g})"


def _distance(means: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> float:
    squares = [
        torch.linalg.vector_norm(mean.detach() - weights).double().square().cpu()
        for mean, weights in zip(means, own, strict=True)
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class EngineAccess:
    """Adds questions about the engine to a module that keeps it in ``_bagua_engine``."""

    _bagua_engine: BackwardHooks

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm, bound to its group."""
        return self._bagua_engine.reducer.algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step the parameters, as they were given."""
        return self._bagua_engine.reducer.optimizers

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """The buckets; none before the first backward pass."""
        return self._bagua_engine.reducer.buckets

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forwards in this block only accumulate gradients."""
        before, self._bagua_engine.synchronize = self._bagua_engine.synchronize, False
        try:
            yield
        finally:
            self._bagua_engine.synchronize = before  # It may be another engine: of an algorithm switched to.

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Train with another number of batches on each rank in this block. Collective.

        A rank that comes to the end of the block makes the steps of the others with nothing to add: its gradients count
        as zero, its weights as they are, and all ranks count alike. Where ranks hold equal weights, all take weights,
        buffers and optimizer state of a rank that came last. Inside, each step costs one small exchange more.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks; otherwise by that of those
                that have data, which only algorithms that exchange gradients of the same step allow.
            enable: False to do nothing.
            throw_on_early_termination: raise on all ranks as soon as one of them has come to the end.

        Raises:
            ConfigurationError: ranks exchange between steps, or an argument that cannot be used.
            CollectiveMismatchError: with ``throw_on_early_termination``; inside the block, or at its end.

        Example:
            >>> import bagua.comm
            >>> from bagua.parallel import with_bagua
            >>> layer = torch.nn.Linear(2, 2)
            >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            >>> model = with_bagua(layer, [optimizer], "gradient_allreduce", bagua.comm.solo_group())
            >>> with model.join():
            ...     model(torch.ones(1, 2)).sum().backward()
        """
        check_flags(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )
        engine = self._bagua_engine
        reducer = engine.reducer
        if not enable or reducer.group.size == 1:
            return nullcontext()
        check_joinable(reducer.formation.declaration, by_initial_size=divide_by_initial_world_size)
        return _join_block(engine, by_initial_size=divide_by_initial_world_size, throws=throw_on_early_termination)

    def bagua_finish(self) -> None:
        """Make one model of those of all ranks: the last call of training. Collective.

        Exchanges under way come in early. Then weights and floating-point buffers become their means, where the
        algorithm lets ranks differ; elsewhere nothing changes. Training can go on from there: what starts from
        weights begins anew, unless all ranks were equal already. Between islands it goes on as it is, and the means are
        those over all ranks of all members, which call this after equally many steps.

        Raises:
            CollectiveMismatchError: another island exchanges something else now.
        """
        engine = self._bagua_engine
        engine.wake()
        engine.reducer.finish()

    @contextmanager
    def bagua_global_average(self) -> Iterator[None]:
        """In this block, weights and floating-point buffers are their means over all ranks. Collective.

        At its end each rank has its own again, and exchanges under way go on. Where all ranks are equal by what
        they exchange, nothing changes, and nothing is sent. Between islands the mean is that of all ranks of all
        members of the epoch, which call this after equally many steps.

        Raises:
            ConfigurationError: at the end of the block: the mean was trained on.
            CollectiveMismatchError: another island exchanges something else now.

        Example:
            >>> import bagua.comm
            >>> from bagua.parallel import with_bagua
            >>> layer = torch.nn.Linear(2, 2)
            >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            >>> model = with_bagua(layer, [optimizer], "diloco", bagua.comm.solo_group())
            >>> with model.bagua_global_average():
            ...     loss = model(torch.ones(1, 2)).sum()
        """
        reducer = self._bagua_engine.reducer
        reducer.after_optimizers()
        closing = reducer.phases.made(reducer.formation.declaration.closing())
        if not closing:
            yield
            return
        with GlobalAverage(reducer, closing):
            yield

    def bagua_close(self) -> None:
        """Give back the threads, connections and memory of the engine. Idempotent, and not collective.

        The module stays, and trains on this rank alone. Exchanges under way end first, which may take
        until slower ranks have come to the same step; what they bring is not used. A model that is
        dropped is closed by itself, soon after.
        """
        self._bagua_engine.close()

    @contextmanager
    def bagua_closing(self) -> Iterator[None]:
        """At the end of a ``with`` block, ``bagua_close``."""
        try:
            yield
        finally:
            self.bagua_close()

    @property
    def bagua_step(self) -> int:
        """Number of steps so far: of backward passes that ended one. Local, and nothing is copied.

        Steps before a checkpoint that was loaded count, and those that other islands made before this one joined.
        Inside ``no_sync`` no step ends. Where one rank has nothing to exchange, steps of the first optimizer count.

        Example:
            >>> import bagua.comm
            >>> from bagua.parallel import with_bagua
            >>> layer = torch.nn.Linear(2, 2)
            >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            >>> model = with_bagua(layer, [optimizer], "diloco", bagua.comm.solo_group())
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
            >>> model.bagua_step
            1
        """
        return self._bagua_engine.reducer.step

    def bagua_state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers on this rank, by names of parameters, with the layout of the buckets.

        Every rank saves its own. Collective: exchanges under way are completed first.
        """
        return self._bagua_engine.reducer.state_dict()

    def bagua_state_digest(self) -> str:
        """A digest of what must be equal on all ranks: weights, if the algorithm keeps them equal, and shared state.

        Collective, between two steps: what is owed is exchanged first.

        Returns:
            The digest, equal on all ranks.

        Raises:
            CollectiveMismatchError: on all ranks, naming the first tensor that differs, and ranks.
        """
        self._bagua_engine.reducer.after_optimizers()
        return checkpoints.digest(self._bagua_engine.reducer.formation)

    def bagua_load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``bagua_state_dict`` returned on this rank."""
        engine = self._bagua_engine
        engine.wake()
        engine.reducer.load_state_dict(state_dict)


@contextmanager
def _join_block(engine: BackwardHooks, *, by_initial_size: bool, throws: bool) -> Iterator[None]:
    """At the end of this block, make the steps of the ranks that have data left. Collective.

    Args:
        engine: engine of the model.
        by_initial_size: as for ``Joining``.
        throws: as for ``Joining``.
    """
    joining = Joining(engine.reducer, by_initial_size=by_initial_size, throws=throws)

    def step() -> None:
        engine.before_step()
        reducer = engine.reducer
        engine.enter_step()
        _forget_gradients(reducer)
        if not reducer.scheduler.formed:
            reducer.formation.order.arrived = list(reversed(reducer.formation.registration.parameters))
            reducer.initialize_buckets()
        reducer.begin_step()
        if reducer.phases.follows_gradients and not reducer.formation.options.find_unused_parameters:
            reducer.scheduler.fill_missing(reducer.scheduler.missing())
        reducer.mark_on_complete()
        if reducer.phases.follows_gradients and _is_made_of_optimizers(reducer.formation.declaration):
            joining.rescale()
            for optimizer in reducer.optimizers:
                optimizer.step()
        reducer.after_optimizers()
        _forget_gradients(reducer)

    equality = engine.reducer.formation.equality
    engine.wake()
    engine.reducer.compare_ranks()
    engine.joining, before, equality.at_once = joining, equality.at_once, True
    try:
        yield
        joining.follow(step)
    finally:
        engine.joining, equality.at_once = None, before
        joining.close()
        equality.paused = False


def _is_made_of_optimizers(algorithm: Algorithm) -> bool:
    """Whether a rank whose optimizers stand still would send what is out of date.

    Momenta are; and so are the weights of a host, which one of its ranks sends.
    """
    hosts = (one.how.over == "between" for one in algorithm.every_exchange() if isinstance(one.how, Sum))
    return algorithm.optimizer_class is not None or any(hosts)


def _forget_gradients(reducer: Reducer) -> None:
    """Those of a step without data are not to be stepped with."""
    for parameter in reducer.formation.registration.parameters:
        parameter.grad = None


#: Called with the reducer whenever training starts, or goes on with another one.
start_listeners: list[Callable[[Reducer], object]] = []


def refuse_in_join(before: BackwardHooks | None) -> None:
    """Refuse another engine in a ``join`` block: ranks that are at its end make the steps of this one.

    Raises:
        ConfigurationError: ``before`` is in one.
    """
    if before is not None and before.joining is not None:
        raise ConfigurationError(
            "this model is in a join() block",
            argument="algorithm",
            expected="one algorithm from the beginning of the block to its end",
            seen="another one, or the same once more",
            advice="Switch on all ranks before the block, or after it.",
        )


def replace_engine(before: BackwardHooks | None, reducer: Reducer) -> BackwardHooks:
    """Hooks for ``reducer``, after those of the engine before it have ended their work. Collective."""
    engine = BackwardHooks(reducer)
    if before is not None and not before.closed:
        before.remove_hooks()
        before.reducer.flush()
        before.reducer.phases.ending.merged_at = before.reducer.step  # Weights become their means.
        before.close()
    if before is not None:
        engine.accumulates = before.accumulates
    engine.create_hooks()
    return engine


def begin_training(reducer: Reducer, *, average: bool, broadcast_buffers: bool) -> None:
    """Tell those who listen, and give all ranks equal parameters, buffers and optimizer state. Collective.

    Args:
        reducer: reducer of the module and its optimizers; it has compared the models already.
        average: take the mean of what is floating-point, as at a switch of algorithms;
            otherwise everything comes from rank 0, as at the start.
        broadcast_buffers: at the start, the buffers, too.
    """
    for listener in start_listeners:
        listener(reducer)
    communicator = reducer.group.global_communicator
    if communicator.size == 1:
        return
    own = replicas.ignored_parameters(reducer.module)
    if average:
        replicas.allreduce_parameters(reducer.module, comm=communicator)
        replicas.allreduce_optimizer_state(reducer.optimizers, comm=communicator, own=own)
    else:
        replicas.broadcast_parameters(reducer.module, broadcast_buffers, comm=communicator)
        warn_of_other_settings(reducer.formation.model, communicator)
        replicas.broadcast_optimizer_state(reducer.optimizers, comm=communicator, own=own)
