"""Forms of error feedback around a reducer, beside ``ErrorFeedback``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.checks import check_numbers, check_whole
from bagua.comm import Communicator
from bagua.compression import Codec, Metadata, MinMaxUInt8, check_codec
from bagua.primitives.reducers import FeedbackReducer, ReducerMemory, Remainder, State, summing_dtype


@dataclass(frozen=True)
class EF21(FeedbackReducer):
    """Everyone follows each rank's tensor by what ``reducer`` makes of its changes: EF21, and with momentum EF21-SGDM.

    ``v_i <- (1 - averaging) v_i + averaging g_i``; ``c_i = C(v_i - h_i)``; ``h_i <- h_i + c_i``; ``result = sum_i h_i``

    The estimate ``h`` and the sum of all estimates have the size of the tensor each, as has ``v`` if ``averaging`` is
    less than 1; in single precision for 16-bit dtypes, and in unscaled units.

    Args:
        reducer: any other reducer.
        averaging: weight of the new tensor, above 0 and at most 1.

    Raises:
        ConfigurationError: ``reducer`` is none, or has error feedback already; ``averaging`` is out of its range.

    Example:
        >>> from bagua.compression import TopK
        >>> from bagua.primitives import AllGatherReducer
        >>> EF21(AllGatherReducer(TopK(0.1)), averaging=0.1)
        EF21(reducer=AllGatherReducer(codec=TopK(ratio=0.1)), averaging=0.1)

    Papers: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback", NeurIPS 2021; Fatkhullin, Tyurin, Richtarik, "Momentum Provably Improves Error Feedback!", NeurIPS 2023.
    """

    averaging: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(lambda part: 0 < part <= 1, "a number above 0 and at most 1", averaging=self.averaging)

    def state(self) -> tuple[State, ...]:
        """This rank's estimate, the sum of all of them, and the average."""
        average = () if self.averaging == 1 else (State("average"),)
        return (State("estimate"), State("total", scope="shared", of_members=True), *average, *self.reducer.state())

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """Replace ``flat`` by the sum of all estimates; see ``SumReducer.reduce``. Nothing remains."""
        assert remainder is None, "what is lost is in the difference from the next estimate"
        scale = memory.loss_scale
        value = self._averaged(flat, memory)
        change = memory.buffer("change", flat.numel(), value.dtype)
        torch.sub(value, memory.state["estimate"], alpha=scale, out=change)
        estimate = memory.propose("estimate")
        self.reducer.reduce(change, communicator, memory, estimate)  # What is lost of the change, ...
        torch.sub(value, estimate, out=estimate).div_(scale)  # ... is what the estimate lacks.
        total = memory.propose("total").copy_(memory.state["total"]).add_(change, alpha=1 / scale)
        for one in (estimate, total):
            memory.clear_padding(one)
        torch.mul(total, scale, out=change)
        flat.copy_(change)

    def _averaged(self, flat: torch.Tensor, memory: ReducerMemory) -> torch.Tensor:
        """``flat``, or its running average, in at least single precision and in scaled units."""
        exact = summing_dtype(flat.dtype)
        value = memory.buffer("value", flat.numel(), exact).copy_(flat)
        if self.averaging == 1:
            return value
        average = memory.propose("average").copy_(memory.state["average"])
        average.lerp_(value.div_(memory.loss_scale), self.averaging)
        return torch.mul(average, memory.loss_scale, out=value)


_BYTES = MinMaxUInt8()


@dataclass(frozen=True)
class AveragedFeedback(FeedbackReducer):
    """What ``reducer`` loses on an average is added to each tensor; the average is remembered in one byte per element.

    ``h_i = g_i + D(e_i)``; ``result = reducer(h)``; ``e_i <- Q((1 - averaging) D(e_i) + averaging lost_i)``, where
    ``lost_i`` is what was lost of ``h_i``, and ``D`` and ``Q`` are those of ``codec``. With ``averaging=1`` this is
    ``ErrorFeedback`` that remembers less. For reducers that lose little, such as 4 bits.

    Args:
        reducer: any other reducer.
        averaging: weight of what was lost last, above 0 and at most 1.
        reset_every: steps of training after which the average begins at zero again.
        codec: codec that the average is remembered with.

    Raises:
        ConfigurationError: ``reducer`` is none, or has error feedback already; a number is out of its range.

    Example:
        >>> from bagua.compression import Int4
        >>> from bagua.primitives import ScatterGatherReducer
        >>> AveragedFeedback(ScatterGatherReducer(Int4()), reset_every=100).reset_every
        100

    Paper: Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", TPAMI 2025.
    """

    averaging: float = 0.5
    reset_every: int = 512
    codec: Codec = _BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(lambda part: 0 < part <= 1, "a number above 0 and at most 1", averaging=self.averaging)
        check_whole(1, reset_every=self.reset_every)
        check_codec(self.codec)

    def state(self) -> tuple[State, ...]:
        """The compressed average; that of zeros at first."""
        return (State("average_lost", self._nothing_lost, per="flat"), *self.reducer.state())

    def _nothing_lost(self, memory: ReducerMemory) -> torch.Tensor:
        return self.codec.compress(torch.zeros(memory.numel, dtype=summing_dtype(memory.dtype), device=memory.device))

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """Reduce ``flat`` plus the average; see ``SumReducer.reduce``. Nothing remains that is not fed back."""
        assert remainder is None, "what is lost stays here"
        exact, scale = summing_dtype(flat.dtype), memory.loss_scale
        value, average, lost = (memory.buffer(name, flat.numel(), exact) for name in ("value", "average", "lost"))
        if memory.step % self.reset_every:
            self.codec.decompress(memory.state["average_lost"], Metadata.of(average), out=average)
        else:
            average.zero_()
        torch.add(flat, average, alpha=scale, out=value)
        self.reducer.reduce(value, communicator, memory, lost)
        memory.clear_padding(lost.div_(scale))
        self.codec.compress(average.lerp_(lost, self.averaging), out=memory.propose("average_lost"))
        flat.copy_(value)


@dataclass(frozen=True)
class MomentumCorrection(FeedbackReducer):
    """Error feedback of momenta in place of gradients, with no momentum for what was just sent.

    ``u_i <- momentum u_i + g_i``; ``v_i <- v_i + u_i``; ``result = sum_i C(v_i)``; what is left of ``v_i`` stays, and
    ``u_i`` becomes zero where nothing is. The optimizer has no momentum of its own then.

    Args:
        reducer: any other reducer, as a rule ``AllGatherReducer(TopK(ratio))``.
        momentum: from 0 and less than 1.
        clip_norm: the largest norm of ``g_i`` over the flat tensor; longer ones are scaled down to it, before anything
            is added. None for any. Of the tensor as it is given: an algorithm that averages divides by the number of
            ranks first.

    Raises:
        ConfigurationError: ``reducer`` is none, or has error feedback already; a number is out of its range.

    Example:
        >>> from bagua.compression import TopK
        >>> from bagua.primitives import AllGatherReducer
        >>> MomentumCorrection(AllGatherReducer(TopK(0.001)), momentum=0.9)
        MomentumCorrection(reducer=AllGatherReducer(codec=TopK(ratio=0.001)), momentum=0.9, clip_norm=None)

    Paper: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
    2018.
    """

    momentum: float = 0.9
    clip_norm: float | None = None

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", momentum=self.momentum)
        if self.clip_norm is not None:
            check_numbers(lambda norm: norm > 0, "a number above 0, or None", clip_norm=self.clip_norm)

    def state(self) -> tuple[State, ...]:
        """The momentum, and what was not sent."""
        return (State("velocity"), State("residual"), *self.reducer.state())

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """Reduce what was accumulated; see ``SumReducer.reduce``. Nothing remains that is not fed back."""
        assert remainder is None, "what is lost stays here"
        scale = memory.loss_scale
        value = memory.buffer("value", flat.numel(), summing_dtype(flat.dtype)).copy_(flat).div_(scale)
        if self.clip_norm is not None:
            value.mul_((self.clip_norm / torch.linalg.vector_norm(value).clamp_(min=self.clip_norm)).to(value.dtype))
        velocity = torch.add(value, memory.state["velocity"], alpha=self.momentum, out=memory.propose("velocity"))
        value.copy_(memory.state["residual"]).add_(velocity).mul_(scale)
        residual = memory.propose("residual")
        self.reducer.reduce(value, communicator, memory, residual)
        velocity.masked_fill_(residual == 0, 0)
        memory.clear_padding(residual.div_(scale))
        flat.copy_(value)
