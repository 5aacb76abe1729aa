"""`bagua chaos`: the schedule, what members say, the referee on a clock that does not tick, and the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.cli.chaos.progress import Ended, MemberProgress, MetricFiles, ProgressReader
from bagua.cli.chaos.referee import MOST_FRUITLESS, Referee
from bagua.cli.chaos.report import describe, verdict
from bagua.cli.chaos.schedule import (
    Fault,
    FaultSchedule,
    draw_schedule,
    parse_lasting,
    parse_mix,
    parse_rate,
)
from bagua.cli.chaos.score import History, Life, Strike, score
from bagua.cli.main import main
from bagua.observe import CsvWriter

MIX = {"kill": 28.0, "stop": 8.0, "partition": 9.0}


# The schedule.


def test_a_seed_gives_the_same_schedule_anywhere() -> None:
    schedule = draw_schedule(1, 3, 60.0, 1 / 20, {"kill": 2.0, "stop": 1.0})
    assert schedule == FaultSchedule(
        1,
        3,
        60.0,
        (
            Fault(13.774, "kill", (2, 0, 1), 0.0, 0.835765),
            Fault(24.273, "stop", (2, 0, 1), 9.454, 0.72154),
            Fault(26.753, "kill", (0, 2, 1), 0.0, 0.025446),
        ),
    )


def test_another_seed_gives_another_schedule_of_the_same_mix() -> None:
    one, other = (draw_schedule(seed, 8, 1800.0, 90 / 3600, MIX, (2.0, 4.0)) for seed in (1, 2))
    assert one.faults != other.faults
    for schedule in (one, other):
        kinds = [fault.kind for fault in schedule.faults]
        assert {kind: kinds.count(kind) for kind in MIX} == {"kill": 28, "stop": 8, "partition": 9}
        assert [fault.at_s for fault in schedule.faults] == sorted(fault.at_s for fault in schedule.faults)
        for fault in schedule.faults:
            assert 0 <= fault.at_s <= 1780
            assert sorted(fault.members) == list(range(8))
            assert fault.lasting_s == 0 if fault.kind == "kill" else 2 <= fault.lasting_s <= 4


def test_shares_that_are_no_whole_numbers_are_dealt_to_the_largest() -> None:
    kinds = [fault.kind for fault in draw_schedule(0, 2, 100.0, 0.1, {"kill": 1.0, "stop": 1.0, "slow": 1.3}).faults]
    assert {kind: kinds.count(kind) for kind in kinds} == {"kill": 3, "stop": 3, "slow": 4}


def test_a_schedule_survives_json() -> None:
    schedule = draw_schedule(7, 4, 300.0, 1 / 30, MIX)
    assert FaultSchedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"faults": [{"kind": "kill"}]}, "no schedule"),
        ({"seed": None}, "no schedule"),
        ({"faults": [vars(Fault(1.0, "flood", (0,), 0.0, 0.0))]}, "flood"),
        ({"faults": [vars(Fault(1.0, "kill", (2,), 0.0, 0.0))]}, r"members \[2\]"),
    ],
)
def test_what_is_no_schedule_is_refused(change, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        FaultSchedule.from_json({**draw_schedule(0, 2, 60.0, 0.1, MIX).to_json(), **change})


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_mix, text) for text in ("", "flood:1", "kill:x", "kill:1,kill:2", "kill:0", "kill:-1")),
        *((parse_rate, text) for text in ("", "90", "90/d", "x/h", "-1/h", "inf/h")),
        *((parse_lasting, text) for text in ("", "0", "5-2", "-5", "nan")),
    ],
)
def test_other_words_are_refused(parse, text) -> None:
    with pytest.raises(ValueError, match=r"expected|twice|above 0"):
        parse(text)


# What members say.


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12", 12),
        ("[rank 0] epoch 2, step: 300, loss 0.1", 300),
        ('{"number": 0, "step": 8, "sum": 1.5}', 8),
        ("footstep 4", None),
        ("steps per second: 4", None),
        ("a step", None),
    ],
)
def test_lines_tell_the_step(line: str, step: int | None) -> None:
    found = ProgressReader().read(0, 0.0, line)
    assert (None if found is None else found.step) == step


def test_lines_tell_the_rest_too_and_the_pattern_is_the_users() -> None:
    line = '{"step": 8, "digest": "0a1b", "alive": 4, "in_epoch": 3, "contributed": 2}\n'
    assert ProgressReader().read(1, 2.0, line) == MemberProgress(1, 2.0, 8, "0a1b", 4.0, 3.0, 2.0)
    assert ProgressReader(r"iteration (\d+)").read(0, 0.0, "iteration 5").step == 5
    for pattern in ("(", "no group", r"(\d+) (\d+)"):
        with pytest.raises(ValueError, match=r"expression|group"):
            ProgressReader(pattern)


def test_metric_files_are_followed(tmp_path: Path) -> None:
    files = MetricFiles({0: str(tmp_path / "0*.csv"), 1: str(tmp_path / "1*.csv")})
    assert files.read(0.0) == []
    writer = CsvWriter(tmp_path / "0.csv")
    writer.write(10, {"comm/alive": 3.0, "comm/epoch_members": 3.0, "comm/contributed": 2.0, "comm/time": 0.5})
    with (tmp_path / "1.csv").open("w") as file:
        file.write("step,name,value\n20,loss,0.5\n30,lo")
        file.flush()
        assert files.read(1.5) == [MemberProgress(0, 1.5, 10, "", 3.0, 3.0, 2.0), MemberProgress(1, 1.5, 20)]
        file.write("ss,0.4\nnot a row\n")
    assert files.read(2.5) == [MemberProgress(1, 2.5, 30)]
    writer.close()
    assert files.read(3.5) == []


# The referee.


class FakeMembers:
    """Members that train together: a step each second, if none of them is in the way."""

    def __init__(self, members: int, *, start_s: float = 3.0, dies: tuple[int, ...] = (), deaf: bool = False) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self._start_s, self._dies, self._deaf = start_s, dies, deaf
        self._trains_at: dict[int, float] = dict.fromkeys(range(members), float("inf"))
        self._held: set[int] = set()
        self._events: list[Ended | MemberProgress] = []
        self._step, self._next_s = 0, 1.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        training = [one for one, at_s in self._trains_at.items() if at_s <= self.now and one not in self._held]
        if self.now >= self._next_s and training:
            self._step, self._next_s = self._step + 10, self.now + 1.0
            counts = (float(len(training)),) * 3
            self._events += [
                MemberProgress(one, self.now, self._step, f"d{self._step}{one if self._deaf else ''}", *counts)
                for one in training
            ]

    def start(self, member: int) -> None:
        self.done.append(f"start {member}")
        self._trains_at[member] = self.now + self._start_s
        if member in self._dies:
            self._end(member, 7)

    def _end(self, member: int, status: int) -> None:
        self._trains_at[member] = float("inf")
        self._events.append(Ended(member, self.now, status))

    def poll(self) -> list[Ended | MemberProgress]:
        events, self._events = self._events, []
        return events

    def hit(self, fault: Fault, member: int) -> str:
        self.done.append(f"{fault.kind} {member}")
        if fault.kind == "kill":
            self._end(member, -9)
            self._next_s += 0.5  # The others need that long to go on without it.
        else:
            self._held.add(member)
        return "as told"

    def lift(self, fault: Fault, member: int) -> None:
        self.done.append(f"lift {member}")
        self._held.discard(member)
        self._end(member, 1)  # The others went on without it.


def referee(crew: FakeMembers, schedule: FaultSchedule, **options) -> Referee:
    return Referee(schedule, crew, clock=lambda: crew.now, sleep=crew.sleep, **options)


def schedule_of(*faults: Fault, members: int = 3, duration_s: float = 40.0) -> FaultSchedule:
    return FaultSchedule(5, members, duration_s, faults)


def test_a_referee_hits_lifts_and_starts_again() -> None:
    crew = FakeMembers(3)
    schedule = schedule_of(Fault(5.2, "kill", (1, 0, 2), 0.0, 0.0), Fault(20.2, "stop", (0, 1, 2), 6.0, 0.0))
    history = referee(crew, schedule, restart_s=2.0).run()
    assert crew.done == ["start 0", "start 1", "start 2", "kill 1", "start 1", "stop 0", "lift 0", "start 0"]
    found = score(history)
    kill, stop = found["faults"]
    begun_s = history.begun_s
    assert begun_s == pytest.approx(3.0, abs=0.1)
    assert kill["at_s"] == pytest.approx(begun_s + 5.2, abs=0.1)
    assert kill["late_s"] == pytest.approx(0.5, abs=0.1)
    assert kill["lasted_s"] == pytest.approx(2.0, abs=0.1)
    assert kill["back_s"] == pytest.approx(3.0, abs=1.2)
    assert stop["lasted_s"] == pytest.approx(6.0, abs=0.1)
    assert stop["late_s"] == pytest.approx(0.0, abs=0.1)
    assert found["pace_steps_per_s"] == pytest.approx(10, rel=0.05)
    # Of 120 member-seconds, 6 to 7 are lost with the kill, 12 to 13 with the stop, and 1 in recovery of the others.
    assert found["goodput"] == pytest.approx(100 / 120, abs=0.03)
    assert found["goodput_while_well"] == pytest.approx(1 - 1.5 / 101, abs=0.02)
    assert found["restarts"] == 2
    assert verdict(found) == []
    assert "all equal" in describe(schedule, found)


def test_the_same_schedule_is_replayed_alike() -> None:
    schedule = draw_schedule(3, 4, 120.0, 0.1, {"kill": 2.0, "stop": 1.0})
    crews = [FakeMembers(4), FakeMembers(4)]
    found = [score(referee(crew, schedule).run()) for crew in crews]
    assert crews[0].done == crews[1].done
    assert found[0] == found[1]
    assert len(found[0]["faults"]) + len(found[0]["skipped"]) == 12


def test_who_is_not_well_is_spared_and_some_are_always_kept() -> None:
    crew = FakeMembers(3)
    stops = [Fault(1.0 + number, "stop", (0, 1, 2), 20.0, 0.0) for number in range(3)]
    history = referee(crew, schedule_of(*stops), keep=1).run()
    assert [strike.member for strike in history.strikes] == [0, 1]
    assert [fault for fault, _ in history.skipped] == stops[2:]


def test_a_hang_is_noted_once_for_each_silence() -> None:
    crew = FakeMembers(2)
    stops = [Fault(1.0, "stop", (0, 1), 38.0, 0.0), Fault(1.1, "stop", (1, 0), 38.0, 0.0)]
    found = score(referee(crew, schedule_of(*stops, members=2), keep=0, hang_s=15.0).run())
    assert len(found["hangs"]) == 2
    assert "hang" in verdict(found)[0]


def test_different_digests_are_found() -> None:
    found = score(referee(FakeMembers(2, deaf=True), schedule_of(members=2, duration_s=3.0)).run())
    assert found["different_digests"]["10"] == {"d100": [0], "d101": [1]}
    assert "different digests" in verdict(found)[0]


def test_a_member_that_never_trains_ends_the_run() -> None:
    crew = FakeMembers(2, dies=(1,))
    found = score(referee(crew, schedule_of(members=2)).run())
    assert crew.done.count("start 1") == MOST_FRUITLESS
    assert "the last time it ended too early, with exit status 7" in verdict(found)[0]


def test_faults_that_are_upon_members_are_lifted_when_the_run_is_interrupted() -> None:
    crew = FakeMembers(2)
    fault = Fault(1.0, "stop", (0, 1), 30.0, 0.0)

    def sleep(seconds: float) -> None:
        crew.sleep(seconds)
        if "stop 0" in crew.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Referee(schedule_of(fault, members=2), crew, clock=lambda: crew.now, sleep=sleep).run()
    assert crew.done[-1] == "lift 0"


# The figures.


def told(*steps: tuple[float, int]) -> list[MemberProgress]:
    return [MemberProgress(0, at_s, step) for at_s, step in steps]


def test_steps_that_are_made_again_from_a_checkpoint_count_once() -> None:
    lives = [
        Life(0.0, told((1, 10), (2, 20), (3, 30)), 3.5, -9),
        Life(4.0, told((5, 10), (6, 20), (7, 30), (8, 40), (9, 50))),
    ]
    found = score(History([lives], [Strike(Fault(3.5, "kill", (0,), 0.0, 0.0), 0, 3.5, "", 4.0)], begun_s=1.0))
    assert found["pace_steps_per_s"] == pytest.approx(10)
    assert found["goodput"] == pytest.approx(40 / 80)  # of 8 seconds; steps 11 to 30, and 31 to 50
    assert found["goodput_while_well"] == pytest.approx(40 / 65)  # of 2.5 and 4 seconds


def test_words_that_repeat_a_step_are_no_progress() -> None:
    once = [Life(0.0, told((1, 1), (2, 2), (3, 3), (4, 4)))]
    logged = [Life(0.0, told((1, 1), (1.9, 1), (2, 2), (2.9, 2), (3, 3), (3.9, 3), (4, 4)))]
    assert score(History([logged], begun_s=1.0)) == score(History([once], begun_s=1.0))
    assert score(History([once], begun_s=1.0))["pace_steps_per_s"] == pytest.approx(1)


@pytest.mark.parametrize("at_s", [2.9, 3.5])
def test_a_rank_that_its_launcher_starts_again_is_back_with_a_new_step(at_s: float) -> None:
    """Also if one was told just after the kill."""
    lives = [Life(0.0, told((1, 10), (2, 20), (3, 30), (9, 20), (10, 30), (11, 40), (12, 50)))]
    found = score(History([lives], [Strike(Fault(at_s, "kill", (0,), 0.0, 0.0), 0, at_s, "")], begun_s=1.0))
    assert found["faults"][0]["back_s"] == pytest.approx(11 - at_s)
    assert found["faults"][0]["late_s"] is None


def test_without_a_word_of_progress_faults_come_after_the_warm_up_and_there_are_no_figures() -> None:
    crew = FakeMembers(2, start_s=1000.0)
    schedule = schedule_of(Fault(1.0, "kill", (1, 0), 0.0, 0.0), members=2, duration_s=5.0)
    history = referee(crew, schedule, warm_up_s=20.0).run()
    assert crew.now == pytest.approx(25.0, abs=0.2)
    found = score(history)
    assert [strike.at_s for strike in history.strikes] == [pytest.approx(21.0, abs=0.1)]
    assert found["goodput"] is None
    assert found["restarts"] == 1
    assert verdict(found) == []
    assert "--progress" in describe(schedule, found)


# The command line.


def test_a_printed_schedule_is_replayed(capsys, tmp_path: Path) -> None:
    drawn = ["--members", "3", "--minutes", "1", "--faults", "3/min", "--seed", "9", "--mix", "kill:2,stop:1"]
    assert main(["chaos", *drawn, "--print-schedule", "json"]) == 0
    printed = capsys.readouterr().out
    drawn_here = draw_schedule(9, 3, 60.0, 0.05, {"kill": 2.0, "stop": 1.0})
    assert FaultSchedule.from_json(json.loads(printed)) == drawn_here
    file = tmp_path / "schedule.json"
    file.write_text(printed)
    assert main(["chaos", "--members", "3", "--schedule", str(file), "--print-schedule", "text"]) == 0
    assert "3 faults (kill 2, stop 1) on 3 members in 60 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "the command is missing"),
        (["--mix", "flood", "--", "true"], "flood"),
        (["--mix", "clock", "--", "true"], "time.sleep"),
        (["--minutes", "0", "--", "true"], "above 0"),
        (["--mix", "partition", "--", "true"], "--members 2"),
        (["--mix", "disk", "--", "true"], "--disk"),
        (["--members", "2", "--metrics", "m.csv", "--", "true"], "{member}"),
        (["--members", "2", "--keep", "2", "--", "true"], "--keep 2"),
        (["--schedule", "/nowhere", "--", "true"], "/nowhere"),
        (["--progress", "x", "--", "true"], "group"),
        (["--report", "/nowhere/report.json", "--", "true"], "no such folder"),
        (["--", "no-such-command"], "there is no command no-such-command"),
        (["--service", "no-such-service 1", "--", "true"], "there is no command no-such-service"),
        (["--members", "2", "--link", "1mbit", "--", "true"], "BAGUA_ISLANDS"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, complaint, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_ISLANDS", "tcp://127.0.0.1:1")
    with pytest.raises(SystemExit) as caught:
        main(["chaos", *given])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
