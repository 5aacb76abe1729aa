"""How much each rank counts in a mean of what ranks have learned alone, while some of them have no data left."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.checks import check_whole


class SampleCount:
    """What a ``join`` block counts: how many samples each step of this rank trains on.

    Attributes:
        samples: samples of the next step.
    """

    def __init__(self) -> None:
        self.samples = 1

    def count(self, samples: int) -> None:
        """The steps that begin from now on train on so many samples each; without a call on one.

        Call it before the forward pass where batches have different sizes.

        Args:
            samples: samples of a step on this rank, at least one.

        Raises:
            ConfigurationError: it is no positive whole number.
        """
        check_whole(1, samples=samples)
        self.samples = samples


class SampleShares:
    """What ranks have trained on in the last steps of a ``join`` block; outside of one all count alike.

    Args:
        longest: longest period of an exchange, in steps: what lies further back is forgotten.
    """

    def __init__(self, longest: int = 1) -> None:
        self._longest = longest
        self._samples: dict[int, Sequence[int]] = {}
        self._before = 0

    def note(self, step: int, samples: Sequence[int]) -> None:
        """In ``step``, the ranks train on so many samples; 0 where there are none."""
        if not self._samples:
            self._before = max(samples)
        self._samples[step] = samples
        self._samples.pop(step - self._longest, None)

    def forget(self) -> None:
        """The block is over."""
        self._samples = {}

    def __bool__(self) -> bool:
        """Whether ranks may count differently."""
        return bool(self._samples)

    def contributions(self, steps: range, ranks: Sequence[int]) -> float:
        """How many contributions like that of ``ranks`` make one mean; ``inf`` if only others have trained.

        Args:
            steps: steps in which ranks have learned what they contribute. In those before the block all count alike.
            ranks: numbers in the group of those who contribute together.
        """
        found = self._of(steps)
        own = sum(samples[rank] for samples in found for rank in ranks)
        total = sum(map(sum, found))
        if not total:
            return self._size / len(ranks)
        return total / own if own else float("inf")

    def longest(self, steps: range, ranks: Sequence[int]) -> int:
        """The first one of ``ranks`` that had data in most of ``steps``: who has none left gets none again."""
        found = self._of(steps)
        return max(ranks, key=lambda rank: sum(samples[rank] > 0 for samples in found))

    def _of(self, steps: range) -> list[Sequence[int]]:
        return [self._samples.get(step, [self._before] * self._size) for step in steps]

    @property
    def _size(self) -> int:
        return len(next(iter(self._samples.values())))
