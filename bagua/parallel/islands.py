"""A wrapped model as one of several islands: what a newcomer receives, and what must be equal on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms import Algorithm, DistributedAlgorithm, OverIslands, as_algorithm
from bagua.checks import check_kind
from bagua.comm import Group, ProcessGroup, as_group, get_default_group, is_initialized, solo_group
from bagua.engine import BackwardHooks, Reducer, name_of_rank, sendable, take_state
from bagua.errors import ConfigurationError
from bagua.membership import Islands

#: What belongs to one island stays there, as what its own codec has lost.
_NOTHING_OF_ITS_OWN: dict[str, Any] = {"parameters": {}, "others": [], "flights": []}


def over_islands(
    algorithm: Algorithm | DistributedAlgorithm | str, islands: Islands | None, *, elastic: bool
) -> Algorithm | DistributedAlgorithm | str:
    """``algorithm`` between ``islands``, if there are any; ``elastic`` lets gradients be exchanged between them.

    Raises:
        ConfigurationError: it cannot run there.
    """
    if islands is None and not elastic:
        return algorithm
    if islands is None:
        raise ConfigurationError(
            "only islands come and go",
            argument="elastic",
            expected="False without between=islands",
            seen=elastic,
            advice="Pass what join_islands returned as between=.",
        )
    check_kind(Islands, "what join_islands returned, or None", between=islands)
    return OverIslands(as_algorithm(algorithm), islands, elastic)


def group_of_island(process_group: Group | None, islands: Islands | None) -> Group | None:
    """The ranks of this island: those that joined, or this process alone.

    Raises:
        ConfigurationError: ``process_group`` has other ranks.
    """
    if islands is None:
        return process_group
    if process_group is None and not is_initialized():
        return solo_group()
    group: ProcessGroup = get_default_group() if process_group is None else as_group(process_group, "process_group")
    here = islands.ranks or (group.ranks[group.rank],)
    if group.ranks != here:
        raise ConfigurationError(
            "the ranks of this island are those that joined",
            argument="process_group",
            expected=f"a group of rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))}",
            seen=repr(group),
            advice="Call join_islands on all ranks, with the same process_group as here.",
        )
    return group


def refuse_to_switch(before: BackwardHooks | None) -> None:
    """Refuse another engine for a model that trains between islands: the other islands would wait for this one.

    Raises:
        ConfigurationError: ``before`` is such an engine, and is in use.
    """
    if before is not None and not before.closed and isinstance(before.reducer.formation.declaration, OverIslands):
        raise ConfigurationError(
            "this model trains between islands",
            argument="algorithm",
            expected="the one that all islands have agreed on",
            seen="another one, or the same once more",
            advice="Leave the islands and call bagua_close() first.",
        )


class HasState(Protocol):
    """What gives its state away and takes that of another, as an optimizer does."""

    def state_dict(self) -> dict[str, Any]:
        """The state, made of numbers, strings, tensors and containers of these."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace it."""


def come_in(engine: BackwardHooks, islands: Islands | None, optimizers: Sequence[HasState] | None = None) -> None:
    """Come in with the model of ``engine``: wait until this process takes part, and has the state of the others.

    Args:
        engine: engine of the model.
        islands: islands that it comes into; None for none.
        optimizers: optimizers whose state a newcomer receives; None for those of the engine.
    """
    if islands is None:
        return
    state = _State(engine.reducer, engine.reducer.optimizers if optimizers is None else optimizers)
    try:
        exchanges = engine.reducer.formation.declaration.every_exchange()
        early = not any("gradients" in one.needs for one in exchanges)
        islands.bind(engine.reducer.formation.facts, state, early=early)
        engine.reducer.after_failure = islands.save_if_lost
        gauges = engine.reducer.group.gauges
        gauges.update(islands.metrics())
        islands.on_change(lambda *_: gauges.update(islands.metrics()))
    except BaseException:
        engine.close()
        raise


class _State:
    """All that a newcomer receives: weights, buffers, optimizers, and what the algorithm remembers."""

    def __init__(self, reducer: Reducer, optimizers: Sequence[HasState]) -> None:
        self._reducer = reducer
        self._optimizers = optimizers

    def give(self) -> dict[str, Any]:
        """The state between two steps: tensors as they are, which change with the next step or exchange."""
        reducer = self._reducer
        remembered = reducer.state_dict(copy=False)
        return {
            "tensors": {name: tensor.detach() for name, tensor in _tensors(reducer.module).items()},
            "optimizers": [sendable(optimizer.state_dict()) for optimizer in self._optimizers],
            "engine": {**remembered, name_of_rank(remembered["rank"]): _NOTHING_OF_ITS_OWN},
        }

    def step(self) -> int:
        """Number of the last step."""
        return self._reducer.step

    def take(self, state: Mapping[str, Any], step: int) -> None:
        """Replace all of it before training begins, after step number ``step``; -1 for the one of the state."""
        reducer = self._reducer
        here = _tensors(reducer.module)
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                here[name].copy_(tensor)
        for optimizer, found in zip(self._optimizers, state["optimizers"], strict=True):
            if isinstance(optimizer, torch.optim.Optimizer):
                take_state(optimizer, found)
            else:
                optimizer.load_state_dict(found)
        engine = state["engine"]
        reducer.load_state_dict({**engine, "step": max(step, engine["step"])})


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
