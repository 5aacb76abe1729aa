"""The demo learns, reports what it measured, and ends cleanly whatever happens to it."""

import argparse
import importlib.util
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch

from bagua.cli import demo
from bagua.cli.demo import ByteTransformer, named, read_standard_library, windows
from bagua.cli.lab.network import LabUnavailableError
from bagua.cli.main import main
from tests.harness import until
from tests.interpreters import interpreter
from tests.launching import REPOSITORY, finished


def demo_command(*arguments: str) -> list[str]:
    return [*interpreter(), "-m", "tests.cli.forked_demo", "demo", *arguments]


def whole_demo(folder: Path, *arguments: str) -> tuple[str, dict[str, list[float]]]:
    """What the demo says, and the numbers of its table: seconds, ms a step, MB, ms to send them, and two losses."""
    done = finished(*demo_command(*arguments), folder=folder)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^  (\w+)  +(\d.*)$", done.stdout, re.MULTILINE)
    return done.stdout, {name: [float(number) for number in re.findall(r"[\d.]+", row)] for name, row in rows}


@pytest.mark.gloo
def test_without_a_name_three_algorithms_are_compared(tmp_path):
    said, rows = whole_demo(tmp_path, "--steps", "8", "--link", "200")
    assert list(rows) == ["gradient_allreduce", "bytegrad", "local_sgd"]
    runs = re.findall(r"^run (\d) of 3: (\w+), 8 steps$", said, re.MULTILINE)
    assert runs == [(str(number), name) for number, name in enumerate(rows, start=1)]
    assert "each run ends after 8 steps, as --steps says\n" in said
    assert said.count("  ended: all 8 steps are made; ") == 3
    assert said.partition("\n\n")[2].startswith("Of the time of gradient_allreduce, which does what torch DDP does, ")
    assert said.splitlines()[-1].startswith("next: ")
    (_, step_ms, first, wire_ms, *_), second, third = rows.values()
    assert first / second[2] == pytest.approx(4, rel=0.1)
    assert first / third[2] == pytest.approx(8, rel=0.1)
    assert wire_ms == pytest.approx(first * 8 / 0.2, abs=1)  # 200 Mbit/s are 0.2 Mbit in a millisecond.
    if "over links of 200 Mbit/s:" in said:  # Nobody can be faster.
        assert step_ms > 0.8 * wire_ms
    if importlib.util.find_spec("matplotlib") is None:
        assert "not drawn" in said
    else:
        assert (tmp_path / "bagua-demo-loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gloo
def test_two_ranks_learn(tmp_path):
    tmp_path.joinpath("bagua-demo-loss.png").mkdir()
    said, rows = whole_demo(tmp_path, "--algorithm", "bytegrad", "--steps", "24")
    assert "the same 24 steps of 2 processes, over " in said
    assert max(rows["bytegrad"][4:]) < 0.7 * math.log(256)  # All bytes were equally likely.
    assert "picture: not drawn; " in said


def test_where_there_is_no_lab_the_demo_says_why(monkeypatch, capsys):
    monkeypatch.setattr(demo, "open_network", Mock(side_effect=LabUnavailableError("the lab needs root")))
    monkeypatch.setattr(demo, "run_ranks", run_ranks := Mock(side_effect=KeyboardInterrupt))
    assert main(["demo"]) == 130
    assert run_ranks.call_args.args[-1] is None
    assert "with links as fast as this machine, because the lab needs root" in capsys.readouterr().out


def test_the_demo_takes_every_name_of_the_tables():
    assert [named(text) for text in ("allreduce", "quantize", "async")] == ["gradient_allreduce", "bytegrad", "async"]
    with pytest.raises(argparse.ArgumentTypeError, match="Did you mean 'bytegrad'"):
        named("bytgrad")


class Demo(NamedTuple):
    """A demo of two ranks that is in the middle of training."""

    command: subprocess.Popen[str]
    process: int
    ranks: list[int]

    def assert_ends(self, status: int, said: str) -> None:
        """By itself, with these words alone but for what torch says of hosts of the lab, which have no names."""
        _, errors = self.command.communicate(timeout=240)
        assert self.command.returncode == status
        assert re.fullmatch(said, re.sub(r"^\[W.*\n", "", errors, flags=re.MULTILINE), re.DOTALL), errors


@pytest.fixture
def endless_demo() -> Iterator[Demo]:
    """However it ends in the test, its ranks end, too."""
    if not Path("/proc/self/task").exists():
        pytest.skip("finds processes through /proc")
    words, pipe = demo_command("--algorithm", "allreduce", "--steps", "100000"), subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY) as command:
        said = ""
        while (line := command.stdout.readline()).strip() != "run 1 of 1: gradient_allreduce, 100000 steps":
            assert line, command.communicate()[1]
            said += line
        process, *ranks = map(int, re.findall("is process ([0-9]+)", said))
        assert len(ranks) == 2
        try:
            yield Demo(command, process, ranks)
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        finally:
            command.kill()


@pytest.mark.gloo
def test_an_interrupt_from_the_terminal_ends_everything(endless_demo):
    os.killpg(endless_demo.process, signal.SIGINT)  # what a terminal does on Ctrl-C
    endless_demo.assert_ends(130, "interrupted; all processes have ended\n")


@pytest.mark.gloo
def test_a_killed_rank_is_named_and_the_others_end_with_a_typed_error(endless_demo):
    os.kill(endless_demo.ranks[1], signal.SIGKILL)
    endless_demo.assert_ends(1, "rank 1 was killed by SIGKILL\nrank 0 failed: PeerLostError: .*")


@pytest.mark.gloo
def test_killing_the_demo_itself_leaves_nothing_behind(endless_demo):
    os.kill(endless_demo.process, signal.SIGKILL)  # The fixture looks for what is left.


def test_text_is_split_by_files(tmp_path):
    for number in range(25):
        (tmp_path / f"{number:02}.py").write_text(f"<{number:02}>")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "not_read.py").write_text("x")
    text = read_standard_library(tmp_path)
    assert bytes(text.held_out.tolist()) == b"<09>\n<19>"
    assert b"<09>" not in bytes(text.training.tolist())
    assert len(bytes(text.training.tolist()).split()) == 23


def test_too_little_text_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_standard_library(tmp_path)


def test_targets_are_the_inputs_one_byte_later():
    inputs, targets = windows(torch.arange(20, dtype=torch.uint8), torch.tensor([0, 14]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [14, 15, 16, 17, 18]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [15, 16, 17, 18, 19]]


def test_the_model_cannot_see_what_it_predicts():
    torch.manual_seed(0)
    model = ByteTransformer(width=16, depth=2, heads=2, context=8)
    hidden = torch.randn(1, 8, 16, requires_grad=True)
    model.blocks(hidden, mask=model.mask, is_causal=True)[0, 3].square().sum().backward()
    reached = hidden.grad[0].abs().sum(dim=1) > 0
    assert reached.tolist() == [True] * 4 + [False] * 4
