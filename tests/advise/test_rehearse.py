"""Rehearsals: what the engine does on a group of which one rank is there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bagua.advise import (
    Cluster,
    MachineFacts,
    ModelFacts,
    ParameterFacts,
    Rehearsal,
    Run,
    predict,
    rehearse,
)
from bagua.algorithms import Add, Algorithm, Every, Exchange, Mean, Parts, Weights, registry
from bagua.errors import ConfigurationError
from bagua.link import parse_link

SHAPES = ((64,), (64, 128), (128,), (128, 64))
BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
FACTS = ModelFacts(
    tuple(ParameterFacts(f"p{n}", shape, "float32", 0.01 * (n + 1)) for n, shape in enumerate(SHAPES)),
    (0.05, 0.05, 0.06),
)


def rehearsed(name: str, hosts: int = 4, per_host: int = 1, **options: object) -> Rehearsal:
    return rehearse(Algorithm.init(name, **options), FACTS, [per_host] * hosts, name=name)


def kinds(rehearsal: Rehearsal) -> list[list[str]]:
    return [[message.kind for message in run.messages] for run in rehearsal.runs]


def test_every_step_brings_all_gradients_in_their_order() -> None:
    found = rehearsed("gradient_allreduce")
    for step in found.steps:
        assert [one.number for one in step if one.what == "arrival"] == [0, 1, 2, 3]
        assert [one.what for one in step if one.what in ("start", "wait")] == ["start", "wait"]


def test_gradients_are_sent_whole_or_as_the_exchange_says() -> None:
    exact = rehearsed("gradient_allreduce")
    assert kinds(exact) == [["allreduce"]] * len(exact.steps)
    assert exact.sent_bytes == pytest.approx(BYTES, rel=0.01)
    packed = rehearsed("bytegrad")
    assert kinds(packed) == [["alltoall", "allgather"]] * len(packed.steps)
    # A byte for each element, to all together, and all from all.
    for message in packed.runs[0].messages:
        assert BYTES / 4 < message.nbytes < BYTES / 4 * 1.1


def test_what_another_lane_sends_meanwhile_is_its_own() -> None:
    found = rehearse(Algorithm.init("bytegrad"), FACTS, [1, 1], bucket_bytes=8192)
    assert len({run.lane for run in found.runs}) == 2
    assert kinds(found) == [["alltoall", "allgather"]] * len(found.runs)


def test_hosts_are_told_apart() -> None:
    found = rehearsed("gradient_allreduce", hosts=3, per_host=2, hierarchical=True)
    assert {(one.ranks, one.hosts) for run in found.runs for one in run.messages} >= {(2, 1), (3, 3)}


def test_a_period_is_as_long_as_the_exchange_says() -> None:
    found = rehearsed("local_sgd", sync_every=6)
    assert len(found.steps) == 6
    assert [sum(one.what == "start" for one in step) for step in found.steps].count(1) == 1
    assert found.steps_alone == 6
    assert not found.keeps_equal


def test_what_is_folded_a_period_later_is_waited_for_there() -> None:
    lagging = Algorithm.of(Exchange(Weights(), Every(2), Mean(), Add(), lag=2, parts=Parts(1, "strided")))
    found = rehearse(lagging, FACTS, [1, 1])
    waits = [one for step in found.steps for one in step if one.what == "wait"]
    assert [one.periods_ago for one in waits] == [1]


def calls_alone(found: Rehearsal) -> Rehearsal:
    """Without the work around them, whose time differs from one rehearsal to the next."""
    return dataclasses.replace(found, runs=tuple(Run(run.messages, run.lane) for run in found.runs), extra_s=0.0)


def test_the_slowest_of_those_who_meet_sets_the_pace() -> None:
    # One step in ten takes twice as long: of two ranks one is late in every fifth step, of 10,000 in each.
    facts = dataclasses.replace(FACTS, steps_s=(*[0.05] * 9, 0.10))
    free = MachineFacts(message_s=0.0, byte_s=0.0, cores=8)
    few, some = (calls_alone(rehearsed("gradient_allreduce", hosts=hosts)) for hosts in (2, 4))
    messages = (dataclasses.replace(message, ranks=10_000, hosts=10_000) for message in some.runs[0].messages)
    many = dataclasses.replace(some, runs=(Run(tuple(messages)), *some.runs[1:]))
    pace = {
        hosts: predict(one, facts, Cluster(hosts, 1, parse_link("unlimited")), free).step_s
        for hosts, one in ((2, few), (10_000, many))
    }
    assert 0.05 <= pace[2] < 0.075
    assert pace[10_000] == pytest.approx(0.10, rel=0.1)


def test_neighbours_are_few() -> None:
    assert rehearsed("low_precision_decentralized").meeting == 2
    assert rehearsed("gradient_allreduce").meeting == 4


@pytest.mark.parametrize("name", list(registry))
def test_each_registered_algorithm_is_predicted_or_refused(name: str) -> None:
    algorithm = Algorithm.init(name)
    if algorithm.in_background:
        with pytest.raises(ConfigurationError, match="own pace"):
            rehearse(algorithm, FACTS, [1, 1])
        return
    found = rehearse(algorithm, FACTS, [1, 1], name=name)
    slow, fast = (
        predict(found, FACTS, Cluster(2, 1, parse_link(link)), MachineFacts(cores=8)).step_s
        for link in ("1mbit", "10gbit")
    )
    assert FACTS.step_s < fast < slow


def test_shares_of_unequal_size_are_rehearsed_with_a_model_that_divides() -> None:
    found = rehearsed("top_k", hosts=12, warmup_steps=0)
    assert all(run.messages for run in found.runs)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    import threading

    before = threading.active_count()
    rehearsed("bytegrad")
    assert threading.active_count() <= before + 1  # the thread that closes groups
