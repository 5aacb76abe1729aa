"""`bagua advise`: a user's script is measured, and the answer is written."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua.advise import MachineFacts, advice
from bagua.algorithms import registry
from bagua.cli import advise
from bagua.cli.lab import command as lab_command
from bagua.comm import destroy_process_group

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


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command computes with one thread; tests of this process go on with theirs. Calls are not measured."""
    monkeypatch.setattr(advise.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(advice, "probe_machine", lambda **_: MachineFacts(cores=4))


#: The name at the beginning of a row of the table.
ROW = re.compile(r"^(\w+) +[\d.]+ m?s ", re.MULTILINE)


def run(tmp_path: Path, text: str, *words: str, options: tuple[str, ...] = ()) -> int:
    """Status of the command for a script of ``text``, whose arguments are ``words``."""
    script = tmp_path / "train.py"
    script.write_text(text)
    given = ["--seconds", "0", "--link", "100kbit"]
    return advise.main([*given, "--algorithms", "bytegrad", *options, "--", str(script), *words])


def test_a_script_is_trained_for_a_while_and_ended_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.argv), list(sys.path)
    assert run(tmp_path, SCRIPT, "bytegrad") == 0
    assert (sys.argv, sys.path) == before
    said = capsys.readouterr()
    assert "Take bytegrad" in said.out
    assert "measured 5 steps" in said.err
    assert "rehearsing ddp\nrehearsing bytegrad\nmeasuring calls on this machine, for about 20 s\n" in said.err
    assert set(ROW.findall(said.out)) == {"ddp", "bytegrad"}


def test_a_script_may_be_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["--seconds", "0", "--algorithms", "bytegrad"]
    assert advise.main([*given, "-m", "train", "bytegrad"]) == 0


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
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, text, "gradient_allreduce") == 1
    assert said in capsys.readouterr().err


def test_one_rank_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "1 / 0", options=("--hosts", "1")) == 1
    assert "one rank sends nothing" in capsys.readouterr().err


def test_algorithms_that_the_script_registers_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_declarations", dict(registry._declarations))
    assert run(tmp_path, REGISTERS + SCRIPT, "bytegrad", options=("--algorithms", "mine", "bytegrad")) == 0
    assert set(ROW.findall(capsys.readouterr().out)) == {"ddp", "mine", "bytegrad"}


def test_a_name_that_nobody_registers_is_refused_before_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = SCRIPT.replace("optimizer.step()", "raise AssertionError('a step')")
    assert run(tmp_path, endless, "bytegrad", options=("--algorithms", "bytgrad")) == 1
    destroy_process_group()  # The script ended before it came to that.
    said = capsys.readouterr().err
    assert "bagua advise: there is no algorithm 'bytgrad'. Did you mean 'bytegrad'?" in said
    assert "must be registered before the model is wrapped" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithms", "bytegrad"], "train.py is a script: put -- before it"),
        *(
            (["--seconds", seconds], f"expected seconds >= 0, at most 31536000 (a year), got {seconds}")
            for seconds in ("nan", "inf", "-1")
        ),
    ],
)
def test_what_makes_no_sense_is_said_before_the_measurement(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        advise.main([*arguments, "train.py"])
    assert said in capsys.readouterr().err


def test_a_thread_of_the_script_that_never_ends_keeps_nobody(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise SystemExit(3)")
    command = [sys.executable, "-m", "bagua", "advise", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "exit status 3" in ended.stderr


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_who_is_interrupted_or_terminated_ends_in_order(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, f"import signal\nsignal.raise_signal(signal.{number})") == 130
    assert "interrupted" in capsys.readouterr().err


def test_who_is_terminated_while_calls_are_measured_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advice, "probe_machine", lambda **_: signal.raise_signal(signal.SIGTERM))
    assert run(tmp_path, SCRIPT, "bytegrad") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("make_parser", [advise.make_parser, lab_command.make_parser])
def test_help_says_that_losses_are_in_percent(make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    assert make_parser().format_help().count("LOSS%]") == 2
