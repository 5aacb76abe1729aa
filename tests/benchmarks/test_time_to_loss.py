"""The time to a loss: its arithmetic, its cells, and who takes part. What is measured is as in the network's tests."""

import itertools
import json
import math
from functools import partial

import pytest

from bagua.cli.lab import network as lab
from benchmarks.network.tasks import PerceptronTask
from benchmarks.time_to_loss import __main__ as command
from benchmarks.time_to_loss.folder import Cell, Folder
from benchmarks.time_to_loss.reaching import Segment, first_below, loss_after, segments, steps_within, target, time_of
from benchmarks.time_to_loss.report import Question, Report, pace_settings

CURVE = {10: 3.0, 20: 2.0, 30: 1.0}
LINK = "100mbit"


def test_losses_between_two_looks_lie_on_a_straight_line():
    assert [loss_after(CURVE, steps) for steps in (0, 10, 12.5, 20, 30, 99)] == [3.0, 3.0, 2.75, 2.0, 1.0, 1.0]
    assert target(CURVE) == pytest.approx(1.01 * loss_after(CURVE, 27))


@pytest.mark.parametrize(
    ("curve", "wanted", "steps"),
    [
        (CURVE, 2.5, 15.0), (CURVE, 1.0, 30.0), (CURVE, 0.9, None), (CURVE, 4.0, 10.0),
        ({10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0}, 1.5, 35.0),  # it has to stay there
        ({10: 3.0, 20: math.nan}, 1.5, None),
    ],
)  # fmt: skip
def test_the_loss_is_reached_where_it_stays_below(curve, wanted, steps):
    assert first_below(curve, wanted) == steps


def test_steps_of_a_beginning_take_their_own_time():
    times = [(Segment(100, "gradient_allreduce"), 2.0), (Segment(math.inf, "local_sgd"), 0.5)]
    assert [time_of(steps, times) for steps in (0, 50, 100, 140)] == [0.0, 100.0, 200.0, 220.0]
    assert [steps_within(seconds, times) for seconds in (0.0, 100.0, 200.0, 220.0)] == [0.0, 50.0, 100.0, 140.0]


SUM = "gradient_allreduce"


@pytest.mark.parametrize(
    ("contender", "steps", "first", "rest"),
    [
        ("ddp", 0, "", "ddp"), ("bytegrad", 0, "", "bytegrad"),
        ("accelerate:sync_every=8", 0, "", "accelerate:sync_every=8"),
        ("post_local_sgd:sync_every=8,start_after=120", 120, "ddp", "post_local_sgd:sync_every=8,start_after=0"),
        ("diloco:sync_every=20,start_after=180,codec=int4", 180, SUM, "diloco:sync_every=20,start_after=0,codec=int4"),
        ("qadam:warmup_steps=60", 60, SUM, "qadam:warmup_steps=3"),
        ("top_k:warmup_steps=60,density_steps=120", 60, SUM, "top_k:warmup_steps=0,density_steps=0"),
        ("sign_sgd", 150, SUM, "sign_sgd:warmup_steps=0"),  # its default
    ],
)  # fmt: skip
def test_what_is_timed_of_a_contender(contender, steps, first, rest):
    assert segments(contender) == [*([Segment(steps, first)] if steps else []), Segment(math.inf, rest)]


@pytest.fixture
def report(tmp_path):
    """DDP, a contender that reaches its loss later with quicker steps, and one that never does."""
    question, folder = Question(2, 40, (0.1, 0.2), 5, (0,)), Folder(tmp_path)
    curves = {
        ("ddp", 0.1): (3.0, 2.5), ("ddp", 0.2): (3.0, 2.0), ("bytegrad", 0.1): (4.444, 0.0), ("bytegrad", 0.2): (9, 9),
        ("accelerate:sync_every=8", 0.1): (3.0, 2.9), ("accelerate:sync_every=8", 0.2): (3.0, 2.8),
    }  # fmt: skip
    for ((name, lr), losses), seed in itertools.product(curves.items(), (5, 0)):
        settings = question.settings(question.trained(name, lr, seed))
        folder.add(Cell("losses", settings, {"held_out": dict(zip(("20", "40"), losses, strict=True))}))
    for name, step_s in {"ddp": [9.0, 2.0, 1.0], "bytegrad": [0.5], "accelerate:sync_every=8": [0.25]}.items():
        result = {"step_s": step_s, "sent_bytes": 1e6}
        folder.add(Cell("paces", pace_settings(name, question, LINK), result, others=0.5 * (name == "ddp")))
    return Report(folder, question)


def test_the_time_to_the_loss_is_steps_times_their_time(report):
    contenders = ["bytegrad", "accelerate:sync_every=8", "qadam"]
    lines, missing = report.lines(contenders, LINK)
    found = {line.contender: line for line in lines}
    assert found["ddp"].steps == pytest.approx([35.56])
    assert (found["ddp"].lr, found["bytegrad"].lr) == (0.2, 0.1)
    assert report.wanted(0) == pytest.approx(2.222)
    assert found["bytegrad"].seconds == pytest.approx([15.0])
    assert found["bytegrad"].timely_loss == pytest.approx(0.0)  # 71 s are 143 steps: more than there are
    assert found["accelerate:sync_every=8"].mean_s is None
    assert found["accelerate:sync_every=8"].last_loss == pytest.approx(2.8 / 2.222)
    assert (lines[0].contender, missing) == ("bytegrad", ["qadam on 100mbit: was not timed"])
    table, summary = report.table(contenders, LINK), report.summary_table(contenders, [LINK])
    assert all(part in table for part in ("not reached", "others had the cores"))
    assert "`bytegrad`" in summary
    assert "accelerate" not in summary


def test_a_whole_training_proves_the_product_or_not(report):
    settings = report.question.settings(report.question.trained("bytegrad", 0.1, 0))
    result = {"held_out": {"20": 4.444, "40": 0.0}, "seconds": {"20": 11.0, "40": 22.0}}
    report.folder.add(Cell("whole", {**settings, "link": LINK}, result))
    (line,) = (line for line in report.lines(["bytegrad"], LINK)[0] if line.contender == "bytegrad")
    assert line.whole_s == pytest.approx([16.5])
    assert line.disagreement == pytest.approx(0.1)
    assert "10.0% TOO FAR" in report.table(["bytegrad"], LINK)


@pytest.mark.gloo
@pytest.mark.usefixtures("forked_ranks")
def test_a_few_cells_are_measured(tmp_path, capsys, monkeypatch):
    if (reason := lab.refusal()) is not None:
        pytest.skip(reason)
    small = PerceptronTask(hidden=8, outer=8, batch=2)
    monkeypatch.setattr(command, "memory", partial(command.memory, task=small))
    plot = tmp_path / "plot.svg"
    words = "losses paces whole memory report --contenders local_sgd:sync_every=4 --seconds 0.1 --steps 30"
    words += " --rates 0.001 --seeds 5 --links 1000mbit --shape width=8,depth=1,heads=1,context=8"
    assert command.main([*words.split(), "--folder", str(tmp_path), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "| `ddp` | 1.000 |" in printed
    assert plot.exists()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"losses": 2, "paces": 2, "whole": 2, "memory": 3}
