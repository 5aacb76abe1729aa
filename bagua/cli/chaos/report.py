"""The figures of a run, in words."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.cli.chaos.schedule import FaultSchedule


def verdict(found: Mapping[str, Any]) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    wrong = [f"hang: {one}" for one in found["hangs"]]
    wrong += [f"different digests after step {step}: {who}" for step, who in found["different_digests"].items()]
    return [*wrong, *found["problems"]]


def plan(schedule: FaultSchedule) -> str:
    """What will happen, one line for each fault."""
    lines = [f"seed {schedule.seed}: {_count(schedule)} on {schedule.members} members in {schedule.duration_s:g} s"]
    for fault in schedule.faults:
        lasting = f" for {fault.lasting_s:.1f} s" if fault.lasting_s else ""
        lines.append(f"{fault.at_s:8.1f} s  {fault.kind}{lasting}, the first that is well of {list(fault.members)}")
    return "\n".join(lines)


def _count(schedule: FaultSchedule) -> str:
    counts = Counter(fault.kind for fault in schedule.faults)
    return f"{len(schedule.faults)} faults ({', '.join(f'{kind} {counts[kind]}' for kind in schedule.kinds)})"


def describe(schedule: FaultSchedule, found: Mapping[str, Any]) -> str:
    """The figures, with what is wrong at the end."""
    struck = found["faults"]
    lines = [
        f"seed {schedule.seed}: {_count(schedule)} on {schedule.members} members in {schedule.duration_s:g} s",
        f"faults: {len(struck)} happened, {len(found['skipped'])} did not, {found['restarts']} restarts",
        f"committed: {found['committed_steps']} steps, {found['commits']} of them reported",
    ]
    if found["goodput"] is not None:
        lines.append(
            f"goodput: {found['goodput']:.3f} of {schedule.members} undisturbed members, "
            f"{_figure(found['goodput_while_well'], 3)} while they were well"
        )
        lines.append(f"pace of one member: {found['pace_steps_per_s']:.2f} steps/s")
    if found["alive"] is not None:
        lines.append(
            ", ".join(
                f"{name} {_figure(found[key])}"
                for name, key in (("alive", "alive"), ("in epoch", "in_epoch"), ("contributed", "contributed"))
            )
            + (f" ({found['contributed_of_alive']:.3f} of alive)" if found["contributed_of_alive"] is not None else "")
        )
    lines += _recoveries(struck)
    if found["digests"]:
        same = "all equal" if not found["different_digests"] else f"{len(found['different_digests'])} different"
        lines.append(f"digests: after {found['digests']} steps, {same}")
    lines.append(f"hangs: {len(found['hangs'])}")
    if not found["commits"]:
        lines.append("no member said that it made a step, so there are no figures of steps; see --progress")
    return "\n".join([*lines, *(f"WRONG: {one}" for one in verdict(found))])


def _recoveries(struck: Sequence[Mapping[str, Any]]) -> list[str]:
    if not struck:
        return []
    lines = ["recovery in seconds   others late: median  worst   itself back: median  worst"]
    for kind in dict.fromkeys(one["kind"] for one in struck):
        of_kind = [one for one in struck if one["kind"] == kind]
        late = [one["late_s"] for one in of_kind if one["late_s"] is not None]
        back = [one["back_s"] for one in of_kind if one["back_s"] is not None]
        lines.append(f"  {kind:10} {len(of_kind):4} {_spread(late):>31} {_spread(back):>28}")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} {max(values):6.2f}" if values else "-"


def _figure(value: float | None, digits: int = 2) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
