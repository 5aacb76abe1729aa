"""What exchanges remember: out for a checkpoint, back into buckets of any layout, and what all ranks have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import torch

from bagua.algorithms import Algorithm
from bagua.comm import as_bytes
from bagua.errors import CommunicatorClosedError, ConfigurationError
from bagua.primitives import ReducerMemory

Tensors = dict[str, torch.Tensor]


class Holder(Protocol):
    """Holds what is remembered of some parameters that lie one after the other in flat memory.

    Attributes:
        label: label of the exchange; nothing else remembers things under it.
        names: names of the parameters.
        memory: memory of what is remembered.
    """

    label: str
    names: Sequence[str]
    memory: ReducerMemory

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""


class Remembered(TypedDict):
    """What is remembered, free of any flat memory. Under each name comes the label of the exchange, if it has one.

    Attributes:
        parameters: state that has an element for each element of a parameter, by the parameter's name.
        others: for each flat tensor the names of its parameters, and its state as a whole.
    """

    parameters: dict[str, Tensors]
    others: list[dict[str, Any]]


def key_of(place: Holder, name: str) -> str:
    """Under which name the state ``name`` of ``place`` is saved."""
    return f"{place.label}.{name}" if place.label else name


def collect(places: Iterable[Holder], *, copy: bool = True) -> Remembered:
    """Everything that is remembered in ``places``; copies, if ``copy`` is True.

    Raises:
        CommunicatorClosedError: the state is neither that before an exchange nor that after it.
    """
    taken: Callable[[torch.Tensor], torch.Tensor] = torch.clone if copy else lambda value: value
    remembered = Remembered(parameters={}, others=[])
    for place in places:
        memory = place.memory
        if memory.torn:
            raise CommunicatorClosedError(
                f"an exchange of this model has ended half-way, so its state cannot be saved: {memory.torn}",
                advice="Go on from an earlier checkpoint.",
            )
        elementwise = {name: value for name, value in memory.state.items() if memory.is_elementwise(name)}
        for name, parts in cut(place, elementwise, taken).items():
            remembered["parameters"].setdefault(name, {}).update(parts)
        whole = {key_of(place, name): taken(value) for name, value in memory.state.items() if name not in elementwise}
        if whole:
            remembered["others"].append({"label": place.label, "names": list(place.names), "state": whole})
    return remembered


def cut(
    place: Holder, flats: Mapping[str, torch.Tensor], taken: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> dict[str, Tensors]:
    """Each parameter's part of each flat tensor, by name of the parameter, as ``taken`` returns it."""
    parts = {key_of(place, name): place.views(flat) for name, flat in flats.items()}
    return {
        name: {key: taken(views[position]) for key, views in parts.items()}
        for position, name in enumerate(place.names)
        if parts
    }


def merged(earlier: Remembered, later: Remembered) -> Remembered:
    """Both; what is in both, from the later one."""
    parameters = {**earlier["parameters"], **later["parameters"]}
    known = {name for other in later["others"] for name in other["names"]}
    kept = [other for other in earlier["others"] if known.isdisjoint(other["names"])]
    return Remembered(parameters=parameters, others=[*kept, *later["others"]])


def renamed(remembered: Remembered, names: Mapping[str, str]) -> Remembered:
    """The same of parameters with other names.

    Raises:
        ConfigurationError: a parameter has none.
    """
    found = {*remembered["parameters"], *(name for other in remembered["others"] for name in other["names"])}
    unknown = sorted(found - names.keys())
    if unknown:
        raise ConfigurationError(
            "this state belongs to another model",
            argument="state_dict",
            expected="the model whose gradients were exchanged",
            seen=f"no parameters {', '.join(unknown)}",
        )
    return followed(remembered, names)


def followed(remembered: Remembered, names: Mapping[str, str]) -> Remembered:
    """What is remembered of the parameters in ``names``, under the names that these have now.

    What belongs to a flat tensor as a whole belongs to all of its parameters.
    """
    return Remembered(
        parameters={names[name]: state for name, state in remembered["parameters"].items() if name in names},
        others=[
            {**other, "names": [names[name] for name in other["names"]]}
            for other in remembered["others"]
            if names.keys() >= set(other["names"])
        ],
    )


def restore(places: Iterable[Holder], remembered: Remembered) -> None:
    """Put what was remembered back into places that hold initial values.

    Args:
        places: places with the same layout or another one. Then, what belonged to a flat tensor as a whole goes to
            where its first parameter is now, if it fits; that of a family to wherever one of its parameters is.
        remembered: from ``collect``.

    Raises:
        ConfigurationError: the state has other shapes than here.
    """
    for place in places:
        _restore_families(place, remembered)
        memory = place.memory
        for name, flat in memory.state.items():
            if memory.is_elementwise(name):
                paste(place, name, flat, remembered["parameters"])
            else:
                found = _whole_of(place, name, remembered["others"])
                if found is not None and found.shape == flat.shape:
                    flat.copy_(found)


def _whole_of(place: Holder, name: str, others: Iterable[Mapping[str, Any]]) -> torch.Tensor | None:
    key, of_family = key_of(place, name), name not in place.memory.declared
    for other in others:
        owners = other["names"] if of_family else other["names"][:1]
        if other["label"] == place.label and key in other["state"] and not set(owners).isdisjoint(place.names):
            found: torch.Tensor = other["state"][key]
            return found
    return None


def _restore_families(place: Holder, remembered: Remembered) -> None:
    """Make what was made while training."""
    memory = place.memory
    families = [one.name for one in memory.declared.values() if one.per == "family"]
    for family in families:
        prefix = key_of(place, f"{family}.")
        skipped = len(prefix) - len(family) - 1
        of_each = {key: value for name in place.names for key, value in remembered["parameters"].get(name, {}).items()}
        for key, value in of_each.items():
            if key.startswith(prefix):
                memory.state[key[skipped:]] = torch.zeros(memory.numel, dtype=value.dtype, device=memory.device)
        for other in remembered["others"]:
            here = other["label"] == place.label and not set(other["names"]).isdisjoint(place.names)
            for key, value in other["state"].items() if here else ():
                if key.startswith(prefix):
                    memory.state[key[skipped:]] = torch.zeros_like(value)


def paste(place: Holder, name: str, flat: torch.Tensor, source: Mapping[str, Tensors]) -> None:
    """Put each parameter's part into ``flat``, where there is one.

    Raises:
        ConfigurationError: it has another shape.
    """
    key = key_of(place, name)
    for parameter, view in zip(place.names, place.views(flat), strict=True):
        part = source.get(parameter, {}).get(key)
        if part is None:
            continue
        if part.shape != view.shape:
            raise other_shape(key, parameter, expected=view, seen=part)
        view.copy_(part)


def other_shape(key: str, parameter: str, *, expected: torch.Tensor, seen: torch.Tensor) -> ConfigurationError:
    """The error if what was saved under ``key`` for ``parameter`` has another shape than here."""
    return ConfigurationError(
        f"the saved state {key} of {parameter} has another shape",
        argument="state_dict",
        expected=list(expected.shape),
        seen=list(seen.shape),
    )


def propose_again(place: Holder, saved: Mapping[str, Any]) -> None:
    """Have ``place`` remember what a saved flight proposed, once the flight is folded.

    Args:
        place: with the parameters of the flight.
        saved: under ``parameters`` each parameter's part of ``next.`` and the name of a state; under ``proposed``, by
            name, what belongs to the flat tensor as a whole.
    """
    memory = place.memory
    for name, state in list(memory.state.items()):
        whole = saved["proposed"].get(name)
        if any(key_of(place, f"next.{name}") in parts for parts in saved["parameters"].values()):
            paste(place, f"next.{name}", memory.propose(name).zero_(), saved["parameters"])
        elif whole is not None and whole.shape == state.shape:
            memory.propose(name).copy_(whole)


def shared_tensors(places: Iterable[Holder]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is remembered alike on all ranks, by what it is and its first parameter."""
    for place in places:
        for name, value in place.memory.shared():
            yield f"{key_of(place, name)} of {place.names[0]}", value


def digest_of(tensor: torch.Tensor) -> str:
    """A digest of the bytes of ``tensor``."""
    contents = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(as_bytes(contents)).hexdigest()[:16]


def scopes_of(algorithm: Algorithm) -> dict[str, str]:
    """Whether all that an algorithm remembers is ``shared`` or ``local``, by the key under which it is saved."""
    return {
        (f"{one.label}.{state.name}" if one.label else state.name): state.scope
        for one in algorithm.every_exchange()
        for state in one.states()
    }


def divided(remembered: Remembered, scopes: Mapping[str, str]) -> tuple[Remembered, Remembered]:
    """What is equal on all ranks, and what is one rank's own.

    Args:
        remembered: all of it.
        scopes: from ``scopes_of``.
    """
    shared = {key for key, scope in scopes.items() if scope == "shared"}

    def is_shared(key: str) -> bool:
        # A family of states has keys that begin with its own and a dot.
        return key in shared or (key not in scopes and key.rpartition(".")[0] in shared)

    def chosen(wanted: bool) -> Remembered:
        parameters = {
            name: {key: value for key, value in state.items() if is_shared(key) == wanted}
            for name, state in remembered["parameters"].items()
        }
        others = [
            {**other, "state": {key: value for key, value in other["state"].items() if is_shared(key) == wanted}}
            for other in remembered["others"]
        ]
        return Remembered(
            parameters={name: state for name, state in parameters.items() if state},
            others=[other for other in others if other["state"]],
        )

    return chosen(True), chosen(False)


def united(one: Remembered, other: Remembered) -> Remembered:
    """Both parts that ``divided`` returned, or those of one rank."""
    names = [*one["parameters"], *(name for name in other["parameters"] if name not in one["parameters"])]
    return Remembered(
        parameters={name: {**one["parameters"].get(name, {}), **other["parameters"].get(name, {})} for name in names},
        others=[*one["others"], *other["others"]],
    )
