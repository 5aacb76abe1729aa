"""The demo learns, reports what it measured, and ends cleanly whatever happens to it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bagua.cli.demo.model import ByteTransformer, Shape
from bagua.cli.demo.text import read_standard_library, windows

REPOSITORY = Path(__file__).parents[2]


def demo_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bagua.cli.main", "demo", "--timeout", "30", *arguments]


@pytest.fixture
def endless_demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo of two ranks that is in the middle of training."""
    with subprocess.Popen(
        demo_command("--steps", "100000", "--batch-per-rank", "1", "--no-plot"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()).strip() != "training":
            assert line, process.communicate()[1]
        yield process
        process.kill()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in listed}
    return [pid for pid, command in commands.items() if "spawn_main" in command]


def all_gone(process_ids: list[int], within_s: float = 10.0) -> bool:
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
        demo_command(*few, "--plot", str(plot), "--json", str(file)),
        capture_output=True,
        text=True,
        timeout=110,
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
    ranks = children_of(endless_demo)
    assert len(ranks) == 2
    os.killpg(endless_demo.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    _, said = endless_demo.communicate(timeout=30)
    assert endless_demo.returncode == 130
    assert said == "interrupted; all processes have ended\n"
    assert all_gone(ranks)


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_a_killed_rank_is_named_and_the_others_end_with_a_typed_error(endless_demo):
    ranks = children_of(endless_demo)
    os.kill(ranks[1], signal.SIGKILL)
    _, said = endless_demo.communicate(timeout=60)
    assert endless_demo.returncode == 1
    assert said.startswith("rank 1 was killed by SIGKILL\nrank 0 failed: PeerLostError: ")
    assert all_gone(ranks)


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_killing_the_demo_itself_leaves_nothing_behind(endless_demo):
    ranks = children_of(endless_demo)
    endless_demo.kill()
    assert all_gone(ranks)


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
