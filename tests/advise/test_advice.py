"""The answer: which algorithm, and when plain DDP."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bagua import advise
from bagua.advise.advice import RECIPES, asked_for, ranked
from bagua.advise.measure import Others
from bagua.algorithms import ByteGradAlgorithm
from bagua.errors import ConfigurationError
from tests.harness import descend

INT4, EIGHT_BITS = RECIPES["local_sgd"]
FACTS = advise.ModelFacts((advise.ParameterFacts("p", (8,), "float32", 0.001),), (0.002,))


def prediction(name: str, step_s: float, *, equal: bool = True, needs: str = "", **options: Any) -> advise.Prediction:
    return advise.Prediction(name, step_s, 0.9 * step_s, 1.1 * step_s, 1e6, equal, needs, options)


def advice(*others: advise.Prediction, optimizer: str = "SGD", outside: tuple[str, ...] = ()) -> advise.Advice:
    everyone = sorted([prediction("ddp", 1.0), *others], key=lambda one: one.step_s)
    return advise.Advice(advise.Cluster(4), tuple(everyone), optimizer, (("async", "no steps"),), outside)


def test_the_fastest_that_keeps_ranks_equal_is_named() -> None:
    fast, slow = (prediction("local_sgd", s, equal=False, **options) for s, options in ((0.2, INT4), (0.3, EIGHT_BITS)))
    found = advice(*ranked([fast, slow, prediction("bytegrad", 0.5)]))
    assert [one.step_s for one in found.predictions] == [0.2, 0.5, 1.0]
    assert (found.fastest().name, found.fastest(may_differ=True).name) == ("bytegrad", "local_sgd")
    assert "Take bytegrad: a step takes 0.50" in found.answer()
    assert "local_sgd (sync_every=8, codec='int4') takes 0.20" in found.answer()
    assert asked_for(found.predictions[0]).endswith("init('local_sgd', sync_every=8, codec='int4')")
    assert asked_for(found.predictions[1]) == "'bytegrad'"


def test_plain_ddp_wins_unless_another_is_clearly_faster() -> None:
    found = advice(prediction("bytegrad", 0.96), prediction("top_k", 1.5))
    assert found.fastest().name == "ddp"
    assert found.answer().startswith("Take plain DDP")


def test_an_algorithm_with_an_optimizer_of_its_own_suits_who_has_it() -> None:
    fast = prediction("qadam", 0.1, needs="QAdamOptimizer")
    assert advice(fast).fastest().name == "ddp"
    assert advice(fast, optimizer="QAdamOptimizer").fastest().name == "qadam"


def test_the_table_has_a_line_for_each_and_says_what_was_not_tried() -> None:
    differs = prediction("local_sgd", 0.2, equal=False)
    given = advice(prediction("bytegrad", 0.5), differs, outside=("1000 hosts, tried with 2 to 4",))
    first, _, _, head, *lines = given.table().splitlines()
    assert first.startswith("Take bytegrad")
    assert "outside of what was calibrated: 1000 hosts" in first
    assert head.startswith("keeps the loss")
    assert [line.partition("  ")[0] for line in lines] == [
        "bytegrad", "ddp", "", "does not by itself", "local_sgd", "", "async: no prediction: no steps",
    ]  # fmt: skip


def test_the_table_shows_few_bytes_too() -> None:
    text = advice(dataclasses.replace(prediction("top_k", 0.5), sent_bytes=1600.0)).table()
    assert all(size in text for size in ("1.60 kB", "1.00 MB"))


def test_the_answer_says_when_others_had_the_cores() -> None:
    machines = (advise.MachineFacts(others=share) for share in (0.48, 0.02))
    busy, idle = (advise.weigh(FACTS, advise.Cluster(2), [], machine) for machine in machines)
    assert "Other processes had 48% of the cores" in busy.answer()
    assert "Other processes" not in idle.answer()


def test_what_others_have_of_the_cores_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stat"
    ticks, cores = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    monkeypatch.setattr(advise.measure, "_CORES_FILE", file)
    monkeypatch.setattr(advise.measure.time, "monotonic", iter((10.0, 20.0, 30.0, 40.0)).__next__)
    monkeypatch.setattr(advise.measure.os, "times", lambda: (1.0, 0.0, 0.0, 0.0, 0.0))
    file.write_text("cpu  100 10 50 1000 0\n")
    since = Others()
    # In ten seconds, others work for three on each core.
    file.write_text(f"cpu  {100 + 3 * ticks * cores} 10 50 1000 0\n")
    assert since.share() == pytest.approx(0.3)
    file.unlink()
    assert Others().share() == 0.0


def training(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, next(model.parameters()).shape[1])
    return optimizer, lambda: descend(optimizer, model(inputs).sum())


def test_a_model_is_measured_and_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise.measure, "_ROUNDS", 3)
    layer = torch.nn.Linear(32, 32)
    optimizer, step = training(layer)
    found = advise.advise(layer, optimizer, step, hosts=40, link="10mbit", seconds=0.0, algorithms=["bytegrad"])
    assert {one.name for one in found.predictions} == {"ddp", "bytegrad"}
    assert any("40 hosts" in phrase for phrase in found.outside)
    # Forty ranks in a ring of Gloo: 78 messages, one after the other.
    assert found.ddp.step_s > 78 * 1e-6
    for options, said in (({"link": "fast"}, "link"), ({"hosts": 1, "seconds": 0.0}, "one rank sends nothing")):
        with pytest.raises(ConfigurationError, match=said):
            advise.advise(layer, optimizer, step, **options)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seconds", float("nan")), ("seconds", float("inf")), ("seconds", -1.0), ("seconds", "3"), ("link", 5),
        ("optimizer", 3), ("step", 3), ("hosts", 1), ("hosts", 65), ("algorithms", "bytegrad"),
        ("algorithms", ["bytegard"]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_a_step_is_made(argument: str, value: object) -> None:
    layer, step = torch.nn.Linear(4, 4), Mock(side_effect=AssertionError("a step was made"))
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(layer.parameters(), lr=0.1), "step": step, argument: value}
    with pytest.raises(ConfigurationError):
        advise.advise(layer, **given)


def test_an_algorithm_that_fails_in_its_rehearsal_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteGradAlgorithm, "exchanges", Mock(side_effect=ValueError("not today")))
    found = advise.weigh(FACTS, advise.Cluster(2), ["bytegrad", "decentralized"], advise.MachineFacts())
    assert {one.name for one in found.predictions} == {"ddp", "decentralized"}
    assert found.refusals == (("bytegrad", "ValueError: not today"),)


def test_steps_are_measured_by_a_clock_that_can_be_known() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    found = advise.measure_model(model, *training(model), seconds=0.0)
    assert [one.name[0] for one in found.parameters] == ["1", "1", "0", "0"]
    arrivals = [one.arrival_s for one in found.parameters]
    assert arrivals == sorted(arrivals)
    assert 0 < found.parameters[-1].arrival_s < found.step_s
    assert len(found.steps_s) >= 5
    assert not model[0]._forward_pre_hooks


def test_what_does_not_train_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="does not call the module"):
        advise.measure_model(model, optimizer, lambda: None)
    with pytest.raises(ConfigurationError, match="on the CPU"):
        advise.measure_model(torch.nn.Linear(2, 2, device="meta"), optimizer, lambda: None)
    for parameters, steps_s in (((), (1.0,)), (FACTS.parameters, ())):
        with pytest.raises(ConfigurationError, match="nothing was measured"):
            advise.ModelFacts(parameters, steps_s)
