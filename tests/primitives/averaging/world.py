"""A session of averaging in which the test decides who does what next, and what time it is.

Members, boards and desks are the real ones; the store is in this process, the clock is a number, and
transfers are looked at from both ends. Nothing here uses a thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.averaging import Schedule, topology_of
from bagua.averaging.handoff import Contribution, HandoffBuffer, Stage
from bagua.averaging.link import Connection, IsComplete
from bagua.averaging.membership import Departures, Patience
from bagua.averaging.round_protocol import Member
from bagua.comm.store.board import Board
from bagua.comm.store.serving import thread_store
from bagua.errors import CommunicationError, CommunicatorClosedError, PeerLostError

PATIENCE = Patience(beat_s=1.0, silence_s=15.0, suspect_s=3.0, join_s=30.0)


class Wire:
    """What goes over one connection: for each exchange the snapshots of those who have come."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.exchanges: list[dict[int, torch.Tensor]] = []
        self.broken = ""
        self.cut = False


class Wires:
    """The data link of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.turns: dict[str, int] = {}

    def open(self, connection: Connection) -> None:
        self.world.while_opening.pop(self.rank, lambda: None)()
        if self.world.refuse_to_open > 0:
            self.world.refuse_to_open -= 1
            raise CommunicatorClosedError("it cannot be opened")
        wire = self.world.wires.setdefault(connection.name, Wire(connection.members))
        assert wire.members == connection.members, "two ranks mean different members by one connection"
        assert self.rank in connection.members

    def start(self, connection, contributions) -> IsComplete:
        wire = self.world.wires[connection.name]
        turn = self.turns.get(connection.name, 0)
        self.turns[connection.name] = turn + 1
        if turn == len(wire.exchanges):
            wire.exchanges.append({})
        exchange = wire.exchanges[turn]
        assert self.rank not in exchange
        exchange[self.rank] = contributions[0].snapshot.clone()
        return UnderWay(self.world, wire, exchange, contributions[0]).is_complete

    def close(self, connection: Connection) -> None:
        self.interrupt("closed", connection.name)

    def interrupt(self, reason: str, name: str | None = None) -> None:
        for wire_name in [name] if name else list(self.turns):
            if wire_name in self.world.wires:
                self.world.wires[wire_name].broken = self.world.wires[wire_name].broken or reason


class UnderWay:
    def __init__(self, world, wire, exchange, contribution) -> None:
        self.world, self.wire, self.exchange, self.contribution = world, wire, exchange, contribution

    def is_complete(self) -> bool:
        if self.wire.cut:  # Whoever has not looked yet gets nothing.
            raise PeerLostError("the connection was cut")
        if len(self.exchange) == len(self.wire.members):  # Who had come has come, even if it is gone by now.
            torch.mean(
                torch.stack([self.exchange[rank] for rank in sorted(self.exchange)]), 0, out=self.contribution.average
            )
            return True
        dead = [p for p, rank in enumerate(self.wire.members) if rank in self.world.dead and rank not in self.exchange]
        if self.wire.broken or dead:
            raise PeerLostError(self.wire.broken or "the connection was closed", peers=dead)
        return False


class Rank:
    """A training thread, a member, and what is between them."""

    def __init__(self, world: World, rank: int, mode: str, *, continue_alone: bool, warming: bool) -> None:
        self.rank = rank
        self.weights = torch.full((4,), float(rank + 1), dtype=torch.float64)
        self.added = 0.0
        self.handoff = HandoffBuffer([Contribution(torch.zeros_like(self.weights), torch.zeros_like(self.weights))])
        self.link = Wires(world, rank)
        self.stranded = ""
        self.member = Member(
            Board(world.store, rank, range(world.size), world.session),
            Departures(Board(world.departures_store, rank, range(world.size))),
            Schedule(topology_of(mode), rank, [0] * world.size),
            self.handoff,
            self.link,
            PATIENCE,
            lambda: world.now,
            continue_alone=continue_alone,
            hosts_store=rank == 0,
            strand=self._strand,
        )
        self.member.warming = warming
        self.member.fresh = False

    def _strand(self, reason: str) -> None:
        self.stranded = reason

    @property
    def transfer(self):
        return self.member._transfer

    def at_safe_point(self, *, at_rest: bool = False) -> None:
        """What the training thread does at its safe point, or in ``abort``."""
        contribution = self.handoff.contributions[0]
        if self.handoff.stage is Stage.AVERAGE:
            if self.handoff.replace:
                self.weights.copy_(contribution.average)
            else:
                self.weights += contribution.average
            self.handoff.clear()
        if self.handoff.stage is Stage.EMPTY and not self.member.warming and not self.member.over:
            contribution.snapshot.copy_(self.weights)
            self.handoff.hand_in(at_rest=at_rest)

    def train(self, step: float) -> None:
        self.at_safe_point()
        self.weights += step


class World:
    """All ranks of a session, which may come after another one."""

    def __init__(
        self,
        size: int,
        mode: str = "all",
        *,
        continue_alone: bool = False,
        warming: bool = False,
        after: World | None = None,
    ) -> None:
        self.size = size
        self.now = 0.0
        self.store = thread_store()
        self.departures_store = thread_store() if after is None else after.departures_store
        self.wires: dict[str, Wire] = {}
        self.session = "first" if after is None else f"after {after.session}"
        self.dead: set[int] = set() if after is None else after.dead
        self.refuse_to_open = 0
        self.while_opening: dict[int, Callable[[], None]] = {}
        self.ranks = [Rank(self, r, mode, continue_alone=continue_alone, warming=warming) for r in range(size)]

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.rank not in self.dead]

    def poll(self, number: int) -> None:
        rank = self.ranks[number]
        if number in self.dead or rank.member.over:
            return
        try:
            rank.member.poll()
        except CommunicationError as error:
            rank.member.abandon(error)

    def abort(self, *numbers: int) -> None:
        for number in numbers:
            self.ranks[number].member.pausing = True

    def kill(self, number: int) -> None:
        self.dead.add(number)
        for wire in self.wires.values():
            if number in wire.members:
                wire.broken = wire.broken or f"rank {number} died"

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds

    def run(self, turns: int, seconds_per_turn: float = 0.01) -> None:
        """Everybody polls; those in ``abort`` hand in and take."""
        for _ in range(turns):
            for rank in self.living():
                self.poll(rank.rank)
                if rank.member.pausing:
                    rank.at_safe_point(at_rest=True)
            self.pass_time(seconds_per_turn)

    def run_to_the_end(self) -> None:
        """Everybody who lives has called ``abort``; fail unless all come to an end."""
        self.abort(*(rank.rank for rank in self.living()))
        for _ in range(400):
            self.run(1, seconds_per_turn=0.2)
            if all(rank.member.over for rank in self.living()):
                break
        hanging = {rank.rank: rank.member._view._last for rank in self.living() if not rank.member.over}
        assert not hanging, hanging
        for rank in self.living():  # What came last is still in the handoff buffer.
            rank.at_safe_point(at_rest=True)
