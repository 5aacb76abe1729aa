"""`bagua advise`: a user's script is measured, and the answer is written."""

import re
import signal
import sys
from pathlib import Path

import pytest

from bagua.advise import MachineFacts, advice
from bagua.algorithms import registry
from bagua.cli import advise
from bagua.cli.lab import command as lab_command
from bagua.comm import destroy_process_group
from tests.launching import finished

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
BAD_SECONDS = ("nan", "inf", "-1")
#: The name at the beginning of a row of the table.
ROW = re.compile(r"^(\w+) +[\d.]+ m?s ", re.MULTILINE)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command computes with one thread; tests of this process go on with theirs. Calls are not measured."""
    monkeypatch.setattr(advise.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(advice, "probe_machine", lambda **_: MachineFacts(cores=4))


def run(tmp_path: Path, text: str, *words: str, options: tuple[str, ...] = ()) -> int:
    """Status of the command for a script of ``text``, whose arguments are ``words``."""
    script = tmp_path / "train.py"
    script.write_text(text)
    given = ["--seconds", "0", "--link", "100kbit", "--algorithms", "bytegrad"]
    return advise.main([*given, *options, "--", str(script), *words])


def test_a_script_is_trained_for_a_while_and_ended_in_order(tmp_path, monkeypatch, capsys):
    before = list(sys.argv), list(sys.path)
    assert run(tmp_path, SCRIPT, "bytegrad") == 0
    assert (sys.argv, sys.path) == before
    said = capsys.readouterr()
    assert "Take bytegrad" in said.out
    assert "measured 5 steps" in said.err
    assert "rehearsing ddp\nrehearsing bytegrad\nmeasuring calls on this machine, for about 20 s\n" in said.err
    assert set(ROW.findall(said.out)) == {"ddp", "bytegrad"}


def test_a_script_may_be_a_module(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert advise.main(["--seconds", "0", "--algorithms", "bytegrad", "-m", "train", "bytegrad"]) == 0


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("print('nothing of bagua here')", (), "never gave a model to bagua"),
        ("raise SystemExit(3)", (), "exit status 3"),
        ("raise RuntimeError('Found no NVIDIA driver on your system')", (), "needs a GPU"),
        ("1 / 0", (), "ZeroDivisionError"),
        (SCRIPT.replace("while True", "for _ in range(3)"), (), "at least 5 are needed"),
        ("1 / 0", ("--hosts", "1"), "one rank sends nothing"),
    ],
)
def test_what_cannot_be_measured_is_said(text, options, said, tmp_path, capsys):
    assert run(tmp_path, text, "gradient_allreduce", options=options) == 1
    assert said in capsys.readouterr().err


def test_algorithms_that_the_script_registers_can_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_declarations", dict(registry._declarations))
    assert run(tmp_path, REGISTERS + SCRIPT, "bytegrad", options=("--algorithms", "mine", "bytegrad")) == 0
    assert set(ROW.findall(capsys.readouterr().out)) == {"ddp", "mine", "bytegrad"}


def test_a_name_that_nobody_registers_is_refused_before_a_step(tmp_path, capsys):
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
        *((["--seconds", bad], "expected seconds >= 0, at most 31536000 (a year), got " + bad) for bad in BAD_SECONDS),
    ],
)
def test_what_makes_no_sense_is_said_before_the_measurement(arguments, said, capsys):
    with pytest.raises(SystemExit):
        advise.main([*arguments, "train.py"])
    assert said in capsys.readouterr().err


def test_a_thread_of_the_script_that_never_ends_keeps_nobody(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise SystemExit(3)")
    ended = finished(sys.executable, "-m", "bagua", "advise", str(script))
    assert ended.returncode == 1
    assert "exit status 3" in ended.stderr


@pytest.mark.parametrize("when", ["SIGINT", "SIGTERM", "while calls are measured"])
def test_who_is_interrupted_or_terminated_ends_in_order(when, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(advice, "probe_machine", lambda **_: signal.raise_signal(signal.SIGTERM))
    text = f"import signal\nsignal.raise_signal(signal.{when})" if when.startswith("SIG") else SCRIPT
    assert run(tmp_path, text, "bytegrad") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("make_parser", [advise.make_parser, lab_command.make_parser])
def test_help_says_that_losses_are_in_percent(make_parser):
    assert make_parser().format_help().count("LOSS%]") == 2
