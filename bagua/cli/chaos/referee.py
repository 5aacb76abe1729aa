"""Runs a schedule: starts members, hits them, starts them again, and notes what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bagua.cli.chaos.processes import Processes
from bagua.cli.chaos.progress import Ended, MemberProgress
from bagua.cli.chaos.schedule import Fault, FaultSchedule
from bagua.cli.chaos.score import History, Life, Strike
from bagua.errors import how_it_ended

POLL_S = 0.02
#: What a member still says in this time may be older than the fault.
SETTLED_S = 1.0
#: A member that ends by itself so often, soon and without a word of progress in between, never will make any.
MOST_FRUITLESS = 5
SOON_S = 60.0


@dataclass
class Referee:
    """Runs a schedule once.

    Args:
        schedule: faults.
        crew: members.
        clock: seconds.
        sleep: waits for so many seconds.
        tell: told what happens, in words.
        keep: members that are always left well.
        restart_s: seconds from the end of a member to its next start.
        warm_up_s: the schedule begins when all members make progress, or after so many seconds. Its end waits as long
            for those that are not back yet.
        hang_s: seconds without progress of any member that count as a hang.

    Attributes:
        history: events so far; times count from the start of the members.
    """

    schedule: FaultSchedule
    crew: Processes
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    tell: Callable[[str], object] = lambda _: None
    keep: int = 1
    restart_s: float = 1.0
    warm_up_s: float = 120.0
    hang_s: float = 60.0

    def __post_init__(self) -> None:
        self.history = History([[] for _ in range(self.schedule.members)])
        self._begun = False
        self._open: dict[int, Strike] = {}
        self._starts: dict[int, float] = {}
        self._finished: set[int] = set()
        self._fruitless = [0] * self.schedule.members
        self._heard_s = 0.0
        self._to_come = list(self.schedule.faults)

    def run(self) -> History:
        """Run to the end of the schedule, or until all members have finished or one cannot start."""
        began = self.clock()
        self._starts = dict.fromkeys(range(self.schedule.members), 0.0)
        try:
            while not self._step(self.clock() - began):
                self.sleep(POLL_S)
        finally:
            for member in list(self._open):
                self._lift(member, self.clock() - began)
        return self.history

    def _step(self, now: float) -> bool:
        """Do what is due; whether the run is over."""
        for member in [one for one, due_s in self._starts.items() if due_s <= now]:
            self._start(member, now)
        for event in self.crew.poll():
            self._take(event, now)
        self._begin(now)
        for member in [one for one, strike in self._open.items() if now >= strike.at_s + strike.fault.lasting_s]:
            self._lift(member, now)
        self._watch(now)
        since_s = now - self.history.begun_s
        while self._begun and self._to_come and since_s >= self._to_come[0].at_s:
            self._strike(self._to_come.pop(0), now)
        return self._is_over(now) or bool(self.history.problems) or len(self._finished) == self.schedule.members

    def _is_over(self, now: float) -> bool:
        """Whether the schedule is over and all members are back, or will not come."""
        over_s = now - self.history.begun_s - self.schedule.duration_s
        if not self._begun or over_s < 0 or self._open:
            return False
        return (
            self._silent()
            or over_s >= self.warm_up_s
            or all(self._is_back(one, now) for one in range(len(self._fruitless)))
        )

    def _is_back(self, member: int, now: float) -> bool:
        """Whether a member has made progress since the last fault that hit it."""
        if member in self._finished:
            return True
        life, strikes = self.history.lives[member][-1], self.history.struck(member)
        since_s = max((strike.over_s or strike.at_s for strike in strikes), default=0.0)
        heard_s = life.said[-1].at_s if life.said else 0.0
        return life.ended_s is None and heard_s > since_s and now - since_s > SETTLED_S

    def _start(self, member: int, now: float) -> None:
        del self._starts[member]
        strikes = self.history.struck(member)
        if strikes and strikes[-1].fault.kind == "kill" and strikes[-1].over_s is None:
            strikes[-1].over_s = now
        self.history.lives[member].append(Life(now))
        self.crew.start(member)

    def _take(self, event: Ended | MemberProgress, now: float) -> None:
        life = self.history.lives[event.member][-1]
        if isinstance(event, MemberProgress):
            life.said.append(event)
            self._fruitless[event.member] = 0
            self._heard_s = now
            return
        life.ended_s, life.status = event.at_s, event.status
        if event.status == 0:
            self._finished.add(event.member)
            self.tell(f"member {event.member} has finished")
            return
        self._starts[event.member] = now + self.restart_s
        struck = any(strike.at_s >= life.started_s for strike in self.history.struck(event.member))
        if not life.said and not struck and event.at_s - life.started_s < SOON_S:
            self._fruitless[event.member] += 1
        self.tell(f"member {event.member} {how_it_ended(event.status)}; it starts again")
        if self._fruitless[event.member] >= MOST_FRUITLESS:
            self.history.problems.append(
                f"member {event.member} ended {MOST_FRUITLESS} times in a row without progress, "
                f"and no fault had hit it; the last time it {how_it_ended(event.status)}"
            )

    def _begin(self, now: float) -> None:
        if not self._begun and (self._all_train() or now >= self.warm_up_s):
            self._begun, self.history.begun_s, self._heard_s = True, now, now
            self.tell(f"the schedule begins; {'all members train' if self._all_train() else 'not all members train'}")

    def _all_train(self) -> bool:
        return all(lives and lives[-1].said for lives in self.history.lives)

    def _silent(self) -> bool:
        """Whether no member has ever shown progress: the command may have no words for it."""
        return not any(life.said for each in self.history.lives for life in each)

    def _well(self) -> list[int]:
        """Members that run, that have shown progress if any has, and that no fault is upon."""
        lives, silent = self.history.lives, self._silent()
        running = [member for member, each in enumerate(lives) if each and each[-1].ended_s is None]
        return [one for one in running if one not in self._open and (silent or lives[one][-1].said)]

    def _strike(self, fault: Fault, now: float) -> None:
        well = self._well()
        victim = next((member for member in fault.members if member in well), None)
        if victim is None or len(well) - 1 < self.keep:
            self.history.skipped.append((fault, f"of the members only {well} were well"))
            self.tell(f"no {fault.kind}: of the members only {well} are well")
            return
        strike = Strike(fault, victim, now, self.crew.hit(fault, victim))
        self.history.strikes.append(strike)
        self.tell(f"{fault.kind} of member {victim}: {strike.what}")
        if fault.kind != "kill":
            self._open[victim] = strike

    def _lift(self, member: int, now: float) -> None:
        strike = self._open.pop(member)
        self.crew.lift(strike.fault, member)
        strike.over_s = now
        self.tell(f"the {strike.fault.kind} of member {member} is over")

    def _watch(self, now: float) -> None:
        """Note a hang, once for each."""
        training = not self._silent() and len(self._finished) < self.schedule.members
        if training and now - self._heard_s > self.hang_s:
            self.history.hangs.append(f"no member made progress from second {self._heard_s:.1f} to {now:.1f}")
            self.tell(f"hang: {self.history.hangs[-1]}")
            self._heard_s = now
