"""The names under which topologies are known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from bagua.checks import check_kind
from bagua.errors import ConfigurationError
from bagua.topology.graphs import AlternatingRing, Complete, OnePeerExponential, Ring, ShiftOne, Torus
from bagua.topology.hosts import AlternatingExponentialRing, Hierarchical
from bagua.topology.topology import Topology

#: Prefix of names that stand for the hierarchical form of another topology.
HIERARCHICAL = "hierarchical_"

_TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    "alternating_exp_ring": AlternatingExponentialRing,
    "alternating_ring": AlternatingRing,
    "complete": Complete,
    "one_peer_exponential": OnePeerExponential,
    "ring": Ring,
    "shift_one": ShiftOne,
    "torus": Torus,
}
_ALIASES = {"all": "complete", "one_peer_exp": "one_peer_exponential"}


def register(name: str, topology: Callable[[], Topology] | Topology) -> None:
    """Make a topology known under a name, after a look at its first rounds on up to 8 ranks.

    Args:
        name: letters, digits and underscores; ``-`` counts as ``_``.
        topology: a subclass of ``Topology`` without arguments, or an instance.

    Raises:
        ConfigurationError: the name is taken, or a round is not doubly stochastic, or not
            symmetric although that is claimed.

    Example:
        >>> from bagua.topology import Round
        >>> class FirstTwo(Topology):
        ...     def _round(self, size, step, nodes):
        ...         return Round.matching(size, [(0, 1)] if size > 1 else [])
        >>> register("first_two", FirstTwo)
        >>> create("first_two").round(3, 1).edges
        (Edge(ranks=(0, 1), weight=0.5), Edge(ranks=(2,), weight=1.0))
    """
    key = _normal(name)
    factory = functools.partial(_itself, topology) if isinstance(topology, Topology) else topology
    if not key.isidentifier() or key.startswith(HIERARCHICAL) or key in _ALIASES:
        raise ConfigurationError(
            "this name cannot be used",
            argument="name",
            expected=f"letters, digits and underscores, not {HIERARCHICAL}... and none of {', '.join(_ALIASES)}",
            seen=repr(name),
        )
    if _TOPOLOGIES.get(key, factory) != factory:
        raise ConfigurationError(
            "another topology has this name", argument="name", expected="a new name", seen=repr(name)
        )
    one = factory()
    for size in range(1, 9):
        if _exists(one, size):
            one.check(size, rounds=4)
    _TOPOLOGIES[key] = factory


def _itself(topology: Topology) -> Topology:
    return topology


def _exists(topology: Topology, size: int) -> bool:
    """Whether there is a first round at all; a topology may refuse sizes."""
    try:
        topology.round(size, 1)
    except ConfigurationError as error:
        if error.argument == "size":
            return False
        raise
    return True


def create(name: str | Topology, argument: str = "topology") -> Topology:
    """The topology of a name.

    Args:
        name: a registered name, ``hierarchical_`` and a registered name, or a topology,
            which is returned.
        argument: name of the caller's argument, for the message.

    Raises:
        ConfigurationError: there is none of that name; the message names those that exist.

    Example:
        >>> create("one-peer-exp")
        OnePeerExponential()
        >>> create("hierarchical_ring")
        Hierarchical(between_hosts=Ring())
    """
    if isinstance(name, Topology):
        return name
    check_kind(str, "the name of a topology, or a Topology", **{argument: name})
    key = _normal(name)
    if key.startswith(HIERARCHICAL):
        return Hierarchical(create(key.removeprefix(HIERARCHICAL), argument))
    factory = _TOPOLOGIES.get(_ALIASES.get(key, key))
    if factory is None:
        raise ConfigurationError(
            "there is no topology of this name",
            argument=argument,
            expected=f"{' or '.join(available())}, or {HIERARCHICAL} and one of these",
            seen=repr(name),
            advice="bagua.topology.register(name, topology) adds your own.",
        )
    return factory()


def available() -> Iterator[str]:
    """Registered names, in alphabetical order."""
    return iter(sorted(_TOPOLOGIES))


def _normal(name: object) -> str:
    return str(name).strip().lower().replace("-", "_")
