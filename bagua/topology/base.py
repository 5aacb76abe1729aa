"""What a topology is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bagua.checks import check_flags, check_whole, wrong_type
from bagua.errors import ConfigurationError
from bagua.topology.rounds import Edge, Round, check_round

Nodes = Sequence[int]


class Topology(ABC):
    """Who mixes with whom in which round: a pure function of the number of ranks and the number of the round.

    Subclasses are frozen dataclasses: they print as their constructor call, and can be
    compared, hashed and pickled. No communication happens here, and no rank is special.
    """

    @property
    def symmetric(self) -> bool:
        """Whether any two ranks give each other the same weight, in each round."""
        return True

    @property
    def static(self) -> bool:
        """Whether all rounds are equal."""
        return False

    def round(self, size: int, step: int, nodes: Nodes | None = None) -> Round:
        """What happens in one round.

        Args:
            size: number of ranks.
            step: number of the round, counted from 1.
            nodes: index of the host of each rank, for topologies that look at hosts. None
                means that each rank has a host of its own.

        Raises:
            ConfigurationError: the topology does not exist for this size or these hosts.
        """
        check_whole(1, size=size, step=step)
        hosts = tuple(range(size)) if nodes is None else tuple(nodes)
        if len(hosts) != size:
            raise ConfigurationError(
                "each rank has a host", argument="nodes", expected=f"{size} host indices", seen=f"{len(hosts)}"
            )
        return self._round(size, step, hosts)

    @abstractmethod
    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        """What happens in round ``step``; arguments have been checked."""

    def matrix(self, size: int, step: int = 1, nodes: Nodes | None = None) -> torch.Tensor:
        """The mixing matrix of one round, shape (size, size), float64; arguments as for ``round``."""
        return self.round(size, step, nodes).matrix()

    def period(self, size: int, nodes: Nodes | None = None) -> int | None:
        """After how many rounds everything repeats; None if it never does."""
        return 1 if self.static else None

    def check(self, size: int, nodes: Nodes | None = None, *, rounds: int = 16) -> None:
        """Look at up to ``rounds`` rounds: is each doubly stochastic, and symmetric and static if that is claimed?

        Raises:
            ConfigurationError: one is not, or there is none for this size or these hosts.
        """
        first = self.round(size, 1, nodes)
        for step in range(1, min(rounds, self.period(size, nodes) or rounds) + 1):
            check_round(self.round(size, step, nodes), size=size, symmetric=self.symmetric, name=repr(self))
        if self.static and self.round(size, 2, nodes) != first:
            raise ConfigurationError(
                f"{self!r} claims to be static and changes",
                argument="topology",
                expected="equal rounds",
                seen="another round 2 than round 1",
            )


@dataclass(frozen=True)
class FunctionTopology(Topology):
    """A topology from a function of your own.

    Args:
        function: called with ``size, step, nodes``; returns a ``Round``, a list of ``Edge``
            that covers all ranks, or a mixing matrix.
        symmetric: claims that every matrix is symmetric.
        static: claims that the step does not matter.

    Example:
        >>> def neighbours_on_a_line(size, step, nodes):
        ...     return Round.matching(size, [(r, r + 1) for r in range((step + 1) % 2, size - 1, 2)])
        >>> FunctionTopology(neighbours_on_a_line).matrix(3, 2).tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]
    """

    function: Callable[[int, int, tuple[int, ...]], Round | Sequence[Edge] | torch.Tensor | Sequence[Sequence[float]]]
    symmetric: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise wrong_type("function", "a function of (size, step, nodes)", self.function)
        check_flags(symmetric=self.symmetric, static=self.static)

    def __repr__(self) -> str:
        # Ranks compare this; an address in memory would differ from process to process.
        named = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        name = f"{named.__module__}.{named.__qualname__}"
        return f"FunctionTopology({name}, symmetric={self.symmetric}, static={self.static})"

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        found = self.function(size, step, nodes)
        if isinstance(found, Round):
            return found
        if not isinstance(found, torch.Tensor):
            edges = [edge for edge in found if isinstance(edge, Edge)]
            if len(edges) == len(found):
                return Round.from_edges(size, edges)
        return Round.from_matrix(found)  # type: ignore[arg-type]
