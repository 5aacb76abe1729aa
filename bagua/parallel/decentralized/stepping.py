"""The optimizers of ``DecentralizedDataParallel``: one for each bucket, stepped while backward goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from bagua.buckets import Bucket
from bagua.checks import check_kind, check_numbers
from bagua.errors import ConfigurationError

NamedParameters = list[tuple[str, torch.nn.Parameter]]
OptimizerFunction = Callable[[NamedParameters], torch.optim.Optimizer]
LRSchedulerFunction = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class _Part:
    """What steps one bucket."""

    bucket: Bucket
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None


class Stepping:
    """Makes the optimizer and the schedule of each bucket, and steps them.

    Args:
        optim_fn: makes an optimizer of the named parameters of a bucket.
        lr_scheduler_fn: makes a schedule for it.
        scaler: scaler of the losses.
        grad_clip_norm: the largest norm of the gradients of a bucket; 0 does not clip.

    Raises:
        ConfigurationError: an argument that cannot be used.
    """

    def __init__(
        self,
        optim_fn: OptimizerFunction,
        lr_scheduler_fn: LRSchedulerFunction | None = None,
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
    ) -> None:
        check_kind(Callable, "a function of a list of (name, parameter)", optim_fn=optim_fn)
        check_kind((Callable, NoneType), "a function of an optimizer, or None", lr_scheduler_fn=lr_scheduler_fn)
        check_kind((torch.amp.GradScaler, NoneType), "a torch.amp.GradScaler, or None", scaler=scaler)
        check_numbers(lambda norm: norm >= 0, "a number >= 0", grad_clip_norm=grad_clip_norm)
        self._optim_fn = optim_fn
        self._lr_scheduler_fn = lr_scheduler_fn
        self._scaler = scaler
        self._clip_norm = grad_clip_norm
        self._parts: list[_Part] = []
        self._carried: dict[str, Any] | None = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each bucket; none before the first backward pass."""
        return [part.optimizer for part in self._parts]

    @property
    def schedules(self) -> list[LRScheduler]:
        """One for each bucket, if there are any."""
        return [part.schedule for part in self._parts if part.schedule is not None]

    def pre_average_hook(self, bucket: Bucket) -> Callable[..., object] | None:
        """What the bucket's optimizer wants to be called with before each mixing."""
        hook: Callable[..., object] | None = getattr(self._parts[bucket.index].optimizer, "pre_average_hook", None)
        return hook

    def prepare(self, bucket: Bucket) -> None:
        """Make what steps ``bucket``. Buckets come in order; the first one starts anew, with the state so far.

        Raises:
            ConfigurationError: the functions did not make what they should.
        """
        if bucket.index == 0 and self._parts:
            self._carried, self._parts = self.state_dict(), []
        named = list(zip(bucket.names, bucket.parameters, strict=True))
        optimizer = self._optim_fn(list(named))
        _check_optimizer(optimizer, named)
        schedule = None
        if self._lr_scheduler_fn is not None:
            schedule = self._lr_scheduler_fn(optimizer)
            if not hasattr(schedule, "step"):
                raise _unusable("lr_scheduler_fn", "a learning rate scheduler", type(schedule).__name__)
        part = _Part(bucket, optimizer, schedule)
        self._parts.append(part)
        if self._carried is not None:
            _restore(part, self._carried)

    # One step.

    @torch.no_grad()
    def step(self, bucket: Bucket) -> None:
        """Update the weights of ``bucket`` and drop its gradients; those that are missing count as zero."""
        self._carried = None
        part = self._parts[bucket.index]
        last = bucket.index == len(self._parts) - 1
        self._clip(part)
        if self._scaler is None:
            part.optimizer.step()
        else:
            self._scaler.step(part.optimizer)
            if last:
                self._scaler.update()
        part.optimizer.zero_grad()
        if part.schedule is not None:
            part.schedule.step()

    def _clip(self, part: _Part) -> None:
        for parameter in part.bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._clip_norm:
            return
        if self._scaler is not None:
            self._scaler.unscale_(part.optimizer)
        torch.nn.utils.clip_grad_norm_(part.bucket.parameters, self._clip_norm)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """State of all optimizers and schedules, by names of parameters."""
        if not self._parts:
            return self._carried or {"buckets": [], "parameters": {}}
        state: dict[str, Any] = {"buckets": [], "parameters": {}}
        for part in self._parts:
            names = {
                id(parameter): name for name, parameter in zip(part.bucket.names, part.bucket.parameters, strict=True)
            }
            for parameter, values in part.optimizer.state.items():
                state["parameters"][names[id(parameter)]] = dict(values)
            groups = [
                {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
                for group in part.optimizer.param_groups
            ]
            schedule = None if part.schedule is None else part.schedule.state_dict()
            state["buckets"].append({"names": list(part.bucket.names), "groups": groups, "schedule": schedule})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], known: Iterable[str]) -> None:
        """Go on where ``state_dict`` was taken; before there are buckets, as soon as there are.

        Args:
            state_dict: state with any layout of buckets.
            known: names of all parameters.

        Raises:
            ConfigurationError: it has state of other parameters.
        """
        foreign = sorted(set(state_dict["parameters"]) - set(known))
        if foreign:
            raise ConfigurationError(
                "this state belongs to other parameters",
                argument="state_dict",
                expected="names of parameters of this model",
                seen=", ".join(foreign),
            )
        self._carried = {key: copy.deepcopy(state_dict[key]) for key in ("buckets", "parameters")}
        for part in self._parts:
            _restore(part, self._carried)

    def __repr__(self) -> str:
        scaled = "" if self._scaler is None else ", scaler"
        return f"Stepping(grad_clip_norm={self._clip_norm}{scaled})"


def _restore(part: _Part, saved: Mapping[str, Any]) -> None:
    """Put saved state into new optimizers; numbers of a group come from where the first parameter was."""
    names = {id(parameter): name for name, parameter in zip(part.bucket.names, part.bucket.parameters, strict=True)}
    order = [names[id(parameter)] for group in part.optimizer.param_groups for parameter in group["params"]]
    state = part.optimizer.state_dict()
    state["state"] = {
        number: copy.deepcopy(saved["parameters"][name])
        for number, name in enumerate(order)
        if name in saved["parameters"]
    }
    home = next((one for one in saved["buckets"] if part.bucket.names[0] in one["names"]), None)
    if home is not None and len(home["groups"]) == len(state["param_groups"]):
        for group, numbers in zip(state["param_groups"], home["groups"], strict=True):
            group.update({key: value for key, value in numbers.items() if key != "params"})
    part.optimizer.load_state_dict(state)
    if home is not None and home["schedule"] is not None and part.schedule is not None:
        part.schedule.load_state_dict(home["schedule"])


def _check_optimizer(optimizer: object, named: NamedParameters) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _unusable("optim_fn", "an optimizer", type(optimizer).__name__)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    dropped = [name for name, parameter in named if id(parameter) not in held]
    if dropped:
        raise _unusable("optim_fn", "an optimizer of all parameters that it is given", f"none for {', '.join(dropped)}")
    if len(held) > len(named):
        raise _unusable(
            "optim_fn", "an optimizer of the parameters that it is given", f"{len(held) - len(named)} more than these"
        )


def _unusable(argument: str, expected: str, seen: object) -> ConfigurationError:
    return ConfigurationError(f"{argument} made something else", argument=argument, expected=expected, seen=seen)
