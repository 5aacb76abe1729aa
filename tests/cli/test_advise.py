"""`bagua advise`: a user's script is measured, and the answer is written."""

from __future__ import annotations

import argparse
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua.advise import MachineFacts
from bagua.algorithms import Algorithm, ByteGradAlgorithm, GradientAllReduceAlgorithm, registry
from bagua.cli.advise import command, worker
from bagua.cli.advise.command import lab_cluster
from bagua.cli.lab import command as lab_command
from bagua.cli.lab.network import LabUnavailableError
from bagua.comm import destroy_process_group
from bagua.link import parse_link

SCRIPT = """\
import sys
import torch
import bagua.torch_api as bagua

bagua.init_process_group()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], bagua.algorithms.Algorithm.init(sys.argv[1]))
try:
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
finally:
    bagua.destroy_process_group()
"""


REGISTERS = """\
from bagua.algorithms import ByteGradAlgorithm, registry

class Mine(ByteGradAlgorithm):
    pass

registry.register("mine", Mine)
"""


def measured(tmp_path: Path, text: str, *arguments: str, algorithms: tuple[str, ...] = ("bytegrad",)) -> worker.Found:
    """What the worker finds, in this process."""
    script, file = tmp_path / "train.py", tmp_path / "found"
    script.write_text(text)
    settings = {
        "file": str(file),
        "seconds": 0.0,
        "module": False,
        "hosts": 2,
        "ranks_per_host": 1,
        "algorithms": list(algorithms),
        "copies": 1,
    }
    before = list(sys.argv), list(sys.path)
    try:
        worker.main([json.dumps(settings), str(script), *arguments])
    finally:
        sys.argv, sys.path = before
    found: worker.Found = pickle.loads(file.read_bytes())
    return found


def test_a_script_is_trained_for_a_while_and_ended_in_order(tmp_path: Path) -> None:
    found = measured(tmp_path, SCRIPT, "bytegrad")
    assert found.problem == ""
    assert found.facts is not None
    assert {one.shape for one in found.facts.parameters} == {(64, 64), (64,)}
    assert [one.name for one in found.rehearsals] == ["ddp", "bytegrad"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('nothing of bagua here')", "never gave a model to bagua"),
        ("raise SystemExit(3)", "exit status 3"),
        ("raise RuntimeError('Found no NVIDIA driver on your system')", "needs a GPU"),
        ("1 / 0", "ZeroDivisionError"),
        (SCRIPT.replace("while True", "for _ in range(3)"), "at least 5 are needed"),
    ],
)
def test_what_cannot_be_measured_is_said(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in measured(tmp_path, text, "gradient_allreduce").problem
    capfd.readouterr()


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> worker.Found:
    """What the command finds of a script, on a machine of four cores."""
    found = measured(tmp_path, SCRIPT, "bytegrad")
    monkeypatch.setattr(command, "_measured", lambda _: found)
    monkeypatch.setattr(command, "probe_machine", lambda: MachineFacts(cores=4))
    return found


def test_the_command_prints_a_table_and_writes_what_auto_reads(
    found: worker.Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "advice.json", tmp_path / "advice.png"
    assert command.main(["--link", "100kbit", "--out", str(out), "--plot", str(plot), "train.py"]) == 0
    said = capsys.readouterr().out
    assert "Take bytegrad" in said
    monkeypatch.setenv("BAGUA_ADVICE", str(out))
    assert Algorithm.init("auto") == ByteGradAlgorithm()
    assert plot.exists() or "not drawn" in said
    del found.rehearsals[1:]
    assert command.main(["--out", str(out), "train.py"]) == 0
    assert "Take plain DDP" in capsys.readouterr().out
    assert Algorithm.init("auto") == GradientAllReduceAlgorithm()


def test_the_command_says_why_it_measured_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_measured", lambda _: worker.Found("there is no model"))
    assert command.main(["train.py"]) == 1
    assert "there is no model" in capsys.readouterr().err
    assert command.main(["--hosts", "1", "train.py"]) == 1
    assert "one rank sends nothing" in capsys.readouterr().err


def test_algorithms_that_the_script_registers_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_declarations", dict(registry._declarations))
    found = measured(tmp_path, REGISTERS + SCRIPT, "bytegrad", algorithms=("mine", "bytegrad"))
    assert [one.name for one in found.rehearsals] == ["ddp", "mine", "bytegrad"]


def test_a_name_that_nobody_registers_is_refused_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = SCRIPT.replace("optimizer.step()", "raise AssertionError('a step')")
    found = measured(tmp_path, endless, "bytegrad", algorithms=("bytgrad",))
    destroy_process_group()  # The script ended before it came to that.
    assert found.facts is None
    assert "there is no algorithm 'bytgrad'. Did you mean 'bytegrad'?" in found.problem
    assert "must be registered before the model is wrapped" in found.problem
    monkeypatch.setattr(command, "_measured", lambda _: found)
    assert command.main(["--algorithms", "bytgrad", "--", "train.py"]) == 1
    assert "bagua advise: there is no algorithm 'bytgrad'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithms", "bytegrad"], "train.py is a script: put -- before it"),
        *(([option, "TMP/none/advice"], "there is no such folder") for option in ("--out", "--plot")),
        *(([option, "TMP"], "is a folder") for option in ("--out", "--plot")),
        *(
            (["--seconds", seconds], f"expected seconds >= 0, at most 31536000 (a year), got {seconds}")
            for seconds in ("nan", "inf", "-1")
        ),
    ],
)
def test_what_makes_no_sense_is_said_before_the_measurement(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main([*(argument.replace("TMP", str(tmp_path)) for argument in arguments), "train.py"])
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("found")
def test_what_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> bool:
        raise ValueError("no such kind of picture")

    monkeypatch.setattr(command, "draw", refuse)
    assert command.main(["--out", str(tmp_path / "advice.json"), "--plot", "advice.odd", "train.py"]) == 1
    assert "no such kind of picture" in capsys.readouterr().err


def test_a_thread_of_the_script_that_never_ends_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_STOP_S", 0.1)
    monkeypatch.setattr(command, "probe_machine", lambda: MachineFacts(cores=4))
    thread = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    script = tmp_path / "train.py"
    script.write_text(thread + SCRIPT)
    out = tmp_path / "advice.json"
    options = ["--seconds", "0", "--algorithms", "bytegrad", "--out", str(out)]
    assert command.main([*options, "--", str(script), "bytegrad"]) == 0
    assert out.exists()
    capfd.readouterr()


@pytest.mark.usefixtures("found")
def test_who_is_terminated_while_calls_are_measured_ends_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "probe_machine", lambda: signal.raise_signal(signal.SIGTERM))
    assert command.main(["train.py"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("starting", [False, True], ids=["waiting", "starting"])
def test_who_is_interrupted_or_terminated_ends_all_processes(
    starting: bool, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it waits for them, and while it starts the first."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if starting:
            signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(command.subprocess, "Popen", start)
    monkeypatch.setattr(command, "_wait_for", lambda *_: signal.raise_signal(number))
    assert command.main(["--ranks-per-host", "2", "train.py"]) == 130
    ended = [process.poll() is not None for process in started]
    for process in started:
        process.kill()
        process.wait()
    assert ended == [True] * (1 if starting else 2)
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("ends", "said"), [("os._exit(3)", "exit status 3"), ("os.abort()", "was killed by SIGABRT")])
def test_a_script_that_ends_the_worker_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: str, said: str
) -> None:
    popen = subprocess.Popen
    ending = [sys.executable, "-S", "-c", f"import os; {ends}"]
    monkeypatch.setattr(command.subprocess, "Popen", lambda *_, **__: popen(ending, stderr=subprocess.DEVNULL))
    assert command.main(["train.py"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("make_parser", [command.make_parser, lab_command.make_parser])
def test_help_says_that_losses_are_in_percent(make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    assert make_parser().format_help().count("LOSS%]") == 2


def test_a_prediction_for_the_lab_knows_its_links_and_how_to_do_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> MachineFacts:
        raise LabUnavailableError("needs root")

    on_loopback = MachineFacts(cores=7)
    monkeypatch.setattr(command, "probe_link", refuse)
    monkeypatch.setattr(command, "probe_machine", lambda: on_loopback)
    options = command.make_parser().parse_args(["--in-lab", "--hosts", "4", "--link", "100mbit", "train.py"])
    cluster, machine = command._place(options)
    assert (cluster.hosts, cluster.shared, cluster.burst_bytes) == (4, True, 128 * 1024)
    assert machine is on_loopback
    assert "without the lab's links, which cost more: needs root" in capsys.readouterr().err
    # A millisecond at 10 Gbit/s is more than the largest packets; the switch that makes delays has no bucket.
    assert lab_cluster(2, 1, parse_link("10gbit")).burst_bytes == 1_250_000
    assert lab_cluster(2, 1, parse_link("100mbit,20ms")).burst_bytes == 0
