"""What predictions were made from, in a file: so that a better model can be held against what was measured before.

Steps, rehearsals and calls are measured once for each number of hosts, and calls once more on each link. None of it
depends on what is compared with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bagua.advise import CallFacts, MachineFacts, Message, ModelFacts, Moment, ParameterFacts, Rehearsal, Run
from bagua.link import LinkSettings
from benchmarks.lab_calls import probe_link

__all__ = ["Ground", "Grounds"]


@dataclass(frozen=True)
class Ground:
    """What was measured for one number of hosts.

    Args:
        facts: the model.
        rehearsals: rehearsals of all contenders.
        machine: what calls cost without a network.
        links: what calls took on links, by the link.
    """

    facts: ModelFacts
    rehearsals: tuple[Rehearsal, ...]
    machine: MachineFacts
    links: dict[str, tuple[CallFacts, ...]] = field(default_factory=dict)

    def at_pace(self, factor: float) -> Ground:
        """The same on a machine that takes ``factor`` times as long for what its processor does."""
        facts = replace(
            self.facts,
            parameters=tuple(replace(one, arrival_s=one.arrival_s * factor) for one in self.facts.parameters),
            steps_s=tuple(step * factor for step in self.facts.steps_s),
        )
        rehearsals = tuple(_at_pace(one, factor) for one in self.rehearsals)
        calls = tuple(
            replace(
                one,
                message_s=one.message_s * factor,
                points=tuple((sent, seconds * factor) for sent, seconds in one.points),
            )
            for one in self.machine.calls
        )
        seconds = ("message_s", "byte_s", "local_message_s", "local_byte_s")
        machine = replace(self.machine, calls=calls, **{name: getattr(self.machine, name) * factor for name in seconds})
        return Ground(facts, rehearsals, machine, self.links)


def _at_pace(rehearsal: Rehearsal, factor: float) -> Rehearsal:
    runs = (
        replace(run, items=tuple(item if isinstance(item, Message) else item * factor for item in run.items))
        for run in rehearsal.runs
    )
    return replace(rehearsal, runs=tuple(runs), extra_s=rehearsal.extra_s * factor)


class Grounds:
    """Grounds by the number of hosts.

    Args:
        path: file that keeps them; None for memory alone.
        measure: measures facts, rehearsals and calls among so many hosts.
        probe: measures calls among so many hosts, on a link.
    """

    def __init__(
        self,
        path: Path | None,
        measure: Callable[[int], Ground],
        probe: Callable[[int, LinkSettings], tuple[CallFacts, ...]] = probe_link,
    ) -> None:
        self._path, self._measure, self._probe = path, measure, probe
        self._known: dict[int, Ground] = {}
        if path is not None and path.exists():
            self._known = {int(hosts): _ground(one) for hosts, one in json.loads(path.read_text()).items()}

    def has(self, hosts: int, link: LinkSettings) -> bool:
        """Whether nothing is left to be measured."""
        return hosts in self._known and str(link) in self._known[hosts].links

    def of(self, hosts: int, link: LinkSettings) -> tuple[Ground, tuple[CallFacts, ...]]:
        """Those for ``hosts``, and what calls took on ``link``; measured if they are not known."""
        if hosts not in self._known:
            self._known[hosts] = self._measure(hosts)
            self._write()
        ground = self._known[hosts]
        if str(link) not in ground.links:
            ground.links[str(link)] = self._probe(hosts, link)
            self._write()
        return ground, ground.links[str(link)]

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({hosts: asdict(one) for hosts, one in self._known.items()}))


def _ground(saved: dict[str, Any]) -> Ground:
    facts, machine = saved["facts"], saved["machine"]
    parameters = tuple(ParameterFacts(**{**one, "shape": tuple(one["shape"])}) for one in facts["parameters"])
    facts.pop("copies", None)  # of files that are older
    return Ground(
        ModelFacts(**{**facts, "parameters": parameters, "steps_s": tuple(facts["steps_s"])}),
        tuple(map(_rehearsal, saved["rehearsals"])),
        MachineFacts(**{**machine, "calls": _calls(machine["calls"])}),
        {link: _calls(calls) for link, calls in saved["links"].items()},
    )


def _calls(saved: list[dict[str, Any]]) -> tuple[CallFacts, ...]:
    return tuple(CallFacts(**{**one, "points": tuple(map(tuple, one["points"]))}) for one in saved)


def _rehearsal(saved: dict[str, Any]) -> Rehearsal:
    steps = tuple(tuple(Moment(**one) for one in step) for step in saved["steps"])
    runs = tuple(
        Run(tuple(Message(**item) if isinstance(item, dict) else item for item in run["items"]), run["lane"])
        for run in saved["runs"]
    )
    return Rehearsal(**{**saved, "steps": steps, "runs": runs})
