"""Outer optimizers: they step the anchor with the mean difference, and the weights follow."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Flight, Then
from bagua.algorithms.exchanges.values import Add, Blend, Replace
from bagua.buckets import Bucket
from bagua.checks import check_kind
from bagua.errors import ConfigurationError
from bagua.primitives import State

__all__ = ["EagerStep", "Outer", "OuterStep"]

_REPLACE = Replace()
#: Elements of a piece that an optimizer gets where pieces do: with its gradient and momentum it fits in a cache.
_PIECE_NUMEL = 2**16
#: The fused SGD of torch rounds what is left over at the end of a tensor in its own way. Multiples of this leave none.
_LINE_NUMEL = 16

_Division = Callable[[torch.Tensor], list[torch.Tensor]]


def check_has_anchor(exchange: Exchange) -> tuple[State, ...]:
    """Refuse to step an anchor where there is none; return what is remembered where it is.

    Raises:
        ConfigurationError: ``exchange`` sends no difference.
    """
    what = exchange.what
    if what is None or "anchor" not in what.reads:
        raise ConfigurationError(
            "an outer step goes from an anchor", argument="what", expected="Difference()", seen=repr(what)
        )
    return what.state()


def restart_unless_finite(flight: Flight, anchor: torch.Tensor) -> bool:
    """Whether the result is of no use. A rank whose own weights are not finite goes back to ``anchor`` then."""
    if flight.finite:
        return False
    # Between parameters there is padding, which may hold anything where memory is not cleared.
    if flight.diverged or not torch.isfinite(flight.weights(torch.zeros_like(flight.flat))).all():
        go_back(flight, anchor)
    return True


def go_back(flight: Flight, anchor: torch.Tensor) -> None:
    """Make ``anchor`` the weights of this rank."""
    flight.bucket.write_weights(anchor)
    for parameter in flight.bucket.parameters:  # Gradients of what was there before must not follow.
        if parameter.grad is not None:
            parameter.grad.zero_()


class Outer:
    """An optimizer of torch, or one like it, as a value: its class and its options.

    Args:
        kind: makes an optimizer of a list of parameters. A class or a function of a module, so that it has a name that
            all ranks know.
        options: keyword arguments of it.

    Raises:
        ConfigurationError: ``kind`` is no class or function that can be imported.

    Example:
        >>> Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    """

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        name = _name_of(kind)
        if not name:
            raise ConfigurationError(
                "what makes an outer optimizer needs a name that all ranks know",
                argument="kind",
                expected="a class or a function of a module, as torch.optim.SGD",
                seen=repr(kind),
            )
        self._value = (kind, tuple(sorted(options.items())))
        self._shown = f"Outer({', '.join([name, *(f'{key}={value!r}' for key, value in options.items())])})"

    def make(self, parameters: Sequence[torch.Tensor | dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of ``parameters``, or of groups of them."""
        kind, options = self._value
        return kind(list(parameters), **dict(options))

    @property
    def is_elementwise(self) -> bool:
        """Whether it treats each element by itself, so that it may get other pieces than parameters."""
        return self._value[0] is torch.optim.SGD

    def fuses(self, flat: torch.Tensor) -> bool:
        """Whether torch can step ``flat`` in one pass over memory, with the same result bit by bit.

        Not in 16 bits: there the fused SGD of torch 2.13 is wrong on a CPU.
        """
        chosen = {name for name, _ in self._value[1]} & {"differentiable", "foreach", "fused"}
        kept = flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64)
        return self.is_elementwise and kept and not chosen

    def fuses_subtraction(self, flat: torch.Tensor) -> bool:
        """Whether the same pass can subtract weights from ``flat``, and step along the difference.

        SGD with ``maximize`` and a decay of 1 adds ``flat`` to minus the gradient first, which rounds as a difference.
        """
        return self.fuses(flat) and not {"maximize", "weight_decay"}.intersection(name for name, _ in self._value[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outer) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._shown)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, self._value

    def __repr__(self) -> str:
        return self._shown


def _made(kind: Callable[..., torch.optim.Optimizer], options: tuple[tuple[str, Any], ...]) -> Outer:
    return Outer(kind, **dict(options))


def _name_of(kind: object) -> str:
    """The shortest name under which ``kind`` can be imported; nothing if there is none."""
    module, name = getattr(kind, "__module__", None) or "", getattr(kind, "__name__", "")
    packages = module.split(".")
    for length in range(1, len(packages) + 1):
        package = ".".join(packages[:length])
        if package and getattr(importlib.import_module(package), name, None) is kind:
            return f"{package}.{name}"
    return ""


def _can_be_kept(values: Sequence[Any], parameters: Sequence[torch.Tensor]) -> bool:
    """Whether one flat tensor, or one number, can stand for what an optimizer remembers of each parameter."""
    if all(value is None for value in values):
        return True
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    alike = all(value.shape == one.shape for value, one in zip(values, parameters, strict=True))
    return alike or all(value.dim() == 0 and value.item() == values[0].item() for value in values)


@dataclass(frozen=True)
class Retain:
    """Weights become the anchor, less what was lost of this rank's difference: only what was sent is taken from them.

    Needs no memory for residuals: the next difference has them.

    Paper: Xie et al., "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020.
    """


@dataclass(frozen=True)
class OuterStep(Then):
    """The outer optimizer steps the anchor with the mean difference as its gradient; the weights follow.

    ``Theta <- Outer(Theta, D)``. A result that is not finite is dropped. A rank whose own weights are not finite
    restarts from the anchor.

    Args:
        optimizer: optimizer of the anchor.
        land: how the weights follow: ``Replace()``: they become the anchor. ``Blend(keep)``: they keep a part of what
            was learned meanwhile. ``Add()``: they become the anchor, and what was learned meanwhile is added.
            ``Retain()``: they keep what was lost of this rank's difference.

    Raises:
        ConfigurationError: another way to land.

    Paper: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    optimizer: Outer
    land: Replace | Blend | Add | Retain = _REPLACE

    def __post_init__(self) -> None:
        check_kind(Outer, "as Outer(torch.optim.SGD, lr=0.7)", optimizer=self.optimizer)
        check_kind((Replace, Blend, Add, Retain), "Replace(), Blend(...), Add() or Retain()", land=self.land)

    @property
    def replaces(self) -> bool:  # type: ignore[override]
        """As the weights follow."""
        return isinstance(self.land, Retain) or self.land.replaces

    def check(self, exchange: Exchange) -> None:
        """Refuse what has no anchor; and to keep what is lost, where that is fed back, or lost of a sum."""
        check_has_anchor(exchange)
        how = exchange.how
        if isinstance(self.land, Retain) and not (how is not None and how.tells_lost and exchange.at_once):
            raise ConfigurationError(
                f"{self!r} leaves in the weights of each rank what is lost of its part",
                argument="how",
                expected="a mean to which each rank sends for itself, without error feedback and at once",
                seen=repr(exchange),
                advice="Use hierarchical=False, and no islands or hosts that train as one.",
            )

    def state(self) -> tuple[State, ...]:
        """What the optimizer remembers."""
        return (State("outer", per="family", scope="shared"),)

    def check_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse an optimizer that cannot step such parameters, or whose state cannot be kept; tried on small ones."""
        kinds = {(one.dim(), torch.promote_types(one.dtype, torch.float32), one.device) for one in parameters}
        small = [
            torch.nn.Parameter(torch.zeros(tuple(range(2, 2 + dims)), dtype=dtype, device=device))
            for dims, dtype, device in kinds
        ]
        if not small:
            return
        for one in small:
            one.grad = torch.zeros_like(one)
        try:
            optimizer = self.optimizer.make(small)
            optimizer.step()
        except Exception as error:
            raise self._refused(f"it fails: {error}") from error
        states = [optimizer.state[one] for one in small]
        for key in sorted({key for state in states for key in state}):
            if not _can_be_kept([state.get(key) for state in states], small):
                raise self._refused(f"it remembers {key!r}, which is neither like its parameter nor equal for all")

    def _refused(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.optimizer!r} cannot step the anchor of this model: {problem}",
            argument="optimizer",
            expected="an optimizer that steps without a closure, as torch.optim.SGD, Adam, AdamW or Adagrad",
            seen=repr(self.optimizer),
        )

    def start(self, flight: Flight) -> None:
        """Know what weights are to keep, or not to keep: what was sent would be sent again."""
        if isinstance(self.land, Add):
            flight.keep()
        if isinstance(self.land, Retain):
            flight.lost = flight.take().zero_()

    @torch.no_grad()
    def fold(self, flight: Flight) -> None:
        """Step, and let the weights follow."""
        if not restart_unless_finite(flight, flight.state["anchor"]):
            with flight.memory.changing():
                self._follow(flight, flight.state["anchor"])

    def _follow(self, flight: Flight, anchor: torch.Tensor) -> None:
        if isinstance(self.land, Replace):
            # On a CPU, one pass over memory subtracts and steps.
            alike = anchor.dtype == flight.bucket.dtype and anchor.device == flight.bucket.device
            fuses = flight.unfilled and alike and self.optimizer.fuses_subtraction(anchor)
            _step(self.optimizer, flight, anchor, None if fuses else flight.flat)
            flight.bucket.write_weights(anchor)
            return
        stepped = anchor.clone()
        _step(self.optimizer, flight, stepped, flight.flat)
        flight.bucket.write_weights(self._landed(flight, anchor, stepped, self.land))
        anchor.copy_(stepped)

    @staticmethod
    def _landed(
        flight: Flight, anchor: torch.Tensor, stepped: torch.Tensor, land: Blend | Add | Retain
    ) -> torch.Tensor:
        """What the weights become when the anchor becomes ``stepped``."""
        if isinstance(land, Retain) and flight.scale:
            assert flight.lost is not None
            return stepped.sub(flight.lost.to(stepped), alpha=1.0 / flight.scale)
        now = flight.weights(torch.empty_like(flight.flat)).to(stepped)
        if isinstance(land, Blend):
            return torch.lerp(stepped, now, land.keep)
        change = stepped - anchor
        if isinstance(land, Retain):  # A rank that has learned nothing has sent nothing.
            return now.add_(change)
        if flight.sent is not None:
            change.add_(flight.sent.to(change))
        return now.add(change, alpha=land.gain)


def _step(optimizer: Outer, flight: Flight, place: torch.Tensor, difference: torch.Tensor | None) -> None:
    """Step ``place`` against ``difference``; what the optimizer remembers is brought up to date.

    Args:
        optimizer: optimizer of ``place``.
        flight: flight whose bucket and memory they are.
        place: flat tensor to step.
        difference: flat tensor; None for ``place`` minus the weights, if ``optimizer.fuses_subtraction(place)``.
    """
    options: dict[str, Any] = {}
    if difference is None:
        divide: _Division = functools.partial(_lines_of_parameters, flight.bucket)
        gradients = [piece for weights in flight.bucket.memory() for piece in _lines(weights)]
        options = {"maximize": True, "weight_decay": 1.0}
    else:
        divide = _division(optimizer, flight, place)
        gradients = divide(difference.to(place))
    parameters = [torch.nn.Parameter(piece) for piece in divide(place)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    fuses = optimizer.fuses(place)
    # Groups are stepped in one pass, unless something would be left over at the end.
    groups = [{"params": [one], "fused": one.numel() % _LINE_NUMEL == 0, **options} for one in parameters]
    made = optimizer.make(groups if fuses else parameters)
    remembered = {key: value for key, value in flight.state.items() if key.startswith("outer.")}
    for key, value in remembered.items():
        elementwise = value.shape == place.shape
        if elementwise and value.device != place.device:  # It comes from a checkpoint.
            value = flight.state[key] = value.to(place.device)  # noqa: PLW2901
        parts = divide(value) if elementwise else [value.clone() for _ in parameters]
        for parameter, part in zip(parameters, parts, strict=True):
            made.state[parameter][key.removeprefix("outer.")] = part
    made.step()
    for key in {key for parameter in parameters for key in made.state[parameter]}:
        _remember(flight, f"outer.{key}", [made.state[parameter].pop(key, None) for parameter in parameters], divide)


def _division(optimizer: Outer, flight: Flight, place: torch.Tensor) -> _Division:
    """Into what an optimizer gets flat memory: parameters; where that is the same, all of it, or pieces in a cache."""
    if not optimizer.is_elementwise or place.device.type != "cpu":
        return flight.views
    return _lines if optimizer.fuses(place) else lambda flat: list(torch.split(flat, _PIECE_NUMEL))


def _lines(flat: torch.Tensor) -> list[torch.Tensor]:
    """What a fused optimizer steps, and what is left over at the end."""
    return list(torch.split(flat, max(flat.numel() // _LINE_NUMEL, 1) * _LINE_NUMEL))


def _lines_of_parameters(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The same of each parameter."""
    places = zip(bucket.offsets, bucket.parameters, strict=True)
    return [piece for offset, one in places for piece in _lines(flat[offset : offset + one.numel()])]


def _remember(flight: Flight, key: str, values: list[Any], divide: _Division) -> None:
    known = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if known is None:
        return
    anchor, flat = flight.state["anchor"], flight.state.get(key)
    if not all(value.shape == piece.shape for value, piece in zip(values, divide(anchor), strict=True)):
        flight.state[key] = known.clone()
        return
    if flat is None or flat.shape != anchor.shape:
        if len(values) == 1 and anchor.numel() == values[0].numel():
            flight.state[key] = values[0].detach().reshape(anchor.shape)
            return
        flat = flight.state[key] = torch.empty_like(anchor)
        if (padding := flight.bucket.padding()) is not None:
            flat[padding.to(flat.device)] = 0
    for piece in divide(flat):  # Each value is given back when it is copied: all of them are as large as the model.
        value = values.pop(0)
        if piece.data_ptr() != value.data_ptr():  # Most optimizers change it where it lies.
            piece.copy_(value)


@dataclass(frozen=True)
class EagerStep(Then):
    """The outer optimizer steps at once with this rank's part of the mean, and with those of the others a period later.

    Rank ``i`` of ``n`` steps its own anchor with ``D_i / n + (D' - D_i' / n)``, where ``D_i`` is its difference, and
    ``D_i'`` and ``D'`` are its own and the mean of the period before; the weights become the anchor. So ranks differ by
    what the others have learned in the last period, and no rank waits.

    Args:
        optimizer: optimizer of the anchor.

    Raises:
        ConfigurationError: no ``Difference(scope="local")``, or another lag than the period.

    Paper: Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", 2025.
    """

    optimizer: Outer

    def __post_init__(self) -> None:
        check_kind(Outer, "as Outer(torch.optim.SGD, lr=0.7)", optimizer=self.optimizer)

    def check(self, exchange: Exchange) -> None:
        """Refuse what has no anchor of its own on each rank, and a flight that does not end where the next starts."""
        if any(one.scope != "local" for one in check_has_anchor(exchange)):
            raise ConfigurationError(
                "ranks step anchors of their own",
                argument="what",
                expected='Difference(scope="local")',
                seen=exchange.what,
            )
        if exchange.how is not None and exchange.lag != exchange.when.steps:
            raise ConfigurationError(
                f"{self!r} ends one flight where the next one starts",
                argument="lag",
                expected=f"the period, which is {exchange.when.steps}",
                seen=exchange.lag,
            )

    def state(self) -> tuple[State, ...]:
        """What the optimizer remembers; and, between the end of a flight and the next start, what the others bring."""
        return State("outer", per="family"), State("others", per="family")

    @torch.no_grad()
    def start(self, flight: Flight) -> None:
        """Step with this rank's part, and with what the others have learned in the period before."""
        flight.keep()
        assert flight.sent is not None
        others = flight.state.pop(_OTHERS, None)
        if not torch.isfinite(flight.sent).all():
            go_back(flight, flight.state["anchor"])
            own = torch.zeros_like(flight.sent)
        else:
            own = flight.sent / (1.0 / flight.scale)
        with flight.memory.changing():
            self._step(flight, own if others is None else own.add_(others))
            flight.bucket.write_weights(flight.state["anchor"])

    @torch.no_grad()
    def fold(self, flight: Flight) -> None:
        """Keep what the others have learned for the start that follows; early, step with it alone."""
        assert flight.sent is not None
        # A tensor of its own: the next flight may have the memory of this one.
        others = flight.flat.clone() if flight.finite else torch.zeros_like(flight.flat)
        if torch.isfinite(flight.sent).all():  # Else nothing of it was taken in at the start.
            others.sub_(flight.sent, alpha=flight.scale)
        if not flight.early:
            flight.state[_OTHERS] = others
            return
        anchor = flight.state["anchor"]
        before = anchor.clone()
        with flight.memory.changing():
            self._step(flight, others)
            now = flight.weights(torch.empty_like(flight.flat))
            flight.bucket.write_weights(now.to(anchor).add_(anchor - before))

    def _step(self, flight: Flight, difference: torch.Tensor) -> None:
        _step(self.optimizer, flight, flight.state["anchor"], difference)


_OTHERS = "others.difference"
