"""What was measured once, and does not depend on the network: a model's steps, and a machine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bagua.errors import ConfigurationError

__all__ = ["MachineFacts", "ModelFacts", "ParameterFacts"]


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: its dtype, as ``float32``.
        arrival_s: seconds from the beginning of a step until its gradient is there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    arrival_s: float


@dataclass(frozen=True)
class ModelFacts:
    """The steps of a model on one rank, without any communication.

    Attributes:
        parameters: parameters, in the order in which their gradients arrive.
        steps_s: seconds of each measured step.
        optimizer: name of the optimizer's class.
        copies: how many ranks computed on the machine while it was measured.

    Raises:
        ConfigurationError: no step, or no parameter.
    """

    parameters: tuple[ParameterFacts, ...]
    steps_s: tuple[float, ...]
    optimizer: str = "SGD"
    copies: int = 1

    def __post_init__(self) -> None:
        if not self.parameters or not self.steps_s:
            raise ConfigurationError(
                "nothing was measured",
                argument="steps_s" if self.parameters else "parameters",
                expected="a model that was trained for some steps",
                seen=f"{len(self.parameters)} parameters with gradients, {len(self.steps_s)} steps",
                advice="Train at least 5 steps of a model that was given to with_bagua.",
            )

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median."""
        return statistics.median(self.steps_s)

    @property
    def backward_ends_s(self) -> float:
        """Seconds from the beginning of a step until the last gradient is there."""
        return self.parameters[-1].arrival_s

    @property
    def ratios(self) -> tuple[float, ...]:
        """Measured steps as multiples of the median."""
        return tuple(step / self.step_s for step in self.steps_s)


@dataclass(frozen=True)
class MachineFacts:
    """What calls cost on a machine, whatever the network.

    Attributes:
        message_s: seconds of one message between two ranks on a network without delay.
        byte_s: seconds for which a rank's processor is busy with each byte that it sends while it receives one.
        local_message_s: seconds of one message between ranks that share memory.
        local_byte_s: seconds for each byte of it.
        cores: processor cores of a host.
    """

    message_s: float = 60e-6
    byte_s: float = 0.5e-9
    local_message_s: float = 20e-6
    local_byte_s: float = 0.3e-9
    cores: int = 1
