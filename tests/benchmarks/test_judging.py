"""Benchmarks tell what is slower, what they cannot tell, whose loss is worse, and what was predicted wrongly."""

import argparse
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bagua.advise import CallFacts, MachineFacts, Message, ModelFacts, ParameterFacts, Rehearsal, Run
from benchmarks import convergence, paired
from benchmarks.convergence import BASELINE, MUTANT, Ended, make_lines
from benchmarks.paired import Comparison, Interval, Rounds, compare, compare_added
from benchmarks.prediction import Cell, Ground, add_to, main, plain_step_s, summary, tables

FACTS = ModelFacts((ParameterFacts("weight", (4, 4), "float32", 0.05),), (0.1,))


def noisy_rounds(factor: float, rounds: int = 40) -> Rounds:
    """Times whose level wanders threefold from round to round, as on a shared machine."""
    generator = random.Random(1)
    levels = [1e-3 * 3 ** generator.random() for _ in range(rounds)]
    a, b, again = ([level * generator.uniform(0.97, 1.03) for level in levels] for _ in range(3))
    return Rounds(a, [factor * seconds for seconds in b], again)


def test_a_ratio_is_found_below_noise_that_both_share():
    comparison = compare("", noisy_rounds(1.2))
    assert (comparison.result.median, comparison.same.median) == pytest.approx((1.2, 1.0), abs=0.02)
    assert comparison.result.low < comparison.result.median < comparison.result.high


def test_an_added_time_is_in_microseconds():
    comparison = compare_added("", Rounds([1e-6] * 5, [4.5e-6] * 5, [1e-6] * 5), limit_us=4.0)
    assert comparison.result.median == pytest.approx(3.5)
    assert (comparison.same.median, comparison.verdict) == (0.0, "met")


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.06, 1.2, "MISSED"), (1.0, 1.04, "met"), (1.0, 1.2, "cannot tell")]
)
def test_a_limit_is_missed_only_when_the_interval_lies_above_it(low, high, verdict):
    comparison = Comparison("", 1.0, 1.0, "x", Interval(1.1, low, high), Interval(1, 1, 1), limit=1.05)
    assert comparison.verdict == verdict


def test_the_slowest_rank_gives_the_time_of_a_sample():
    ranks = [Rounds([1.0, 5.0], [1.0, 1.0], [2.0, 2.0]), Rounds([3.0, 2.0], [2.0, 2.0], [1.0, 3.0])]
    assert paired.slowest(ranks) == Rounds([3.0, 5.0], [2.0, 2.0], [2.0, 3.0])


def test_samples_rotate_and_each_is_preceded_by_the_barrier_and_an_untimed_call():
    seen = []
    one, other, barrier = (partial(seen.append, word) for word in "AB|")
    rounds = paired.measure(one, other, rounds=3, before_each=barrier)
    assert "".join(seen) == "|A|B" + "|AA|BB|AA" + "|BB|AA|AA" + "|AA|AA|BB"
    assert [len(times) for times in (rounds.baseline, rounds.candidate, rounds.baseline_again)] == [3, 3, 3]


def test_calls_that_settle_are_not_timed():
    seen = []
    one, other = (partial(seen.append, word) for word in "AB")
    rounds = paired.measure(one, other, rounds=1, calls=2, settle=3)
    assert "".join(seen) == "AABB" + "AAAAA" + "BBBBB" + "AAAAA"
    assert len(rounds.candidate) == 1


@pytest.mark.parametrize(("rounds", "status"), [(20, 1), (5, 0)])
def test_a_missed_limit_fails_only_in_enough_rounds(rounds, status, tmp_path, capsys):
    options = argparse.Namespace(rounds=rounds, json=tmp_path / "numbers.json")
    assert paired.conclude([compare("slow", noisy_rounds(2.0), 1.05)], options, {"memory": 3}) == status
    numbers = json.loads(options.json.read_text())
    assert (numbers["comparisons"][0]["verdict"], numbers["notes"]) == ("MISSED", {"memory": 3})
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.gloo
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("task", convergence.TASKS)
def test_a_few_steps(task, tmp_path, capsys):
    numbers = tmp_path / "numbers.json"
    few = ["--ranks", "2", "--steps", "3", "--seeds", "1", "--first-seed", "5", "--batch-per-rank", "1", "--contenders"]
    assert convergence.main(["--task", task, "--json", str(numbers), *few, BASELINE]) == 0
    ratios = {line["contender"]: line["mean"] for line in json.loads(numbers.read_text())["lines"]}
    assert ratios[BASELINE] == 1.0
    assert all(abs(ratios[other] - 1.0) > 1e-5 for other in (convergence.PERTURBED, MUTANT))
    assert "not judged" in capsys.readouterr().out


def ends(**losses):
    return {name: Ended(5.0, loss) for name, loss in losses.items()}


def test_ratios_are_taken_seed_by_seed():
    by_seed = [
        ends(gradient_allreduce=2.0, silent=2.5, bytegrad=2.002, qadam=1.1, **{"adam:lr=0.006": 1.0}),
        ends(gradient_allreduce=4.0, silent=4.0, bytegrad=4.012, qadam=2.0, **{"adam:lr=0.006": 2.0}),
    ]
    lines = {line.contender: line for line in make_lines(["bytegrad", "qadam", MUTANT, "absent"], by_seed, "images")}
    assert lines["bytegrad"].ratios == pytest.approx([1.001, 1.003])
    assert lines["qadam"].ratios == pytest.approx([1.1, 1.0])
    verdicts = {"bytegrad": "met", "qadam": "MISSED", MUTANT: "broken, as it must be"}
    assert {name: line.verdict for name, line in lines.items()} == verdicts


@pytest.mark.parametrize(("loss", "seeds", "status"), [(2.5, 3, 0), (2.0, 3, 1), (2.0, 2, 0)])
def test_a_limit_that_the_mutant_keeps_fails_the_run(loss, seeds, status):
    lines = make_lines([MUTANT], [ends(gradient_allreduce=2.0, silent=loss)] * seeds, "text")
    options = argparse.Namespace(task="text", steps=500, seeds=seeds, first_seed=0, ranks=2, json=None)
    assert convergence.conclude(lines, 0.5, {}, options) == status


def test_cells_are_collected_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.json"
    add_to(file, [Cell("ddp", 2, "1000mbit", 0.110, 0.100), Cell("top_k:warmup_steps=0", 2, "1000mbit", 0.06, 0.10)])
    add_to(file, [Cell("bytegrad", 4, "100mbit", 0.2, 0.2)])
    assert len(json.loads(file.read_text())) == 3
    assert main(["--read", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(row in said for row in ("| `ddp` | 110.0 / 100.0 ms, +10% |", "| `top_k` | 60.0 / 100.0 ms, -40% |"))
    assert "3 cells: median error 10.0%, 67% within 15 %, nine in ten within 40%" in said


def test_what_the_switch_could_not_carry_does_not_count() -> None:
    said = tables([Cell("ddp", 2, "1000mbit,20ms", 1.0, 2.0, late=0.2), Cell("ddp", 2, "10mbit,20ms", 1.0, 1.0)])
    assert "| `ddp` | (1000.0 / 2000.0 ms, -50%) | 1000.0 / 1000.0 ms, +0% |" in said
    assert "1 cells: median error 0.0%" in said


def test_the_named_algorithm_is_held_against_the_best() -> None:
    near = [Cell("ddp", 2, "10mbit", 1.0, 1.0), Cell("bytegrad", 2, "10mbit", 0.5, 0.52)]
    near.append(Cell("x", 2, "10mbit", 0.6, 0.5))
    # Not worth a change: plain DDP is named unless another one is predicted to be 5 % faster.
    far = [Cell("ddp", 4, "10gbit", 1.0, 1.2), Cell("bytegrad", 4, "10gbit", 0.96, 1.0)]
    said = summary([*near, *far])
    assert "at most 1.05 of the best time on 1 of 2 networks" in said
    assert "2 hosts, 10mbit: bytegrad, 1.04 of the best" in said
    assert "4 hosts, 10gbit: ddp, 1.20 of the best" in said


def test_a_pace_changes_all_that_a_processor_does() -> None:
    run = Run((1.0, Message("allreduce", 1e6, 2, 2), 0.5))
    calls = (CallFacts("allreduce", 2e-3, ((1e6, 0.5),)),)
    machine = MachineFacts(message_s=1.0, byte_s=0.5, local_message_s=3.0, local_byte_s=4.0, calls=calls)
    ground = Ground(FACTS, (Rehearsal("ddp", (), (run,), 0.25),), machine)
    slower = ground.at_pace(2.0)
    assert (slower.facts.steps_s, slower.facts.parameters[0].arrival_s) == ((0.2,), 0.1)
    assert slower.rehearsals == (Rehearsal("ddp", (), (Run((2.0, run.items[1], 1.0)),), 0.5),)
    seconds = {"message_s": 2.0, "byte_s": 1.0, "local_message_s": 6.0, "local_byte_s": 8.0}
    assert slower.machine == replace(machine, **seconds, calls=(CallFacts("allreduce", 4e-3, ((1e6, 1.0),)),))


def test_ranks_that_share_cores_take_turns_without_a_network_as_well() -> None:
    assert [plain_step_s(Ground(FACTS, (), MachineFacts(cores=2)), ranks) for ranks in (2, 4)] == [0.1, 0.2]
