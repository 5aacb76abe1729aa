"""`benchmarks.chaos`: the schedule, members that are hit, and the figures."""

import sys
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos import Chaos, Fault, Member, Said, Strike, compare_digests, draw_schedule, goodput, said_in
from tests.interpreters import interpreter

MIX = {"kill": 28.0, "stop": 8.0, "partition": 9.0}
TRAINER = """
import time
for step in range(1, 10**9):
    print("step", step, flush=True)
    time.sleep(0.01)
"""
#: As torchrun: a rank in a session of its own.
LAUNCHER = f"""
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, "-S", "-c", '''{TRAINER}'''], start_new_session=True).wait())
"""


def member_of(script: str) -> Member:
    return Member([sys.executable, "-S", "-c", script], {})


def states(member: Member) -> set[str]:
    found = (Path(f"/proc/{process}/stat").read_text() for process in member.processes())
    return {stat.rpartition(")")[2].split()[0] for stat in found}


def test_a_seed_gives_the_same_schedule_and_another_one_another() -> None:
    one, again, other = (draw_schedule(seed, 8, 1800.0, 45, MIX, (2.0, 4.0)) for seed in (1, 1, 2))
    assert one == again != other
    assert {fault.kind for fault in one} == set(MIX)
    moments = [0, *(fault.at_s for fault in one), 1780]
    assert moments == sorted(moments)
    for fault in one:
        assert sorted(fault.members) == list(range(8))
        assert fault.lasting_s == 0 if fault.kind == "kill" else 2 <= fault.lasting_s <= 4


def test_a_member_is_killed_and_starts_again_and_another_stops_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "RESTART_S", 0.0)
    members = [member_of(LAUNCHER), member_of(TRAINER), member_of(TRAINER)]
    run = Chaos(members, [Fault(0.0, "kill", [0, 1, 2], 0.0), Fault(0.01, "stop", [1, 0, 2], 0.3)])
    seen: list[set[str]] = []
    monkeypatch.setattr(run, "_lift", lambda strike: (seen.append(states(members[1])), Chaos._lift(run, strike)))
    run.run(1.5)
    assert [(strike.kind, strike.member) for strike in run.strikes] == [("kill", 0), ("stop", 1)]
    assert run.wrong == []
    first, second = members[0].lives
    assert said_in(first)[0].step == said_in(second)[0].step == 1
    assert seen == [{"T"}]
    (life,) = members[1].lives
    assert life[-1][0] > run.strikes[1].over_s
    assert not any(member.processes() for member in members)


def test_the_last_of_several_members_is_spared() -> None:
    members = [member_of(TRAINER), member_of(TRAINER)]
    run = Chaos(members, [Fault(0.0, "stop", [number, 1 - number], 60.0) for number in (1, 0)])
    run.run(0.2)
    assert [strike.member for strike in run.strikes] == [1]
    assert [member.processes() for member in members] == [[], []]


def test_who_ends_before_its_first_step_or_falls_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Chaos([member_of("raise SystemExit(7)")], [])
    failing.run(60.0)
    assert failing.wrong == ["a member ended too early, with exit status 7 before its first step"]
    monkeypatch.setattr(chaos, "HANG_S", 0.1)
    silent = Chaos([member_of("import time; print('step 1', flush=True); time.sleep(600)")], [])
    silent.run(60.0)
    assert silent.wrong[0] == "all members were silent for 0.1 s"


def told(*steps: tuple[float, int]) -> list[Said]:
    return [Said(at_s, step, "") for at_s, step in steps]


def test_steps_that_are_made_again_count_once() -> None:
    lives = [told((1, 10), (2, 20), (3, 30)), told((5, 10), (6, 20), (7, 30), (8, 40), (9, 50))]
    found = goodput([lives], [Strike("kill", 0, 3.5, 3.5)], 1.0)
    assert found["pace"] == pytest.approx(10)
    assert found["of all"] == pytest.approx(40 / 80)  # of 8 seconds; steps 11 to 30, and 31 to 50
    assert found["while well"] == pytest.approx(40 / 65)  # of 2.5 and 4 seconds


def test_who_is_stopped_is_not_well_and_others_are() -> None:
    stopped, other = told((1, 10), (2, 20), (7, 30), (8, 40)), told((1, 10), (2, 20), (3, 30), (8, 40))
    found = goodput([[stopped], [other]], [Strike("stop", 0, 2.5, 6.5)], 1.0)
    assert found["of all"] == pytest.approx(60 / 140)
    assert found["while well"] == pytest.approx(50 / 90)


def test_different_digests_are_found() -> None:
    said = [Said(1.0, 10, "a"), Said(1.5, 10, "a"), Said(2.0, 20, "a"), Said(2.5, 20, "b"), Said(3.0, 30, "")]
    assert compare_digests(said) == (2, [20])


def play(script: list[str], minutes: float) -> bool:
    return chaos.play(script, members=2, faults=60 / minutes, mix={"kill": 1}, minutes=minutes, seed=0, lasting=(1, 1))


def test_a_run_whose_members_differ_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    lying = TRAINER.replace('"step", step', '"step", step, "digest={member}"')
    assert not play([sys.executable, "-S", "-c", lying], 0.005)
    assert "different after [" in capsys.readouterr().out


@pytest.mark.gloo
def test_islands_survive_a_kill(capsys: pytest.CaptureFixture[str]) -> None:
    assert play([*interpreter(), "-m", "tests.membership.chaos_island"], 0.05)
    said = capsys.readouterr().out
    assert all(part in said for part in ("kill 1 of 1", "all equal"))
