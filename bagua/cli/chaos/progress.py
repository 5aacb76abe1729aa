"""What is heard of members: that they end; and their progress, in lines of output and in files of metrics."""

from __future__ import annotations

import csv
import glob
import re
from dataclasses import dataclass
from pathlib import Path

#: How a line says how many steps are done, if the user names no other pattern: "step 12", "step=12", '"step": 12'.
STEP = r"\bstep[\"']?\s*[=:]?\s*(?P<step>\d+)"
_ALIVE = {"comm/alive": "alive", "comm/epoch_members": "in_epoch", "comm/contributed": "contributed"}


@dataclass(frozen=True)
class MemberProgress:
    """How far one member is.

    Attributes:
        member: number of the member.
        at_s: when it said so.
        step: steps that are done.
        digest: digest of the state that all members share after this step; empty if it says none.
        alive, in_epoch, contributed: members that it counts as such; None if it does not say.
    """

    member: int
    at_s: float
    step: int
    digest: str = ""
    alive: float | None = None
    in_epoch: float | None = None
    contributed: float | None = None


@dataclass(frozen=True)
class Ended:
    """A member ended.

    Attributes:
        member: number of the member.
        at_s: when.
        status: exit status; negative for a signal.
    """

    member: int
    at_s: float
    status: int


class ProgressReader:
    """Finds progress in lines.

    Args:
        pattern: regular expression with the group ``step``, or with a single group.

    Raises:
        ValueError: it is no such pattern.

    Example:
        >>> ProgressReader().read(2, 7.5, "step=40 loss=1.3 digest=ab12 alive=4")
        MemberProgress(member=2, at_s=7.5, step=40, digest='ab12', alive=4.0, in_epoch=None, contributed=None)
    """

    def __init__(self, pattern: str = STEP) -> None:
        try:
            self._step = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if "step" not in self._step.groupindex and self._step.groups != 1:
            raise ValueError(f"{pattern!r} has no group that finds the step; expected one, as in 'iteration (\\d+)'")
        self._group = "step" if "step" in self._step.groupindex else 1
        self._digest = re.compile(r"\bdigest[\"']?\s*[=:]\s*[\"']?(\w+)")
        self._counts = {name: re.compile(rf"\b{name}[\"']?\s*[=:]\s*(\d+)") for name in _ALIVE.values()}

    def read(self, member: int, at_s: float, line: str) -> MemberProgress | None:
        """Progress that ``line`` tells; None if it tells none."""
        found = self._step.search(line)
        if found is None or not found[self._group].isdecimal():
            return None
        digest = self._digest.search(line)
        counts = {name: pattern.search(line) for name, pattern in self._counts.items()}
        known = {name: float(count[1]) for name, count in counts.items() if count is not None}
        return MemberProgress(member, at_s, int(found[self._group]), "" if digest is None else digest[1], **known)


class MetricFiles:
    """Follows the files that ``bagua.observe.CsvWriter`` writes.

    Args:
        patterns: path of the files of each member, with ``*`` for what is not known.
    """

    def __init__(self, patterns: dict[int, str]) -> None:
        self._patterns = patterns
        self._read_bytes: dict[str, int] = {}

    def read(self, at_s: float) -> list[MemberProgress]:
        """Progress that was written since the last look."""
        found = []
        for member, pattern in self._patterns.items():
            rows = [row for path in sorted(glob.glob(pattern)) for row in self._new_rows(path)]
            by_step: dict[int, dict[str, float]] = {}
            for step, name, value in rows:
                by_step.setdefault(step, {})[name] = value
            for step, values in sorted(by_step.items()):
                known = {_ALIVE[name]: value for name, value in values.items() if name in _ALIVE}
                found.append(MemberProgress(member, at_s, step, "", **known))
        return found

    def _new_rows(self, path: str) -> list[tuple[int, str, float]]:
        begin = self._read_bytes.get(path, 0)
        try:
            with Path(path).open("rb") as file:
                file.seek(begin)
                data = file.read()
        except OSError:  # It is being replaced.
            return []
        whole = data[: data.rfind(b"\n") + 1]  # The rest is being written.
        self._read_bytes[path] = begin + len(whole)
        rows = []
        for row in csv.reader(whole.decode("utf-8", "replace").splitlines()):
            try:
                step, name, value = row
                rows.append((int(float(step)), name, float(value)))
            except ValueError:  # the heading, or a row of somebody else
                continue
        return rows
