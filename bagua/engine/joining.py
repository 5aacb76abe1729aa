"""Ranks that run out of data before others: they make the steps of those with nothing to add, until all are done."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.algorithms import Algorithm, Gradients
from bagua.engine.reducer import Reducer
from bagua.engine.state.replicas import sendable, take_state, tensors_of
from bagua.errors import CollectiveMismatchError, ConfigurationError


def check_joinable(algorithm: Algorithm, *, by_initial_size: bool) -> None:
    """Refuse an algorithm whose ranks cannot run out of data one by one.

    Raises:
        ConfigurationError: it is one.
    """
    exchanges = algorithm.every_exchange()
    if algorithm.in_background:
        raise ConfigurationError(
            "ranks that exchange between steps do not wait for each other's steps",
            argument="enable",
            expected="join() with an algorithm whose ranks step together",
            seen=repr(algorithm),
            advice="Leave join() out: a rank without data only has to stay until all are done, as with barrier().",
        )
    means = all(isinstance(one.what, Gradients) and not one.lag for one in exchanges)
    if not by_initial_size and not means:
        raise ConfigurationError(
            "only gradients of the same step can be divided by the number of ranks that have data",
            argument="divide_by_initial_world_size",
            expected="True",
            seen=repr(algorithm),
        )


class Joining:
    """One ``join`` block on one rank.

    Args:
        reducer: reducer of the model.
        by_initial_size: gradients are divided by the number of all ranks; otherwise of those that have data.
        throws: raise on all ranks as soon as one of them has no data left.

    Attributes:
        active: ranks of the group that make this step with data.
    """

    def __init__(self, reducer: Reducer, *, by_initial_size: bool, throws: bool) -> None:
        self._reducer = reducer
        # An exchange may still go on on the connections of the model.
        group = reducer.group.duplicate("join")
        reducer.formation.lanes.groups.append(group)
        self._group = group
        self._communicator = group.global_communicator
        self._by_initial_size = by_initial_size
        self._throws = throws
        self._announced = -1
        self._has_data, self._over = True, False
        self.active: tuple[int, ...] = tuple(range(group.size))

    def announce(self) -> bool:
        """Tell the others that this rank begins a step, once for each; whether it was told just now.

        Raises:
            CollectiveMismatchError: some rank has no data left, and that is not wanted.
        """
        if self._announced == self._reducer.step:
            return False
        self._announced = self._reducer.step
        told = torch.zeros(self._communicator.size, dtype=torch.int64, device=self._communicator.intake.home)
        told[self._communicator.rank] = self._has_data
        self._communicator.allreduce(told)
        present = tuple(rank for rank, here in enumerate(told.tolist()) if here)
        self._over = not present
        if present:
            self.active = present
            self._reducer.formation.equality.paused = len(present) < self._communicator.size
        ranks = self._communicator.ranks
        if present and self._throws and len(present) < len(ranks):
            raise CollectiveMismatchError(
                "some ranks have no data left",
                rank=ranks[self._communicator.rank],
                peers=[ranks[rank] for rank in range(len(ranks)) if rank not in present],
                call="join(throw_on_early_termination=True)",
                advice="Training can go on on all ranks after this error.",
            )
        return True

    def check_announced(self) -> None:
        """A backward pass begins: ranks without data make its step only if they know of it.

        Raises:
            ConfigurationError: no forward pass came between this backward pass and the one before.
        """
        if self._announced != self._reducer.step:
            raise ConfigurationError(
                "a step in a join() block begins without a forward pass of its own",
                argument="backward",
                expected="a forward pass of the model in the block before each backward pass",
                seen=f"none before that of step {self._reducer.step}",
                advice="Add up the losses and call backward() once; or run each forward pass after the backward pass "
                "before it.",
            )

    def rescale(self) -> None:
        """Divide by the number of ranks that have data, in the place of all."""
        factor = self._communicator.size / len(self.active)
        if self._by_initial_size or factor == 1.0:
            return
        for parameter in self._reducer.formation.registration.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def follow(self, step: Callable[[], object]) -> None:
        """This rank has no data left: make steps without, until no rank has any, and take the last one's state.

        Args:
            step: makes one step without data.
        """
        self._has_data = False
        self._reducer.after_optimizers()
        while self._announced == self._reducer.step or (self.announce() and not self._over):
            step()
        differed, self._reducer.formation.equality.paused = self._reducer.formation.equality.paused, False
        if differed and not self._reducer.formation.declaration.ranks_differ:
            self._take_state(max(self.active))

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._group.close()
        groups = self._reducer.formation.lanes.groups
        if self._group in groups:
            groups.remove(self._group)

    def _take_state(self, root: int) -> None:
        """All ranks take the weights, buffers and optimizer state of ``root``, which has stepped to the end."""
        reducer, communicator = self._reducer, self._communicator
        reducer.scheduler.settle()
        communicator.broadcast_coalesced(tensors_of(reducer.module, parameters=True, buffers=True), root)
        for optimizer in reducer.optimizers:
            mine = communicator.rank == root
            state = communicator.broadcast_object(sendable(optimizer.state_dict()) if mine else None, root)
            if not mine:
                take_state(optimizer, state)
