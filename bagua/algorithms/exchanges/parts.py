"""How a model is cut into parts that are exchanged separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from bagua.checks import check_choice, check_kind, check_whole
from bagua.errors import ConfigurationError

By = Literal["arrival", "strided", "bytes"]


@dataclass(frozen=True)
class Parts:
    """Parts of a model, each of which starts so many steps after the one before that all take one period together.

    Part ``p`` of ``n`` is due ``(p + 1) * steps // n`` steps after a multiple of the period ``steps``.

    Args:
        n: number of parts. Buckets, by arrival, all start in the same step.
        by: ``arrival``: buckets, in the order in which gradients appear; they follow ``bucket_bytes`` and autotuning.
            ``strided``: part ``p`` has the layers ``p``, ``p + n``, ... ``bytes``: each has about as many bytes.
            Neither changes during training.
        same_order: gradients must appear in the same order on all ranks. Otherwise rank 0's order of buckets is
            everyone's, and a rank may be late for some.

    Raises:
        ConfigurationError: there is no such way, or values that contradict each other.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> Parts(2, "strided").cut(dict(model.named_parameters()))
        [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """

    n: int = 1
    by: By = "arrival"
    same_order: bool = False

    def __post_init__(self) -> None:
        check_whole(1, n=self.n)
        check_choice(get_args(By), by=self.by)
        check_kind(bool, "True or False", same_order=self.same_order)
        if self.by == "arrival" and self.n > 1:
            raise ConfigurationError(
                "buckets by arrival are cut by their size, and hold all parameters",
                argument="by",
                expected='"strided" or "bytes"',
                seen=repr(self.by),
            )

    def shift(self, part: int, steps: int) -> int:
        """How many steps after a multiple of the period ``part`` is due."""
        return (part + 1) * steps // self.n % steps

    def cut(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
        """Names of the parameters of each part; a part is empty where layers were frozen.

        Args:
            parameters: parameters of the model that are trained, by name, in its order.
        """
        return self._strided(parameters) if self.by == "strided" else self._balanced(parameters)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse parts that are empty from the beginning, unless all are: then the model is frozen.

        Args:
            parameters: as for ``cut``.

        Raises:
            ConfigurationError: there are fewer layers, or parameters, than parts.
        """
        if parameters and not all(self.cut(parameters)):
            raise ConfigurationError(
                f"this model has too few layers for {self.n} fragments: one would hold no parameter",
                argument="fragments",
                expected="at most as many as there are layers",
                seen=f"{self.n} for {len(parameters)} parameters",
                advice=f"In an exchange of your own they are parts={self!r}.",
            )

    def _strided(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
        layers: dict[str, list[str]] = {}
        for name in parameters:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        dealt = list(layers.values())
        return [[name for layer in dealt[part :: self.n] for name in layer] for part in range(self.n)]

    def _balanced(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
        """The largest first, each into the lightest part."""
        parts: list[list[str]] = [[] for _ in range(self.n)]
        loads = [0] * self.n
        order = {name: number for number, name in enumerate(parameters)}
        for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, order[name])):
            lightest = loads.index(min(loads))
            parts[lightest].append(name)
            loads[lightest] += parameters[name].nbytes
        return [sorted(part, key=order.__getitem__) for part in parts]


#: The buckets of the engine.
ALL_BY_ARRIVAL = Parts()
