"""The channels that a member keeps open, and what is agreed about them."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.averaging.link import Channel, Courier

__all__ = ["Channels"]

#: Each costs a few threads and sockets.
MOST_OPEN = 8

Members = tuple[int, ...]


class Channels:
    """At most one channel for each set of ranks that meet; the least used ones are closed.

    Args:
        courier: opens and closes them.
    """

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._held: dict[Members, Channel] = {}

    def name(self, meeting: Members) -> str:
        """The channel that is open here for those who meet; empty for none."""
        held = self._held.get(meeting)
        return "" if held is None else held.name

    def common(self, meeting: Members, present: Members, names: Sequence[str], fresh: str) -> str:
        """The channel that all those present can use: the one that each holds, else a new one.

        Args:
            meeting: all who would meet.
            present: those who do.
            names: what each of them holds.
            fresh: a name that was never used.
        """
        held = self._held.get(meeting)
        usable = held is not None and held.members == present and set(names) == {held.name}
        return held.name if held is not None and usable else fresh

    def require(self, meeting: Members, present: Members, name: str) -> Channel:
        """The channel of that name, opened if it is new.

        Raises:
            CommunicationError: it cannot be opened.
        """
        held = self._held.pop(meeting, None)
        if held is not None and held.name != name:
            self._courier.close(held)
            held = None
        if held is None:
            held = Channel(name, present)
            self._courier.open(held)
        self._held[meeting] = held  # At the end: the order is that of use.
        while len(self._held) > MOST_OPEN:
            self.drop(next(iter(self._held)))
        return held

    def drop(self, meeting: Members) -> None:
        """Close the channel of those who meet, if there is one."""
        held = self._held.pop(meeting, None)
        if held is not None:
            self._courier.close(held)

    def close(self) -> None:
        """Close all channels."""
        for meeting in list(self._held):
            self.drop(meeting)
