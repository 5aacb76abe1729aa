"""What all states of communication hooks have in common: an exchange in the background, and what it remembers."""

# Annotations are not strings here: torch compares those of a hook with its own types.
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bagua.algorithms import Sum
from bagua.comm import BackwardWatch, GradBucket, ProcessGroup, Work, as_group, rank_among_all, size_of_all
from bagua.engine import Executor, Remembered, check_owner, compare, create_executor, meet
from bagua.errors import ConfigurationError, blame
from bagua.integrations._hooks.buckets import HookBuckets
from bagua.primitives import allreduce_sum, reducer_sum


class _Held(NamedTuple):
    """A bucket of DDP that is on its way.

    Attributes:
        flat: its gradients, one parameter after the other.
        parameters: parameters of the bucket.
        completion: future that ends when they are exchanged.
        failures: reasons why they could not be.
    """

    flat: torch.Tensor
    parameters: list[torch.Tensor]
    completion: torch.futures.Future[torch.Tensor]
    failures: list[BaseException]

    def views(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter with its part of the gradients."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return zip(self.parameters, self.flat.split_with_sizes(sizes), strict=True)


class HookState(ABC):
    """What ``codec_hook`` exchanges gradients with, and what it remembers. Subclasses say how they are summed.

    Ranks are connected when the first bucket is exchanged, on connections of this state's own. Buckets are
    exchanged one after the other in a background thread (on CUDA, on a stream), in the order in which DDP
    hands them over, which is the same on all ranks; meanwhile the backward pass goes on.

    Args:
        process_group: ranks of the model; see ``ReducerState``.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.

    Attributes:
        step: backward passes whose gradients were exchanged.
    """

    def __init__(self, process_group: Any, grad_scaler: torch.amp.GradScaler | None) -> None:
        self.step = 0
        self._grad_scaler = grad_scaler
        self._asked_for = process_group
        self._group: ProcessGroup | None = None
        self._executor: Executor | None = None
        self._places = HookBuckets()
        self._held: list[_Held] = []
        self._watch = BackwardWatch()
        self._parts: dict[str, torch.Tensor] = {}
        self._steps_of_parts: dict[str, int] = {}
        self._loaded = ["loaded state: none"]
        #: The group on which ranks have compared what they go on from.
        self._compared: ProcessGroup | None = None
        self._loads_to_compare, self._meetings = False, 0

    @property
    @abstractmethod
    def name(self) -> str:
        """What sums the gradients, with all options: saved states belong to it."""

    @abstractmethod
    def sum_at(self, step: int) -> Sum:
        """How the gradients of a step are summed; equal on all ranks.

        Args:
            step: number of the step, from 0.
        """

    @property
    def group(self) -> ProcessGroup:
        """The ranks, on connections of this state's own. Collective the first time."""
        if self._group is None or self._group.closed:
            self._group = as_group(self._asked_for).duplicate("hook")
            self._executor = None
        return self._group

    def exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to exchange a bucket of DDP.

        Args:
            bucket: torch's ``GradBucket``.

        Returns:
            A future of the bucket's buffer, which then holds the result.
        """
        flat = bucket.buffer()
        executor = self._executor or create_executor(self.group, flat.device, blocking=True)
        self._executor, step = executor, self.step
        self.step += bucket.is_last()
        devices: list[int | str | torch.device] | None = [flat.device] if flat.device.type == "cuda" else None
        completion: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        failures: list[BaseException] = []

        def outcome(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # What a callback raises is an error to C++ as well; what set_exception is given would be a result.
            if failures:
                raise failures[0]
            return flat

        future = completion.then(outcome)
        if bucket.index() == 0:  # Those of a backward pass that failed are not exchanged.
            self._held = []
        self._held.append(_Held(flat, bucket.parameters(), completion, failures))
        self._places.note(bucket.index(), self._held[-1].parameters, is_last=bucket.is_last())
        if self._places.awaits_layout and not bucket.is_last():
            return future
        held, self._held = self._held, []
        wait = executor.run(functools.partial(self._exchange, held, step))
        if flat.device.type == "cpu":
            self._watch.add(Work(lambda _: wait(), completion.done))
        return future

    def _exchange(self, held: Sequence[_Held], step: int) -> None:
        """Exchange buckets of one backward pass; afterwards no rank waits for them, even if it failed."""
        try:
            self._reduce_all(held, step)
        except BaseException as error:
            for one in held:
                one.failures.append(error)
            culprit, told = blame(error, self.group.ranks[self.group.rank], "an exchange of gradients")
            self.group.abort(told, culprit)
            raise
        finally:
            for one in held:
                one.completion.set_result(one.flat)

    @torch.no_grad()
    def _reduce_all(self, held: Sequence[_Held], step: int) -> None:
        """Reduce buckets as they are; in two steps in others, see ``HookBuckets.take_layout``."""
        self._compare()
        layout = []
        if self._places.awaits_layout:
            layout = self._places.take_layout([parameter for one in held for parameter in one.parameters])
        if not layout or len({one.flat.dtype for one in held}) > 1:
            for one in held:
                self._reduce(one.flat, one.parameters, step)
            return
        views = {id(parameter): view for one in held for parameter, view in one.views()}
        for parameters in layout:
            flat = torch.cat([views[id(parameter)] for parameter in parameters])
            self._reduce(flat, parameters, step)
            parts = flat.split_with_sizes([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                views[id(parameter)].copy_(part)

    def exchange_part(self, name: str, flat: torch.Tensor) -> None:
        """Exchange the gradients of a part of a model in place, before returning.

        Called in one order on all ranks, with an equal size for each name in every step.

        Args:
            name: name of the part.
            flat: its gradients, one-dimensional and contiguous.
        """
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = torch.empty(flat.numel(), device="meta")
        self._compare()
        step = self._steps_of_parts.get(name, self.step)
        self._steps_of_parts[name] = step + 1
        self._reduce(flat, [part], step)
        self.step = max(self.step, min(self._steps_of_parts.values()))

    def _compare(self) -> None:
        """Before the first exchange, and before the first one after a load: do all ranks go on from the same step?"""
        group = self.group
        if self._compared is group:
            if not self._loads_to_compare:
                return
            self._meetings += 1  # Ranks that have loaded nothing do not come; they cannot be asked on a communicator.
            meet(group, f"loaded/{self._meetings}", f"load_state_dict of {type(self).__name__}")
        self._compared, self._loads_to_compare = group, False
        compare(self._loaded, group.global_communicator, "states of this hook")

    @torch.no_grad()
    def _reduce(self, flat: torch.Tensor, parameters: list[torch.Tensor], step: int) -> None:
        group, how = self.group, self.sum_at(step)
        if (scale := how.share(group.size)) != 1:
            flat.mul_(scale)
        if how.reducer is None:
            allreduce_sum(flat, group, hierarchical=how.hierarchical)
            return
        memory = self._places.memory_of(flat, parameters, group.global_communicator, how.reducer)
        memory.step = step
        memory.loss_scale = 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()
        reducer_sum(flat, group, how.reducer, memory, hierarchical=how.hierarchical)
        memory.settle(flat)

    # Checkpoints.

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """What is remembered on this rank, by names of parameters. Every rank saves its own.

        Args:
            module: the model, or DDP around it.
        """
        parts = {name: part.numel() for name, part in self._parts.items()}
        return {
            "reducer": self.name,
            "rank": rank_among_all(),
            "world_size": size_of_all(),
            "step": self.step,
            "parts": parts,
            "buckets": self._layout(module),
            **self._places.collect(self._names(module)),
        }

    def load_state_dict(self, state_dict: dict[str, Any], module: torch.nn.Module) -> None:
        """Go on where ``state_dict`` was taken. To be called on all ranks before the same step, or on none.

        Args:
            state_dict: state of this rank.
            module: the model, or DDP around it.

        Raises:
            ConfigurationError: it belongs to another reducer or another model; or another rank, or another number of
                ranks, and something of it differs between ranks.
            CollectiveMismatchError: other ranks go on from another state; the next exchange of gradients raises it.
        """
        if state_dict["reducer"] != self.name:
            raise ConfigurationError(
                "this state belongs to another reducer",
                argument="state_dict",
                expected=self.name,
                seen=state_dict["reducer"],
            )
        if any((state_dict["parameters"], state_dict["others"])):  # else there is nothing that differs between ranks
            check_owner(state_dict, rank_among_all(), size_of_all())
        for name, numel in state_dict["parts"].items():
            self._parts[name] = torch.empty(numel, device="meta")
        remembered = Remembered(parameters=state_dict["parameters"], others=state_dict["others"])
        self._places.restore(remembered, self._names(module), state_dict.get("buckets", ()))
        self.step = state_dict["step"]
        self._steps_of_parts = {}
        buckets = [f"loaded bucket: {', '.join(names)}" for names in state_dict.get("buckets", ())]
        self._loaded, self._loads_to_compare = [f"loaded state: of step {self.step}", *buckets], True

    def forget(self) -> None:
        """Begin anew, with another model: nothing of earlier steps is used."""
        self.step = 0
        self._places = HookBuckets()
        self._parts = {}
        self._steps_of_parts = {}
        self._loaded, self._loads_to_compare = ["loaded state: none"], False

    def _layout(self, module: torch.nn.Module) -> list[list[str]]:
        """Names of the parameters of each bucket; none for parts, which are always the same."""
        names = {str(key): name for key, name in self._names(module).items()}
        return [] if self._parts else [[names[key] for key in bucket if key in names] for bucket in self._places.layout]

    def _names(self, module: torch.nn.Module) -> dict[int, str]:
        inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
        named = {id(parameter): name for name, parameter in inner.named_parameters()}
        return {**named, **{id(part): f"part {name}" for name, part in self._parts.items()}}

    def close(self) -> None:
        """Give back threads and connections. Idempotent; happens at the end of the process groups at the latest."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        if self._group is not None:
            self._group.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"
