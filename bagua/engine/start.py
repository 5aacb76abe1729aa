"""How training with the engine begins, or goes on with another one: equal state on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from bagua.engine.hooks import BackwardHooks
from bagua.engine.reducer import Reducer
from bagua.engine.state.equality import warn_of_other_settings
from bagua.engine.state.replicas import (
    allreduce_optimizer_state,
    allreduce_parameters,
    broadcast_optimizer_state,
    broadcast_parameters,
    ignored_parameters,
)
from bagua.errors import ConfigurationError

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
    own = ignored_parameters(reducer.module)
    if average:
        allreduce_parameters(reducer.module, comm=communicator)
        allreduce_optimizer_state(reducer.optimizers, comm=communicator, own=own)
    else:
        broadcast_parameters(reducer.module, broadcast_buffers, comm=communicator)
        warn_of_other_settings(reducer.formation.model, communicator)
        broadcast_optimizer_state(reducer.optimizers, comm=communicator, own=own)
