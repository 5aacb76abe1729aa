"""The search for a setting, on made-up scores: what it finds, how often it asks, what it survives."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagua.engine.autotune.search import Search, Setting, optuna_search

FORMS = (False, True)


def ladders(*, sizes: int, forms: int) -> list[list[Setting]]:
    return [[Setting(2**power, form) for power in range(10, 10 + sizes)] for form in FORMS[:forms]]


def run(search: Search, score) -> list[Setting]:
    """Everything that the search asked for; ``score(setting, number)`` answers."""
    asked = []
    while (setting := search.ask()) is not None:
        search.tell(setting, score(setting, len(asked)))
        asked.append(setting)
        assert len(asked) <= search.max_samples
    return asked


def speed(setting: Setting, best_power: float, overhead: float, gain: float) -> float:
    """Steps per second: small buckets pay for each message, large ones for the lost overlap."""
    ratio = setting.bucket_bytes / 2.0**best_power
    return (1 + gain * setting.hierarchical) / (1 + overhead * (ratio + 1 / ratio))


@st.composite
def tables(draw):
    """Scores without any order, few enough to measure all, and noise of up to 2.4 %."""
    space = ladders(sizes=draw(st.integers(1, 12)), forms=draw(st.integers(1, 2)))
    flat = [setting for ladder in space for setting in ladder]
    scores = draw(st.lists(st.floats(0.1, 10), min_size=len(flat), max_size=len(flat)))
    return space, draw(st.sampled_from(flat)), dict(zip(flat, scores, strict=True))


@given(tables(), st.randoms(use_true_random=False))
def test_a_sweep_finds_the_best_within_five_percent_whatever_the_scores(table, random):
    space, start, scores = table
    search = Search(space, start, max_samples=60)
    asked = run(search, lambda setting, _: scores[setting] * random.uniform(0.976, 1.024))
    assert asked[0] == start
    assert set(asked) == set(scores)
    assert scores[search.best] >= 0.95 * max(scores.values())


@given(
    st.integers(1, 40),
    st.integers(1, 22),
    st.floats(8, 34),
    st.floats(0.01, 10),
    st.floats(-0.5, 0.5),
    st.randoms(use_true_random=False),
)
def test_no_search_takes_more_samples_than_allowed_and_each_ends_with_one_that_it_measured(
    max_samples, sizes, best_power, overhead, gain, random
):
    space = ladders(sizes=sizes, forms=2)
    search = Search(space, space[0][0], max_samples)
    asked = run(search, lambda setting, _: speed(setting, best_power, overhead, gain) * random.uniform(0.9, 1.1))
    assert 1 <= len(asked) <= max_samples
    assert search.best in asked


@given(st.floats(10, 31), st.floats(0.05, 10), st.floats(-0.5, 0.5), st.integers(0, 21))
def test_where_samples_do_not_suffice_for_all_the_neighbourhood_of_the_best_is_searched(
    best_power, overhead, gain, start
):
    space = ladders(sizes=22, forms=2)
    search = Search(space, space[0][start], max_samples=30)
    run(search, lambda setting, _: speed(setting, best_power, overhead, gain))
    best = max(speed(setting, best_power, overhead, gain) for ladder in space for setting in ladder)
    assert speed(search.best, best_power, overhead, gain) >= 0.95 * best


@given(st.floats(10, 19), st.floats(0.05, 10), st.floats(-0.5, 0.5), st.floats(0.01, 0.9), st.integers(0, 19))
@example(best_power=14, overhead=2, gain=-0.5, factor=0.3, spoiled=4)  # the only sample of the best
def test_one_spoiled_sample_does_not_decide(best_power, overhead, gain, factor, spoiled):
    space = ladders(sizes=10, forms=2)
    search = Search(space, space[0][0], max_samples=60)
    scores = {setting: speed(setting, best_power, overhead, gain) for ladder in space for setting in ladder}
    run(search, lambda setting, number: scores[setting] * (factor if number == spoiled else 1))
    assert scores[search.best] >= 0.95 * max(scores.values())


def test_a_lucky_sample_does_not_decide_either():
    (ladder,) = ladders(sizes=5, forms=1)
    search = Search([ladder], ladder[0], max_samples=60)
    run(search, lambda setting, number: 3.0 if number == 1 else 1.0 + (setting == ladder[3]))
    assert search.best == ladder[3]


def test_a_setting_somewhat_below_the_best_gets_a_second_chance():
    (ladder,) = ladders(sizes=6, forms=1)
    scores = dict.fromkeys(ladder, 0.2) | {ladder[1]: 1.0, ladder[4]: 0.93}
    search = Search([ladder], ladder[0], max_samples=60)
    run(search, lambda setting, number: scores[setting] * (0.92 if number == 1 else 1))
    assert search.best == ladder[1]


def test_scores_may_be_negative():
    (ladder,) = ladders(sizes=5, forms=1)
    search = Search([ladder], ladder[0], max_samples=60)
    run(search, lambda setting, _: -1.0 - (setting != ladder[3]))
    assert search.best == ladder[3]


def test_before_the_first_sample_the_best_is_what_is_in_force():
    (ladder,) = ladders(sizes=3, forms=1)
    assert Search([ladder], ladder[1], max_samples=5).best == ladder[1]


@pytest.mark.parametrize("best_power", [12, 24, 30])
def test_optuna_begins_with_the_setting_in_force_and_comes_close(best_power):
    pytest.importorskip("optuna", reason="needs the extra autotune")
    space = ladders(sizes=22, forms=2)
    search = optuna_search(space, space[1][21], 60)
    asked = run(search, lambda setting, _: speed(setting, best_power, 0.2, -0.3))
    assert asked[0] == space[1][21]
    assert len(asked) <= 60
    best = max(speed(setting, best_power, 0.2, -0.3) for ladder in space for setting in ladder)
    assert speed(search.best, best_power, 0.2, -0.3) >= 0.95 * best
