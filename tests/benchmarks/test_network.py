"""The network lab: hosts that are limited and counted, and leave nothing behind; numbers that mean what they say."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from bagua.cli.lab import network as lab
from benchmarks.network import __main__ as command
from benchmarks.network import ranks, report
from benchmarks.network.contenders import Prepared
from benchmarks.network.experiment import Experiment, Plan
from benchmarks.network.ranks import Sample
from benchmarks.network.results import Limit, Run, make_line, pays_up_to
from benchmarks.network.tasks import PerceptronTask
from benchmarks.paired import Comparison, Interval

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def needs_lab():
    if (reason := lab.refusal()) is not None:
        pytest.skip(reason)


@pytest.fixture
def network(needs_lab):
    with lab.open_network(2) as found:
        yield found


def test_hosts_control_congestion_as_linux_does_unless_told_otherwise(network):
    available = lab.CONGESTION_CONTROL.with_name("tcp_available_congestion_control").read_text().split()
    if lab.OF_LINUX not in available:
        pytest.skip(f"this kernel has no {lab.OF_LINUX}")
    before = lab.CONGESTION_CONTROL.read_text()
    assert [lab.congestion_control(host) for host in network.hosts] == [lab.OF_LINUX] * len(network.hosts)
    assert network.shortcoming == ""
    assert lab.CONGESTION_CONTROL.read_text() == before


@pytest.mark.parametrize("control", ["reno", "no_such_control"])
def test_what_the_file_refuses_a_route_may_take_and_what_cannot_be_set_is_said(network, control, monkeypatch, tmp_path):
    host = network.hosts[0]
    monkeypatch.setattr(lab, "CONGESTION_CONTROL", tmp_path)  # A folder, which nobody can write to.
    with lab.inside(host.namespace):
        lab.run(f"ip address del {host.address}/24 dev {lab.INTERFACE}")
        lab.set_up(host, control)
    monkeypatch.undo()
    assert (lab.congestion_control(host) == control) == (control == "reno")
    said = lab._shortcoming(network, control)
    assert said == "" if control == "reno" else "refuses no_such_control" in said


def test_a_turn_is_timed_from_the_end_of_one_period_to_the_end_of_the_next(monkeypatch):
    steps, looks = [], []

    def look():
        looks.append(len(steps))
        return 0.5 * len(steps)

    training = object.__new__(ranks.Training)
    training.trainer, training.prepared = SimpleNamespace(step=lambda: steps.append("step")), Prepared(None, None)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    place = SimpleNamespace(sent_bytes=lambda _: 100 * len(steps))
    assert [training.turn(None, place, 4) for _ in range(2)] == [Sample(0.5, 100.0)] * 2
    assert looks == [4, 8, 12, 16]


def test_the_thread_that_builds_stays_where_it_is(needs_lab):
    before = os.stat("/proc/thread-self/ns/net").st_ino
    with lab.open_network(2) as network, lab.inside(network.hosts[0].namespace):
        assert os.stat("/proc/thread-self/ns/net").st_ino != before
    assert os.stat("/proc/thread-self/ns/net").st_ino == before
    assert not Path(network.hosts[0].namespace).exists()
    with pytest.raises(lab.LabUnavailableError, match="no interface lab0"):
        lab.sent_bytes()


def test_without_root_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(lab.shutil, "which", lambda _: "/sbin/it")
    monkeypatch.setattr(lab, "new_namespace", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    assert command.main(["--contenders", "ddp_fp16"]) == command.NOT_AVAILABLE
    assert "needs root for it (CAP_SYS_ADMIN and CAP_NET_ADMIN" in capsys.readouterr().err
    monkeypatch.setattr(lab.shutil, "which", lambda _: None)
    assert "ip and tc; Debian's package iproute2 has it" in lab.refusal()


@pytest.mark.gloo
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_times_counts_and_trains(needs_lab, tmp_path, capsys):
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.svg"
    few = ["--rates", "1000", "unlimited", "--rounds", "2", "--hidden", "32", "--batch", "4", "--steps", "2"]
    files = ["--json", str(numbers), "--plot", str(plot)]
    assert command.main([*few, *files, "--contenders", "ddp_fp16", "ddp_8bit", "gradient_allreduce"]) == 0
    (run,) = json.loads(numbers.read_text())["runs"]
    lines = {(line["contender"], line["rate_mbit_s"]): line for line in run["lines"]}
    assert len(lines) == 8
    for rate in (1000, None):
        for who, ratio in (("ddp_fp16", 0.5), ("ddp_8bit", 0.25), ("gradient_allreduce", 1)):
            assert lines[who, rate]["sent_ratio"] == pytest.approx(ratio, abs=0.05)
        losses = [lines[who, rate]["loss"]["after_steps"] for who in ("ddp", "gradient_allreduce")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    gradient_bytes = 4 * sum(p.numel() for p in PerceptronTask(hidden=32).trainer(0).model.parameters())
    assert lines["ddp", 1000]["sent_bytes"] == pytest.approx(gradient_bytes, rel=0.1)  # 2 (n - 1) / n of them, n = 2
    assert "<svg" in plot.read_text()
    printed = capsys.readouterr().out
    assert "Faster than ddp per step" in printed
    assert command.main(["--read", str(numbers)]) == 0
    assert capsys.readouterr().out == printed.rsplit("plot:", 1)[0]


@pytest.mark.gloo
def test_nothing_is_left_after_a_termination(needs_lab):
    endless = ["-m", "benchmarks.network", "--rates", "1", "--hidden", "64", "--contenders", "ddp_fp16"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *endless], cwd=REPOSITORY, **pipes, text=True) as process:
        try:
            assert any("links at 1 Mbit/s" in line for line in process.stderr)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ranks = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
            assert len(ranks) == 2
            process.send_signal(signal.SIGTERM)
            assert "interrupted" in process.communicate(timeout=240)[1]
            assert process.returncode == command.INTERRUPTED
        finally:
            process.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)  # and with them the namespaces


def line(rate, ratio, **promised):
    comparison = Comparison("x", 1.0, ratio, "x", Interval(ratio, ratio, ratio), Interval(1, 1, 1))
    samples = ([Sample(1.0, 100.0)], [Sample(ratio, 25.0)], [Sample(1.0, 100.0)])
    made = make_line("x", rate, [samples, samples], hosts=2, limit=Limit(2, 100, "ddp", "x", **promised))
    return replace(made, step=replace(comparison, limit=made.step.limit))


@pytest.mark.parametrize(
    ("promised", "missed"),
    [({}, False), ({"step_time": 0.3}, True), ({"sent_bytes": 0.25}, False), ({"sent_bytes": 0.2}, True)],
)
def test_limits_on_time_and_bytes(promised, missed):
    measured = line(100, 0.5, **promised)
    assert (measured.sent_ratio, measured.missed, "MISSED" in report.row(measured)) == (0.25, missed, missed)
    run = Run(2, 1, "task", "ddp", 20, [measured])
    assert command.has_failed(run) is missed
    assert not command.has_failed(replace(run, rounds=19))
    assert command.has_failed(replace(run, rounds=19, failures={"y": "because"}))


def test_slowest_rank_and_all_hosts_count():
    first = ([Sample(1.0, 10.0)] * 3, [Sample(4.0, 2.0)] * 3, [Sample(1.0, 10.0)] * 3)
    second = ([Sample(2.0, 30.0)] * 3, [Sample(3.0, 4.0)] * 3, [Sample(2.0, 30.0)] * 3)
    made = make_line("x", None, [first, second], hosts=2, limit=None)
    assert (made.step.result.median, made.sent_bytes, made.baseline_sent_bytes) == (2.0, 3.0, 20.0)


def test_where_it_pays():
    assert pays_up_to([line(10_000, 2.0), line(100, 0.5)]) == "up to 464 Mbit/s"  # a third of the way, in decades
    assert pays_up_to([line(100, 0.5), line(None, 1.5)]) == "up to 100 Mbit/s"
    assert pays_up_to([line(100, 1.5), line(1000, 1.5)]) == "not at 100 Mbit/s, the lowest rate that was measured"
    assert pays_up_to([line(100, 0.5), line(1000, 0.9)]) == "at every measured rate, up to 1 Gbit/s"


def test_steps_in_equal_time_are_bounded():
    plan = Plan(hosts=2, rates=(100.0,), contenders=("x",), task=PerceptronTask(), rounds=1, steps=10)
    steps_in_time = Experiment(plan, lab.Network((), "")).steps_in_time
    assert [steps_in_time(line(100, ratio)) for ratio in (0.5, 3.0, 0.01)] == [(20, False), (3, False), (40, True)]
