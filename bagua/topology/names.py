"""The names under which topologies are known."""

from __future__ import annotations

from collections.abc import Iterator

from bagua.checks import check_kind
from bagua.errors import ConfigurationError
from bagua.topology.graphs import AlternatingRing, Complete, OnePeerExponential, Ring, ShiftOne, Torus
from bagua.topology.hosts import AlternatingExponentialRing, Hierarchical
from bagua.topology.topology import Topology

#: Prefix of names that stand for the hierarchical form of another topology.
HIERARCHICAL = "hierarchical_"

_TOPOLOGIES: dict[str, type[Topology]] = {
    "alternating_exp_ring": AlternatingExponentialRing,
    "alternating_ring": AlternatingRing,
    "complete": Complete,
    "one_peer_exponential": OnePeerExponential,
    "ring": Ring,
    "shift_one": ShiftOne,
    "torus": Torus,
}
_ALIASES = {"all": "complete", "one_peer_exp": "one_peer_exponential"}


def create(name: str | Topology, argument: str = "topology") -> Topology:
    """The topology of a name.

    Args:
        name: a name, ``hierarchical_`` and a name, or a topology, which is returned.
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
            advice="Pass a topology of your own in place of a name.",
        )
    return factory()


def available() -> Iterator[str]:
    """All names, in alphabetical order."""
    return iter(sorted(_TOPOLOGIES))


def _normal(name: object) -> str:
    return str(name).strip().lower().replace("-", "_")
