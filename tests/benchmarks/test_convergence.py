"""Losses are compared from seed to seed, and a limit that the mutant keeps is no limit."""

import argparse
import json

import pytest

from benchmarks import convergence
from benchmarks.convergence import BASELINE, MUTANT, Ended, baseline_of, everyone, limit_of, make_lines, with_recipe
from benchmarks.network.contenders import find_maker


@pytest.mark.gloo
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("task", convergence.TASKS)
def test_a_few_steps(task, tmp_path, capsys):
    numbers = tmp_path / "numbers.json"
    few = ["--ranks", "2", "--steps", "3", "--seeds", "1", "--first-seed", "5", "--batch-per-rank", "1"]
    few += ["--task", task, "--json", str(numbers)]
    assert convergence.main([*few, "--contenders", BASELINE]) == 0
    ratios = {line["contender"]: line["mean"] for line in json.loads(numbers.read_text())["lines"]}
    assert ratios[BASELINE] == 1.0
    for other in (convergence.PERTURBED, MUTANT):
        assert abs(ratios[other] - 1.0) > 1e-5
    assert "not judged" in capsys.readouterr().out


def ends(**losses):
    return {name: Ended(5.0, loss) for name, loss in losses.items()}


def test_ratios_are_taken_seed_by_seed():
    by_seed = [
        {**ends(gradient_allreduce=2.0, silent=2.5, bytegrad=2.002, qadam=1.1), **ends(**{"adam:lr=0.006": 1.0})},
        {**ends(gradient_allreduce=4.0, silent=4.0, bytegrad=4.012, qadam=2.0), **ends(**{"adam:lr=0.006": 2.0})},
    ]
    lines = {line.contender: line for line in make_lines(["bytegrad", "qadam", MUTANT, "absent"], by_seed, "images")}
    assert set(lines) == {"bytegrad", "qadam", MUTANT}
    assert lines["bytegrad"].ratios == pytest.approx([1.001, 1.003])
    assert lines["bytegrad"].verdict == "met"
    assert lines["qadam"].ratios == pytest.approx([1.1, 1.0])
    assert lines["qadam"].verdict == "MISSED"
    assert lines[MUTANT].verdict == "broken, as it must be"


@pytest.mark.parametrize(("loss", "seeds", "status"), [(2.5, 3, 0), (2.0, 3, 1), (2.0, 2, 0)])
def test_a_limit_that_the_mutant_keeps_fails_the_run(loss, seeds, status):
    lines = make_lines([MUTANT], [ends(gradient_allreduce=2.0, silent=loss)] * seeds, "text")
    options = argparse.Namespace(task="text", steps=500, seeds=seeds, first_seed=0, ranks=2, json=None)
    assert convergence.conclude(lines, 0.5, {}, options) == status


def test_whoever_is_chosen_trains_with_the_lines_that_judge_it():
    always = [BASELINE, convergence.PERTURBED, MUTANT]
    assert everyone(["bytegrad"], "images", 1500) == [*always, "bytegrad"]
    assert everyone(["qadam:lr=0.1"], "images", 1500) == [*always, "adam:lr=0.006", "qadam:lr=0.1"]
    assert {BASELINE, MUTANT} <= set(everyone(None, "text", 1500))


def test_who_is_only_named_takes_part_at_the_rate_that_suits_the_task_and_so_does_the_baseline():
    chosen = ["qadam", "adam:lr=0.045"]
    assert everyone(chosen, "text", 1500)[3:] == ["adam:lr=0.03", "qadam:lr=0.03,warmup_steps=300", "adam:lr=0.045"]
    assert with_recipe("one_bit_adam", "text", 3).endswith("warmup_steps=1")
    for task in convergence.TASKS:
        for contender in everyone(None, task, 3):
            find_maker(contender)
    with pytest.raises(ValueError, match="no option but lr"):
        find_maker("adam:eps=1")


@pytest.mark.parametrize(
    ("contender", "baseline", "limit"),
    [
        ("local_sgd:sync_every=20", BASELINE, 1.01),
        ("slowmo:sync_every=100", BASELINE, 1.03),
        ("diloco", BASELINE, 1.03),
        ("diloco:sync_every=20,fragments=4,overlap=5", "diloco:sync_every=20", 1.01),
        ("diloco:codec='int4'", "diloco", 1.005),
        ("diloco:sync_every=20,codec='int2',error_feedback=0.9", "diloco:sync_every=20", 1.01),
        ("sparse_loco:start_after=900", BASELINE, 1.02),
        ("sparse_loco:kept=32,lr=0.03", "diloco:sync_every=10,start_after=100,lr=0.03", 1.01),
        ("low_precision_decentralized:topology='ring'", BASELINE, 1.03),
        ("adam", BASELINE, None),
    ],
)
def test_those_who_talk_rarely_are_judged_by_how_rarely(contender, baseline, limit):
    assert baseline_of(contender, "text") == baseline
    assert limit_of(contender) == limit
