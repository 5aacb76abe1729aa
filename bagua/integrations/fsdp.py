"""Training replicas of a model that FSDP2 shards, which exchange every so often: each rank sends its own shards."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bagua import algorithms
from bagua.algorithms import Algorithm, DistributedAlgorithm
from bagua.checks import check_kind
from bagua.comm import Communicator, ProcessGroup, ReduceOp, as_group, solo_group
from bagua.engine import EngineAccess, compare, optimizer_list
from bagua.errors import ConfigurationError
from bagua.integrations._sharded import LocalState, local_of, ranks_of_meshes, refuse_shared_mesh, sharded_parts
from bagua.membership import Islands
from bagua.parallel import come_in, with_bagua
from bagua.primitives import State

__all__ = ["ShardExchange", "exchange_shards"]

#: All ranks count alike how many models they have wrapped, so connections have names that they know.
_numbers = itertools.count()


def exchange_shards(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
    algorithm: Algorithm | DistributedAlgorithm | str,
    process_group: Any = None,
    *,
    between: Islands | None = None,
) -> ShardExchange:
    """Train replicas of a model that FSDP2 shards with ``diloco``, ``local_sgd`` or the like. Collective.

    Torch sums gradients inside the mesh of each replica in each step. Every so often each rank exchanges its own
    shards with those ranks of the other replicas that hold the same ones, so it sends as many times less as there are
    shards. The weights of the first replica become those of all.

    A step is one ``step()`` of each of the optimizers. When the last one returns, the weights have changed. An update
    that a ``GradScaler`` skips is no step: the other replicas wait for this one at their next exchange.

    Args:
        module: and its parts to which ``fully_shard`` was applied; its weights exist.
        optimizers: optimizers that step its parameters.
        algorithm: exchanges weights, and no gradients.
        process_group: the ranks that hold the same shard as this one, a group of ``bagua.comm`` or of
            ``torch.distributed``; None with ``between``.
        between: islands that ``join_islands`` returned: each of them is one replica, and may come and go. The ranks
            that joined are those among which the model is sharded. Waits until this island takes part; the ranks of a
            newcomer receive their shards, and what optimizers remember of them, from their counterparts.

    Returns:
        What the exchanges are asked and ended through. They go on as long as the optimizers exist.

    Raises:
        ConfigurationError: ``fully_shard`` was applied to nothing in ``module``, or torch sums gradients over ranks
            of ``process_group`` or of another island, or the algorithm exchanges gradients, or averages in the
            background, or neither ``process_group`` nor ``between`` is given, or both.
        CollectiveMismatchError: replicas have other models, shards or options.
    """
    check_kind((Islands, type(None)), "what join_islands returned, or None", between=between)
    parts = sharded_parts(module)
    declaration = algorithms.as_algorithm(algorithm)
    _check(declaration)
    group = _group_of_replicas(parts.values(), process_group, between)
    for part in parts.values():
        part.unshard()  # The first time FSDP moves a shard that it must pad, in versions of torch before 2.13.
        part.reshard()
    if between is not None:
        declaration = algorithms.OverIslands(declaration, between, sharded=True)
    return ShardExchange(module, optimizer_list(optimizers), declaration, group, _mates(parts.values()), between)


def _group_of_replicas(parts: Iterable[torch.nn.Module], process_group: Any, islands: Islands | None) -> ProcessGroup:
    """The ranks with the same shard that are always there: those of ``process_group``, or between islands this one."""
    if (process_group is None) == (islands is None):
        raise ConfigurationError(
            "replicas are known in one way",
            argument="process_group",
            expected="the ranks that hold the same shard, or between=islands",
            seen="neither" if islands is None else "both",
        )
    if islands is None:
        group: ProcessGroup = as_group(process_group, "process_group")
        refuse_shared_mesh(parts, group, "process_group")
        return group
    everyone = as_group(None, "process_group")
    here = islands.ranks or (everyone.ranks[everyone.rank],)
    strangers = set(_mates(parts)) - set(here)
    if strangers:
        raise ConfigurationError(
            "an island has all shards of its replica",
            argument="between",
            expected=f"a mesh of ranks {list(here)}, which joined together",
            seen=f"ranks {sorted(strangers)}, too",
            advice="Shard the model among the ranks that call join_islands together.",
        )
    return solo_group()


def _mates(parts: Iterable[torch.nn.Module]) -> list[int]:
    """The ranks with the shards of this replica."""
    everyone = as_group(None, "process_group")
    return sorted({everyone.ranks[everyone.rank]}.union(ranks_of_meshes(parts)))


def _check(algorithm: Algorithm) -> None:
    for one in algorithm.every_exchange():
        of_weights = "gradients" not in one.needs | one.writes and {one.at, one.until} == {"stepped"}
        if not of_weights or algorithm.in_background:
            raise ConfigurationError(
                "FSDP keeps the gradients of what it shards to itself, so only weights can be exchanged",
                argument="algorithm",
                expected="diloco, local_sgd, slowmo or sparse_loco, with start_after=0 and without inner; or "
                "low_precision_decentralized",
                seen=repr(algorithm),
                advice="For gradients use bagua.integrations.ddp_comm_hooks.register_fsdp_hook.",
            )


@dataclass(frozen=True, repr=False)
class _ForAllShards(algorithms.How):
    """Another exchange, whose result counts for all shards of the model, or for none. It is as of a whole model.

    Args:
        inner: the exchange of the ranks that hold the same shard.
        mates: communicator of the ranks that hold the shards of one replica.
    """

    inner: algorithms.Sum | algorithms.BetweenIslands
    mates: Communicator

    @property
    def alone(self) -> bool:
        return self.inner.alone

    @property
    def uniform(self) -> bool:
        return self.inner.uniform

    @property
    def contraction(self) -> float | None:
        return self.inner.contraction

    @property
    def tells_lost(self) -> bool:
        """As of a whole model."""
        return self.inner.tells_lost

    def state(self) -> tuple[State, ...]:
        return self.inner.state()

    def check_dtype(self, dtype: torch.dtype) -> None:
        self.inner.check_dtype(dtype)

    def check_loads(self) -> None:
        self.inner.check_loads()

    def scale(self, group: ProcessGroup) -> float:
        return self.inner.scale(group)

    def run(self, flight: algorithms.Flight, group: ProcessGroup) -> None:
        """Exchange, and agree: what is not finite elsewhere is dropped here, too, and the whole replica goes back."""
        sent = flight.flat.isfinite().all()
        work = self.inner.run(flight, group)
        if work is not None:
            work.wait()
        finite = torch.stack([sent, flight.flat.isfinite().all()]).to(torch.uint8)
        self.mates.allreduce(finite, ReduceOp.MIN)
        flight.diverged = not finite[0]
        if not finite[1]:
            flight.flat.fill_(torch.nan)


@dataclass(frozen=True, repr=False)
class _OfShards(algorithms.WithInner):
    """Another algorithm, of the shards of a model."""

    mates: Communicator

    def exchanges(self, phase: Hashable = 0) -> tuple[algorithms.Exchange, ...]:
        """Those of the inner algorithm, agreed on by the ranks that hold the other shards."""
        return tuple(map(self._of_shards, self.inner.exchanges(phase)))

    def closing(self) -> tuple[algorithms.Exchange, ...]:
        """As those of the inner algorithm."""
        return tuple(map(self._of_shards, self.inner.closing()))

    def _of_shards(self, exchange: algorithms.Exchange) -> algorithms.Exchange:
        if not isinstance(exchange.how, algorithms.Sum | algorithms.BetweenIslands) or "weights" not in exchange.needs:
            return exchange
        return dataclasses.replace(exchange, how=_ForAllShards(exchange.how, self.mates))

    def __repr__(self) -> str:
        return repr(self.inner)


class _Shards(torch.nn.Module):
    """The memory of the shards of this rank as a plain module, with the names of the model that they are of."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._buffers_of = weakref.ref(module)
        for name, parameter in module.named_parameters():
            *path, last = name.split(".")
            place: torch.nn.Module = self
            for step in path:
                if step not in dict(place.named_children()):
                    place.add_module(step, torch.nn.Module())
                place = place.get_submodule(step)
            place.register_parameter(last, torch.nn.Parameter(local_of(parameter), parameter.requires_grad))

    def named_buffers(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the model, as they are now: they are not sharded."""
        module = self._buffers_of()
        return iter(()) if module is None else module.named_buffers(*arguments, **options)


class ShardExchange(EngineAccess):
    """The exchanges of the replicas of a sharded model. Made by ``exchange_shards``.

    Args:
        module: module that is sharded.
        optimizers: optimizers of its parameters.
        algorithm: algorithm that says what is exchanged.
        group: group of the ranks with the same shard.
        mates: ranks of all, with the shards of this replica.
        islands: islands that this replica is one of; None for replicas that are always there.

    Attributes:
        module: module that is sharded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        group: ProcessGroup,
        mates: Sequence[int],
        islands: Islands | None = None,
    ) -> None:
        self.module = module
        self._parameters = list(module.parameters())
        self._shards = _Shards(module)
        self._optimizers = list(optimizers)
        memory = dict(zip(map(id, self._parameters), self._shards.parameters(), strict=True))
        #: Optimizers of the shards that never step: exchanges read learning rates from them.
        self._twins: list[torch.optim.Optimizer] = []
        for optimizer in self._optimizers:
            groups = [
                {"params": [memory[id(one)] for one in group["params"] if id(one) in memory], "lr": float(group["lr"])}
                for group in optimizer.param_groups
            ]
            self._twins.append(torch.optim.SGD(groups))
        self._stepped: set[int] = set()
        everyone = as_group(None, "process_group")
        self._mates = everyone.connect(mates, f"shards{next(_numbers)}", timeout_s=group.timeout_s)
        self._everyone = weakref.ref(everyone)
        of_shards = _OfShards(algorithm, self._mates)
        try:
            facts = (f"{name}: {list(one.shape)}, {one.dtype}" for name, one in module.named_parameters())
            compare([f"algorithm {algorithm!r}", *facts], self._mates, "models")
            wrapped: Any = with_bagua(self._shards, self._twins, of_shards, group, do_flatten=False)
            self._bagua_engine = wrapped._bagua_engine  # noqa: SLF001 - ours
            come_in(self._bagua_engine, islands, [LocalState(one) for one in self._optimizers])
        except BaseException:
            everyone.disconnect(self._mates)
            raise
        self._reshard()
        loaded: Any = module  # Torch has no hints for these.
        self._handles = [
            loaded.register_load_state_dict_pre_hook(self._before_load),
            loaded.register_load_state_dict_post_hook(self._after_load),
        ]
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step the parameters, as they were given."""
        return list(self._optimizers)

    # Steps.

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The first optimizer of a round is about to step: what starts from weights starts from these."""
        reducer = self._bagua_engine.reducer
        if reducer.formation.idle or not self._bagua_engine.synchronize:
            return
        if id(optimizer) in self._stepped:  # The others do not step as often as this one.
            self._end_round()
        if self._stepped:
            return
        reducer.formation.failure.check()
        reducer.after_optimizers()
        self._check_memory()
        for one, twin in zip(self._optimizers, self._twins, strict=True):
            for group, copied in zip(one.param_groups, twin.param_groups, strict=True):
                copied["lr"] = float(group["lr"])
        reducer.before_step()
        reducer.begin_step()
        reducer.mark_on_complete()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped; the last one of a round ends it."""
        if self._bagua_engine.reducer.formation.idle or not self._bagua_engine.synchronize:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._end_round()

    def _end_round(self) -> None:
        self._stepped.clear()
        self._bagua_engine.reducer.after_optimizers(late=False)

    def _check_memory(self) -> None:
        """Refuse to exchange shards that FSDP has moved: the memory that is exchanged is not the one that trains."""
        pairs = zip(self._shards.named_parameters(), self._parameters, strict=True)
        moved = [name for (name, shard), parameter in pairs if local_of(parameter).data_ptr() != shard.data_ptr()]
        if moved:
            with self._bagua_engine.reducer.giving_up():
                raise ConfigurationError(
                    f"the shard of {moved[0]} lies elsewhere now",
                    argument="module",
                    expected="shards that stay where they were when exchange_shards was called",
                    seen="another tensor, as after to() or load_state_dict(assign=True)",
                    advice="Close this exchange on all ranks with bagua_close(), and call exchange_shards again.",
                )

    # Weights that change between steps.

    def _reshard(self) -> None:
        """FSDP gathers weights anew where it still holds what they were."""
        for part in sharded_parts(self.module).values():
            part.reshard()

    def _before_load(self, *_: Any) -> None:
        self._bagua_engine.reducer.weights_will_be_loaded()

    def _after_load(self, *_: Any) -> None:
        self._bagua_engine.reducer.weights_were_loaded()

    def bagua_finish(self) -> None:
        """Make one model of all replicas: the last call of training. Collective; see ``EngineAccess.bagua_finish``."""
        super().bagua_finish()
        self._reshard()

    @contextmanager
    def bagua_global_average(self) -> Iterator[None]:
        """In this block, weights are their means over all replicas. Collective; see ``EngineAccess``."""
        with super().bagua_global_average():
            self._reshard()
            yield
        self._reshard()

    def join(
        self,
        divide_by_initial_world_size: bool = True,  # noqa: ARG002 - as of other models
        enable: bool = True,
        throw_on_early_termination: bool = False,  # noqa: ARG002 - as of other models
    ) -> AbstractContextManager[None]:
        """Refused, unless it is off: FSDP needs all shards in each forward pass.

        Raises:
            ConfigurationError: it is on.
        """
        if not enable:
            return nullcontext()
        raise ConfigurationError(
            "ranks that hold shards cannot run out of data one after the other",
            argument="enable",
            expected="False",
            seen=enable,
            advice="Give every rank the same number of batches.",
        )

    def bagua_close(self) -> None:
        """End the exchanges; the replica trains on by itself. Idempotent, and not collective."""
        while self._handles:
            self._handles.pop().remove()
        super().bagua_close()
        everyone = self._everyone()
        if everyone is not None:
            everyone.disconnect(self._mates)
