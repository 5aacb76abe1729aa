"""The measuring method tells what is slower, what is not, and what it cannot tell."""

import argparse
import json
import random

import pytest

from benchmarks import paired
from benchmarks.paired import Comparison, Interval, Rounds, compare, compare_added


def noisy_rounds(factor: float, rounds: int = 40) -> Rounds:
    """Times whose level wanders threefold from round to round, as on a shared machine."""
    generator = random.Random(1)
    levels = [1e-3 * 3 ** generator.random() for _ in range(rounds)]
    a, b, again = ([level * generator.uniform(0.97, 1.03) for level in levels] for _ in range(3))
    return Rounds(a, [factor * seconds for seconds in b], again)


def test_a_ratio_is_found_below_noise_that_both_share():
    comparison = compare("", noisy_rounds(1.2))
    assert comparison.result.median == pytest.approx(1.2, abs=0.02)
    assert comparison.same.median == pytest.approx(1.0, abs=0.02)
    assert comparison.result.low < comparison.result.median < comparison.result.high


def test_an_added_time_is_in_microseconds():
    rounds = Rounds([1e-6] * 5, [4.5e-6] * 5, [1e-6] * 5)
    comparison = compare_added("", rounds, limit_us=4.0)
    assert comparison.result.median == pytest.approx(3.5)
    assert comparison.same.median == 0.0
    assert comparison.verdict == "met"


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
    rounds = paired.measure(
        lambda: seen.append("A"), lambda: seen.append("B"), rounds=3, before_each=lambda: seen.append("|")
    )
    assert "".join(seen) == "|A|B" + "|AA|BB|AA" + "|BB|AA|AA" + "|AA|AA|BB"
    assert [len(times) for times in (rounds.baseline, rounds.candidate, rounds.baseline_again)] == [3, 3, 3]


def test_calls_that_settle_are_not_timed():
    seen = []
    rounds = paired.measure(lambda: seen.append("A"), lambda: seen.append("B"), rounds=1, calls=2, settle=3)
    assert "".join(seen) == "AABB" + "AAAAA" + "BBBBB" + "AAAAA"
    assert len(rounds.candidate) == 1


@pytest.mark.parametrize(("rounds", "status"), [(20, 1), (5, 0)])
def test_a_missed_limit_fails_only_in_enough_rounds(rounds, status, tmp_path, capsys):
    options = argparse.Namespace(rounds=rounds, json=tmp_path / "numbers.json")
    assert paired.conclude([compare("slow", noisy_rounds(2.0), 1.05)], options, {"memory": 3}) == status
    numbers = json.loads(options.json.read_text())
    assert numbers["comparisons"][0]["verdict"] == "MISSED"
    assert numbers["notes"] == {"memory": 3}
    assert "MISSED" in capsys.readouterr().out
