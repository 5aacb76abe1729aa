"""When differences are merged, and what becomes of them: the rules by themselves."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from bagua.comm import get_default_group, solo_group
from bagua.errors import ConfigurationError
from bagua.membership.island import Island
from bagua.membership.merging.fragments import Fragment
from bagua.membership.merging.handover import Handover
from bagua.membership.merging.merger import Merger
from bagua.membership.merging.merges import Merges
from bagua.membership.merging.quorum import Choice, QuorumRule, Said, choose
from bagua.primitives import radial_directional_mean, weighted_mean
from bagua.testing import ThreadRanks

NONE = -1.0


def said(*ages_s, weight=1.0, **others):
    return Said(ages_s, tuple(weight if age >= 0 else 0.0 for age in ages_s), **others)


@pytest.mark.parametrize(
    ("members", "quorum", "fragment"),
    [
        ([said(0.0), said(NONE), said(NONE)], 1, 0),
        ([said(9.0), said(NONE), said(NONE)], 2, None),
        ([said(9.0), said(0.0), said(NONE)], 2, 0),
        ([said(9.0), said(0.0), said(NONE)], 3, None),
        # Those who have ended, or wait for another merge, cannot come.
        ([said(9.0), said(NONE, ended=True), said(0.0)], 3, 0),
        ([said(9.0, NONE, held_up=True), said(NONE, 1.0, held_up=True)], 2, 0),
        ([said(9.0, NONE, held_up=True), said(NONE, 1.0, held_up=True), said(NONE, NONE)], 2, None),
        # The quorum that is there for longest.
        ([said(3.0, 2.0), said(1.0, 2.0)], 2, 1),
        ([said(3.0, 2.0), said(2.0, 2.0)], 2, 0),
        ([said(NONE, ended=True), said(NONE)], 1, None),
        ([said(NONE, ended=True), said(NONE, ended=True)], 1, -1),
        ([said(NONE, ended=True), said(0.0, ended=True)], 2, 0),
    ],
)
def test_a_fragment_is_merged_when_its_quorum_is_there(members, quorum, fragment):
    choice = choose(dict(enumerate(members)), QuorumRule(quorum, 0.0))
    assert fragment == (None if choice is None else choice.fragment)


def test_a_choice_names_those_who_contribute_and_their_weights():
    members = {2: said(0.5, weight=3.0), 5: said(NONE), 7: said(0.1, weight=4.0)}
    assert choose(members, QuorumRule(1, 0.2)) == Choice(0, (2, 7), (3.0, 4.0))


@pytest.mark.parametrize(
    ("members", "merges"),
    [
        # 0.9 * (2 * 1.0 - 0 - 0.2) = 1.62 seconds are hidden.
        ([said(1.61, step_s=1.0, merge_s=0.2), said(NONE, step_s=9.0)], False),
        ([said(1.63, step_s=1.0, merge_s=0.2), said(NONE, step_s=9.0)], True),
        # The slowest merge that anybody has seen, and the shortest step of those who wait.
        ([said(0.91, step_s=1.0), said(NONE, merge_s=1.0)], True),
        ([said(0.8, step_s=1.0), said(0.7, step_s=0.3), said(NONE)], True),
        ([said(0.5, step_s=1.0), said(0.4, step_s=0.3), said(NONE)], False),
        # All are there.
        ([said(0.0, step_s=1.0), said(0.0, step_s=1.0)], True),
    ],
)
def test_the_grace_window_is_what_is_hidden_anyway(members, merges):
    assert (choose(dict(enumerate(members)), QuorumRule(1, None, overlap=2)) is not None) is merges


def test_the_window_begins_with_the_quorum():
    """0.9 * (2 * 1.0 - (1.5 - 0.4)) = 0.81 seconds after the second has come."""
    for since_s, merges in ((0.4, False), (0.8, False), (0.82, True)):
        members = [said(1.1 + since_s, step_s=1.0), said(since_s, step_s=1.0), said(NONE)]
        assert (choose(dict(enumerate(members)), QuorumRule(2, None, overlap=2)) is not None) is merges


def test_what_is_said_survives_its_way():
    one = Said((0.5, NONE), (2.0, 0.0), 0.25, 0.125, held_up=True, ended=False)
    assert Said.of(one.numbers()) == one


def test_a_mean_by_weights():
    torch.manual_seed(0)
    differences = list(torch.randn(3, 5, dtype=torch.float64))
    expected = (2 * differences[0] + 6 * differences[2]) / 8
    torch.testing.assert_close(weighted_mean(differences, [2.0, 0.0, 6.0]), expected)
    assert not weighted_mean(differences, [0.0, 0.0, 0.0]).any()


def test_lengths_and_directions_have_means_of_their_own():
    torch.manual_seed(0)
    flats = list(torch.randn(3, 9, dtype=torch.float64))
    weights = [1.0, 2.0, 5.0]
    found = radial_directional_mean(flats, weights, lambda flat: flat.split([2, 4, 3]), plain={2})
    for begin, end in ((0, 2), (2, 6)):
        parts = [flat[begin:end] for flat in flats]
        direction = sum(weight * part / part.norm() for weight, part in zip(weights, parts, strict=True))
        length = sum(weight * part.norm() for weight, part in zip(weights, parts, strict=True)) / 8
        torch.testing.assert_close(found[begin:end], length * direction / direction.norm())
    torch.testing.assert_close(found[6:], weighted_mean(flats, weights)[6:])


def test_directions_that_cancel_out_leave_the_plain_mean():
    flats = [torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 0.0])]
    torch.testing.assert_close(
        radial_directional_mean(flats, [1.0, 1.0], lambda flat: [flat]), torch.tensor([1.0, 0.0])
    )
    one = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(radial_directional_mean([one, torch.zeros(2)], [1.0, 1.0], lambda flat: [flat]), one / 2)


def test_samples_count_when_all_that_they_taught_is_merged():
    counted, samples = [], SimpleNamespace(recorded=0)

    def exchange(attempt):
        attempt(solo_group())
        counted.append(merges.counting())

    merges = Merges(0, exchange, lambda: None, 0.001)
    merges.open([Fragment(name, 1, torch.float32, weighted_mean) for name in "ab"], QuorumRule(1, 0.0))
    merges.start(samples)
    for name, recorded in (("a", 3), ("b", 5), ("a", 8)):
        samples.recorded = recorded
        merges.contribute(name, torch.ones(1))
        merges.wait(name)
    merges.stop(lambda reason: None)
    assert counted == [0, 3, 5]


def test_what_counts_does_not_fall_when_the_model_has_more_parts():
    counted, samples = [], SimpleNamespace(recorded=0)

    def exchange(attempt):
        attempt(solo_group())
        counted.append(merges.counting())

    merges = Merges(0, exchange, lambda: None, 0.001)
    merges.start(samples)
    for names, recorded in (("a", 3), ("bca", 8)):
        merges.open([Fragment(name, 1, torch.float32, weighted_mean) for name in names], QuorumRule(1, 0.0))
        samples.recorded = recorded
        for name in names:
            assert merges.others(name, before_own=True) == []
            merges.contribute(name, torch.ones(1))
            merges.wait(name)
            merges.own(name)
    merges.stop(lambda reason: None)
    assert counted == [3, 3, 3, 8]


def part(*parameters):
    """A part of the model that begins with the parameter ``a``."""
    return Fragment("a", 2, torch.float32, weighted_mean, parameters=(("a", (1,)), *parameters))


def test_a_part_of_the_same_name_with_another_parameter_is_another_part():
    merges = Merges(0, lambda attempt: attempt(solo_group()), lambda: None, 0.001)
    merges.open([part(("b", (1,)))], QuorumRule(1, 0.0))
    merges.contribute("a", torch.ones(2))
    with pytest.raises(ConfigurationError, match="parameters of the model have changed while"):
        merges.open([part(("c", (1,)))], QuorumRule(1, 0.0))
    merges.start()
    merges.wait("a")
    # The others take this merge in, so this member may not forget it.
    with pytest.raises(ConfigurationError, match="parameters of the model have changed while"):
        merges.open([part(("c", (1,)))], QuorumRule(1, 0.0))
    merges.own("a")
    merges.open([part(("c", (1,)))], QuorumRule(1, 0.0))
    merges.stop(lambda reason: None)


@pytest.mark.threads
@pytest.mark.parametrize("weights", [(1.0, 0.0, 3.0), (0.0, 2.0, 0.0)])
def test_a_difference_without_weight_is_not_sent(weights):
    """The first member is the owner; a difference that does not fit would be an error on both sides."""

    def merged():
        group = get_default_group()
        merger = Merger(group.rank)
        merger.open([Fragment("weight", 2, torch.float64, weighted_mean)])
        own = torch.full((2 if weights[group.rank] else 7,), group.rank + 1.0, dtype=torch.float64)
        return merger.merge(Choice(0, (0, 1, 2), weights), group.global_communicator, own, 0).difference

    mean = sum(weight * (seat + 1) for seat, weight in enumerate(weights)) / sum(weights)
    for found in ThreadRanks(3).run(merged):
        torch.testing.assert_close(found, torch.full((2,), mean, dtype=torch.float64))


def test_what_interrupts_a_copy_that_no_newcomer_waits_for_ends_the_training():
    def state():
        handover.asked = False  # The newcomer has it from another member by now.
        raise KeyboardInterrupt

    handover = Handover(threading.Condition(), state, Island(None))
    handover.asked = True
    with pytest.raises(KeyboardInterrupt):
        handover.answer()


def test_a_state_for_an_earlier_newcomer_is_not_given_to_a_later_one():
    """On another rank of the island the step in which it was asked for the first time may be over."""
    handover = Handover(threading.Condition(), lambda: copied.append(1), Island(None))
    copied = []
    handover.asked, handover.asks = True, 2
    handover.answer(1)
    assert handover.asked
    assert not copied
    handover.answer(2)
    assert not handover.asked
    assert copied


def test_training_that_waits_for_a_merge_gives_newcomers_the_state():
    """Else both threads would wait for each other."""
    found, asked = [], threading.Event()

    def exchange(attempt):
        asked.wait(60)
        found.append(ask())
        raise ValueError("enough")

    merges = Merges(0, exchange, lambda: None, 0.001)
    ask = merges.giving(lambda: "the state", lambda: True)
    merges.open([Fragment("weight", 2, torch.float32, weighted_mean)], QuorumRule(1))
    merges.start()
    merges.contribute("weight", torch.ones(2))
    asked.set()
    with pytest.raises(ValueError, match="enough"):
        merges.wait("weight")
    assert found == [{"state": "the state", "number": 0, "pending": []}]
    merges.stop(lambda reason: None)
