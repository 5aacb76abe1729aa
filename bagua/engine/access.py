"""What a model can be asked about its engine, whichever way the engine came to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.buckets import Bucket
from bagua.checks import check_flags
from bagua.engine.average import GlobalAverage
from bagua.engine.hooks import BackwardHooks
from bagua.engine.joining import check_joinable, join_block


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
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
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
        return join_block(engine, by_initial_size=divide_by_initial_world_size, throws=throw_on_early_termination)

    def bagua_finish(self) -> None:
        """Make one model of those of all ranks: the last call of training. Collective.

        Exchanges under way come in early. Then weights and floating-point buffers become their means, where the
        algorithm lets ranks differ; elsewhere nothing changes. Training can go on from there: what starts from
        weights begins anew, unless all ranks were equal already. Between islands it goes on as it is, and the means are
        those over all ranks of all members, which call this after equally many steps.

        Raises:
            CollectiveMismatchError: another island exchanges something else now.
        """
        self._bagua_engine.reducer.finish()

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
        return self._bagua_engine.reducer.state_digest()

    def bagua_load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``bagua_state_dict`` returned on this rank."""
        self._bagua_engine.reducer.load_state_dict(state_dict)
