"""The demo learns, reports what it measured, and ends cleanly whatever happens to it."""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bagua.cli.demo import command, shaping
from bagua.cli.demo.command import named
from bagua.cli.demo.link import Link, PacedTransport
from bagua.cli.demo.model import ByteTransformer, Shape
from bagua.cli.demo.report import show_progress
from bagua.cli.demo.shaping import SlowLink
from bagua.cli.demo.text import read_standard_library, windows
from bagua.cli.demo.training import Phase, TrainingProgress
from bagua.cli.lab.network import Host, LabUnavailableError, Network
from bagua.comm import Communicator, get_default_group
from bagua.link import LinkSettings
from tests.interpreters import interpreter

REPOSITORY = Path(__file__).parents[2]


def demo_command(*arguments: str) -> list[str]:
    return [*interpreter(), "-m", "tests.cli.forked_demo", "demo", "--timeout", "60", *arguments]


@pytest.mark.shm
def test_without_a_name_three_algorithms_are_compared_on_a_slow_link(tmp_path):
    few = ("--steps", "8", "--batch-per-rank", "1", "--link", "200", "--paced")
    arguments = (*few, "--no-plot", "--json", str(tmp_path / "all"))
    done = subprocess.run(
        demo_command(*arguments), capture_output=True, text=True, timeout=110, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "all").read_text())
    assert numbers["link_made_by"] == "paced inside the processes"
    contests = numbers["contests"]
    assert [one["algorithm"] for one in contests] == ["gradient_allreduce", "bytegrad", "local_sgd"]
    sent = [one["result"]["sent_bytes_per_step"] for one in contests]
    assert sent[0] / sent[1] == pytest.approx(4, rel=0.1)
    assert sent[0] / sent[2] == pytest.approx(8, rel=0.1)
    # The link carries 25 bytes in a microsecond: nobody can be faster.
    assert all(seconds > 0.9 * sent[0] / 25e6 for seconds in contests[0]["seconds"])
    assert "links of 200 Mbit/s, paced inside the processes" in done.stdout
    assert all(f"  {name} " in done.stdout for name in ("gradient_allreduce", "bytegrad", "local_sgd"))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SlowLink, object]]:
    """What the demo would have started: the link, and the hosts of the processes."""
    found: list[tuple[SlowLink, object]] = []

    def run_ranks(_function, _ranks, arguments, _show, network):
        found.append((arguments[1], network))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    return found


def test_where_the_kernel_may_it_shapes_the_links(starts, monkeypatch, capsys):
    hosts = Network((Host(0, "10.77.0.1", "there"), Host(1, "10.77.0.2", "here")), "switch")
    asked = []

    @contextmanager
    def open_network(*arguments: object) -> Iterator[Network]:
        asked.append(arguments)
        yield hosts

    monkeypatch.setattr(shaping, "open_network", open_network)
    assert command.main(["--link", "30", "--no-plot"]) == 130
    assert asked == [(2, LinkSettings(30.0, 30.0))]
    assert starts == [(SlowLink(30.0, "gloo", hosts), hosts)]
    assert "links of 30 Mbit/s, shaped by the kernel\n" in capsys.readouterr().out


def test_where_the_kernel_may_not_the_processes_pace_themselves_and_say_why(starts, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise LabUnavailableError("the lab needs root")

    monkeypatch.setattr(shaping, "open_network", refuse)
    for words in ([], ["--paced"], ["--backend", "threads"]):
        assert command.main(["--no-plot", *words]) == 130
    assert [(link.network, hosts) for link, hosts in starts] == [(None, None)] * 3
    assert starts[2][0].backend == "threads"
    said = capsys.readouterr().out
    for reason in ("because the lab needs root", "as --paced asks for", "because threads does not send through the"):
        assert f"links of 100 Mbit/s, paced inside the processes {reason}" in said


def test_a_link_carries_one_message_after_the_other():
    now: list[float] = [0.0]
    slept: list[float] = []
    link = Link(8.0, clock=lambda: now[0], sleep=slept.append)
    link.carry(1_000_000)
    link.carry(500_000)
    now[0] = 10.0
    link.carry(1_000_000)
    link.carry(0)
    assert slept == [1.0, 1.5, 1.0, 1.0]


@pytest.mark.threads
def test_a_paced_transport_gives_the_same_results_and_takes_its_time(thread_ranks):
    def call() -> tuple[list[float], list[float]]:
        world = get_default_group().global_communicator._transport
        slept: list[float] = []
        paced = Communicator(PacedTransport(world, Link(8e-6, clock=lambda: 0.0, sleep=slept.append)), 20.0)
        tensor = torch.full((4,), paced.rank + 1.0)
        paced.allreduce(tensor)
        work = paced.allgather(torch.empty(3), torch.ones(1), async_op=True)
        work.wait()
        work.wait()
        return tensor.tolist(), slept

    # Among three ranks, an allreduce of 16 bytes sends 21, an allgather of 4 bytes 8. One byte takes a second.
    assert thread_ranks(3, call) == [([6.0] * 4, [21.0, 29.0])] * 3


def test_the_demo_takes_every_name_of_the_tables():
    assert [named(text) for text in ("allreduce", "quantize", "async")] == ["gradient_allreduce", "bytegrad", "async"]
    assert named("DecentralizedDataParallel") == named("decentralized_data_parallel") == "decentralized_data_parallel"
    with pytest.raises(argparse.ArgumentTypeError, match="Did you mean 'bytegrad'"):
        named("bytgrad")


class Demo(NamedTuple):
    """A demo of two ranks that is in the middle of training."""

    command: subprocess.Popen[str]
    process: int
    ranks: list[int]


@pytest.fixture
def endless_demo() -> Iterator[Demo]:
    with subprocess.Popen(
        demo_command("--algorithm", "allreduce", "--steps", "100000", "--batch-per-rank", "1", "--no-plot"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as command:
        assert command.stdout is not None
        said = ""
        while (line := command.stdout.readline()).strip() != "training":
            assert line, command.communicate()[1]
            said += line
        process, *ranks = map(int, re.findall("is process ([0-9]+)", said))
        assert len(ranks) == 2
        yield Demo(command, process, ranks)
        command.kill()


def all_gone(process_ids: list[int], within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if not any(Path(f"/proc/{pid}").exists() for pid in process_ids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.gloo
def test_two_ranks_learn_and_say_how_it_went(tmp_path):
    few, plot, file = ("--steps", "40", "--batch-per-rank", "2"), tmp_path / "loss.svg", tmp_path / "numbers.json"
    done = subprocess.run(
        demo_command("--algorithm", "gradient_allreduce", *few, "--plot", str(plot), "--json", str(file)),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(file.read_text())
    assert numbers["last_loss"] < 0.7 * numbers["first_loss"]
    assert numbers["held_out_loss"] < 0.7 * numbers["first_loss"]
    assert numbers["disagreement"] == 0
    assert len(numbers["losses"]) == 40
    # An allreduce among two ranks sends as many bytes as the gradients have.
    assert 1.0 <= numbers["sent_bytes_per_step"] / (4 * numbers["parameters"]) < 1.1
    for row in ("final training loss", "held-out loss", "throughput", "scaling efficiency", "sent per step"):
        assert row in done.stdout
    if importlib.util.find_spec("matplotlib") is None:
        assert "matplotlib is not installed" in done.stdout
    else:
        assert "<svg" in plot.read_text()


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_an_interrupt_from_the_terminal_ends_everything(endless_demo):
    os.killpg(endless_demo.process, signal.SIGINT)  # what a terminal does on Ctrl-C
    _, said = endless_demo.command.communicate(timeout=240)
    assert endless_demo.command.returncode == 130
    assert said == "interrupted; all processes have ended\n"
    assert all_gone(endless_demo.ranks)


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_a_killed_rank_is_named_and_the_others_end_with_a_typed_error(endless_demo):
    os.kill(endless_demo.ranks[1], signal.SIGKILL)
    _, said = endless_demo.command.communicate(timeout=240)
    assert endless_demo.command.returncode == 1
    assert said.startswith("rank 1 was killed by SIGKILL\nrank 0 failed: PeerLostError: ")
    assert all_gone(endless_demo.ranks)


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_killing_the_demo_itself_leaves_nothing_behind(endless_demo):
    os.kill(endless_demo.process, signal.SIGKILL)
    assert all_gone(endless_demo.ranks)


def test_text_is_split_by_files(tmp_path):
    for number in range(25):
        (tmp_path / f"{number:02}.py").write_text(f"<{number:02}>")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "not_read.py").write_text("x")
    text = read_standard_library(tmp_path)
    assert text.files == 25
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
    model = ByteTransformer(Shape(width=16, depth=2, heads=2, context=8))
    inputs = torch.randint(256, (1, 8))
    seen_bytes = model.bytes(inputs) + model.positions.weight
    hidden = seen_bytes.detach().requires_grad_()
    model.blocks(hidden)[0, 3].sum().backward()
    reached = hidden.grad[0].abs().sum(dim=1) > 0
    assert reached.tolist() == [True] * 4 + [False] * 4


def test_progress_is_some_lines_of_text(capsys):
    with show_progress(40) as show:
        show(Phase("training"))
        for step in range(1, 42):
            show(TrainingProgress(step, 5.5, 100.0, 1_000, 0.5))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "training"
    assert lines[-1] == "step    40/40  loss 5.500  100 tokens/s  0.00 MB sent  50% waiting"
    assert len(lines) == 20


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with show_progress(40) as show:
        show(Phase("training"))
        show(TrainingProgress(40, 5.5, 100.0, 1_000, 0.5))
    shown = capsys.readouterr().out
    assert "training" in shown
    assert "40/40" in shown
