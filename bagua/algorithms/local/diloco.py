"""Training alone, with an outer optimizer that steps all ranks every so often."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange, Parts
from bagua.algorithms.exchanges.outer import EagerStep, Outer, OuterStep
from bagua.algorithms.exchanges.values import Add, Blend, Difference, Replace
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.checks import check_choice, check_flags, check_kind, check_numbers, check_whole
from bagua.errors import ConfigurationError
from bagua.primitives import ErrorFeedback, SumReducer

if TYPE_CHECKING:
    from bagua.compression import Codec

FragmentOrder = Literal["strided", "bytes"]
Landing = Literal["blend", "add"]
_NAMES = ("nesterov", "sgd")
#: What a codec must keep at least of the square of any block, where nothing feeds back what it loses.
_LEAST_CONTRACTION = 0.05
#: Rate and momentum of the outer optimizer, by the least ``sync_every`` that they suit; see ``defaults_for``.
_DEFAULTS = ((500, (0.7, 0.9)), (32, (1.0, 0.6)), (0, (0.7, 0.6)))


def defaults_for(sync_every: int) -> tuple[float, float]:
    """The ``outer_lr`` and ``outer_momentum`` that suit a period, unless others are given.

    Below 500 steps those of ``benchmarks.outer_optimizer``: a momentum of 0.9 overshoots where successive differences
    have one direction. From 500 steps on those of the paper, which were not measured here.

    Args:
        sync_every: steps from one outer step to the next.

    Example:
        >>> defaults_for(20), defaults_for(100), defaults_for(500)
        ((0.7, 0.6), (1.0, 0.6), (0.7, 0.9))
    """
    return next(found for least, found in _DEFAULTS if sync_every >= least)


@dataclass(frozen=True)
class DiLoCoAlgorithm(LocalUpdates):
    """Step an anchor, equal on all ranks, with the mean of what they learned: ``Theta <- Outer(Theta, D)``.

    ``D`` is the mean over all ranks of the anchor minus the weights, after every ``sync_every``-th step; the weights
    then become the anchor. Between these steps nothing is sent. What optimizers remember stays on its rank.

    With ``fragments`` (streaming) the model is cut in ``P`` parts, and part ``p``, from 0, is applied after each step
    ``t``, from 1, with ``t mod H = (p + 1) H // P mod H``. With ``overlap`` its exchange starts so many steps before,
    and training goes on meanwhile. Applied means: the weights have changed when ``optimizer.step()`` of that step
    returns.
    On one rank, without momentum, it is Lookahead.

    Args:
        sync_every: ``H``, steps from one outer step of a part to the next.
        outer: ``nesterov`` or ``sgd``, or an optimizer as a value: ``Outer(torch.optim.Adam, lr=0.1)``.
        outer_lr: its learning rate, above 0; None for 1.0, below 32 steps and from 500 steps on for 0.7.
        outer_momentum: its momentum, from 0 and less than 1; None for 0.6, from 500 steps on for 0.9.
        fragments: parts of the model that are exchanged one after the other.
        fragment_order: ``strided``: layers are dealt out; ``bytes``: parts of equal size.
        overlap: steps from the start of an exchange to its end; less than ``sync_every``, and between islands less than
            ``sync_every / fragments``, because newcomers come in when nothing is under way.
        blend: the share of what a rank has learned meanwhile that it keeps, from 0 to 1.
        mix: ``blend``, or ``add``: what was learned meanwhile is added to the anchor, so that nothing of it is lost.
        eager: each rank steps with its own part of ``D`` at once, and with those of the others ``sync_every`` steps
            later, so that an exchange has a whole period of time; see ``EagerStep``. Ranks differ until
            ``bagua_finish()``.
        codec: codec that differences are sent in, as ``Float16()``, or its name, as ``"int4"``; None for all bits.
        error_feedback: True adds what the codec loses to the next difference; a number adds that part of it, as 0.9.
        anchor_dtype: ``float32``, or ``weights`` for the dtype of the weights: half the memory where that is bfloat16.
        anchor_device: ``cpu`` for an anchor, and an outer optimizer, in the memory of the host; None for where the
            weights are.
        start_after: so many steps at the beginning exchange gradients instead.
        start_with: an algorithm that sums gradients in each of these steps, as ``power_sgd`` on slow links.
        average_buffers: take the mean of floating-point buffers, too, after each ``sync_every``-th step.
        hierarchical: sum inside each host first, with all bits.
        inner: exchange of the ranks of one host in each step, as ``gradient_allreduce``; see ``LocalUpdates``.
        pace: ``equal``, or between islands ``own``: each makes the steps that it can; see ``LocalUpdates``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range, or options that contradict each other.

    Example:
        >>> DiLoCoAlgorithm(100, fragments=4, overlap=5, blend=0.5).exchanges()[0].lag
        5

    Papers: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; "Streaming
    DiLoCo with overlapping communication", 2025. Kale et al., "Eager Updates For Overlapped Communication and
    Computation in DiLoCo", 2025.
    """

    sync_every: int = 100
    _: KW_ONLY
    outer: str | Outer = "nesterov"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    fragments: int = 1
    fragment_order: FragmentOrder = "strided"
    overlap: int = 0
    blend: float = 0.0
    mix: Landing = "blend"
    eager: bool = False
    codec: Codec | str | None = None
    error_feedback: bool | float = False
    anchor_dtype: Literal["float32", "weights"] = "float32"
    anchor_device: Literal["cpu"] | None = None

    def __post_init__(self) -> None:
        check_whole(1, sync_every=self.sync_every)
        if not isinstance(self.outer, Outer):
            check_choice(_NAMES, outer=self.outer)
        if self.outer_lr is not None:
            check_numbers(lambda rate: rate > 0, "a number above 0, or None", outer_lr=self.outer_lr)
        if self.outer_momentum is not None:
            expected = "a number from 0 and less than 1, or None"
            check_numbers(lambda part: 0 <= part < 1, expected, outer_momentum=self.outer_momentum)
        check_whole(1, fragments=self.fragments)
        check_choice(get_args(FragmentOrder), fragment_order=self.fragment_order)
        check_whole(0, overlap=self.overlap)
        check_numbers(lambda part: 0 <= part <= 1, "a number from 0 to 1", blend=self.blend)
        check_choice(get_args(Landing), mix=self.mix)
        check_choice(("float32", "weights"), anchor_dtype=self.anchor_dtype)
        check_choice(("cpu", None), anchor_device=self.anchor_device)
        check_flags(eager=self.eager)
        if self.codec is not None:
            from bagua.compression import as_codec  # noqa: PLC0415 - most runs send all bits

            object.__setattr__(self, "codec", as_codec(self.codec))
        expected = "True, False, or a number above 0 and at most 1"
        check_kind((bool, float), expected, error_feedback=self.error_feedback)
        if not isinstance(self.error_feedback, bool):
            check_numbers(lambda part: 0 < part <= 1, expected, error_feedback=self.error_feedback)
        self._check_together()
        super().__post_init__()

    def _check_together(self) -> None:
        given = {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        for name, value in given.items() if isinstance(self.outer, Outer) else ():
            if value is not None:
                raise _refused(name, "an option of the Outer that is given", value)
        if self.overlap >= self.sync_every:
            raise _refused("overlap", f"less than sync_every, which is {self.sync_every}", self.overlap)
        if self.eager and (self.overlap or self.mix != "blend"):
            name = "overlap" if self.overlap else "mix"
            raise _refused(name, "not given: with eager, exchanges take a period", getattr(self, name))
        if self.eager and self.pace == "own":
            raise _refused("eager", "False with pace='own': its exchanges take a period, which differs", self.eager)
        if self.fragments > self.sync_every:
            raise _refused("fragments", f"at most sync_every, which is {self.sync_every}", self.fragments)
        if self.blend and (self.mix == "add" or not self.overlap):
            raise _refused("blend", "0 without overlap, and with mix='add'", self.blend)
        if self.error_feedback and self.codec is None:
            raise _refused("error_feedback", "False without a codec, which loses nothing", self.error_feedback)
        if not self.error_feedback:
            _check_keeps_enough(self.codec)

    @property
    def outer_exchange(self) -> Exchange:
        """Differences, each part by itself, and a step of the anchor."""
        how = self.mean(self._reducer)
        parts = Parts(self.fragments, self.fragment_order)
        scope: Literal["local", "shared"] = "local" if self.eager else "shared"
        what = Difference(scope=scope, dtype=self.anchor_dtype, device=self.anchor_device)
        if self.eager:
            step = EagerStep(self._optimizer)
            return Exchange(what, Every(self.sync_every), how, step, lag=self.sync_every, parts=parts)
        when = Every(self.sync_every, offset=-self.overlap)
        then = OuterStep(self._optimizer, self._land)
        return Exchange(what, when, how, then, lag=self.overlap, parts=parts)

    @property
    def _optimizer(self) -> Outer:
        if isinstance(self.outer, Outer):
            return self.outer
        rate, momentum = defaults_for(self.sync_every)
        rate = rate if self.outer_lr is None else self.outer_lr
        momentum = momentum if self.outer_momentum is None else self.outer_momentum
        return Outer(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=self.outer == "nesterov" and momentum > 0)

    @property
    def _land(self) -> Replace | Blend | Add:
        if self.mix == "add":
            return Add()
        return Blend(self.blend) if self.blend else Replace()

    @property
    def _reducer(self) -> SumReducer | None:
        if self.codec is None:
            return None
        from bagua.primitives import ScatterGatherReducer  # noqa: PLC0415 - it needs codecs

        assert not isinstance(self.codec, str)
        reducer = ScatterGatherReducer(self.codec)
        return ErrorFeedback(reducer, float(self.error_feedback)) if self.error_feedback else reducer


def _check_keeps_enough(codec: Codec | str | None) -> None:
    """Refuse a codec that loses nearly all of some differences where nothing feeds it back."""
    if codec is None or isinstance(codec, str) or codec.unbiased:
        return
    if codec.contraction is not None and codec.contraction < _LEAST_CONTRACTION:
        raise ConfigurationError(
            "this codec loses nearly all of some blocks, and nothing feeds that back",
            argument="codec",
            expected=f"error_feedback=0.9, or a codec that keeps {_LEAST_CONTRACTION:.0%} of the square of any block",
            seen=f"{codec!r}, which may keep {codec.contraction:.2%}",
        )


def _refused(argument: str, expected: str, seen: object) -> ConfigurationError:
    return ConfigurationError("options contradict each other", argument=argument, expected=expected, seen=seen)


DiLoCoAlgorithmImpl = bound_form(DiLoCoAlgorithm)
