"""What islands that are killed, stopped and cut off lose, after equally many contributions that counted.

``python -m benchmarks.churn`` trains the same model between the same islands twice with DiLoCo, under a schedule of
``benchmarks.chaos`` and undisturbed, and compares the loss of the shared weights on samples that nobody trains on.
Prints the ratio after a quarter, a half, three quarters and all of the contributions; it may be 1.02. Partitions need
root.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bagua.torch_api as bagua
from benchmarks import chaos

WIDTH, SYNC_EVERY, BATCH = 32, 10, 16
#: Outer steps whose mean loss is compared: a single one depends on its samples.
NEAR = 15
LIMIT = 1.02


def network(hidden: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what a fixed network makes of them."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return inputs, network(16, 7)(inputs)


def island(folder: str, arguments: argparse.Namespace) -> None:
    """Train without end; write the loss after each outer step, as each island sees it."""
    torch.set_num_threads(1)
    held_out, wanted = samples(2048, 1)
    model: Any = network(64, 3)
    loss_of: Any = torch.nn.functional.mse_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=SYNC_EVERY)
    with bagua.join_islands(size=arguments.members, minimum=1, timeout=300.0) as islands:
        model = model.with_bagua(optimizer, algorithm, between=islands)
        with (Path(folder) / f"{islands.seat}.jsonl").open("w", buffering=1) as said:
            while True:
                step = model.bagua_step + 1
                inputs, targets = samples(BATCH, 1000 + 100_000 * islands.seat + step)
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                if step % SYNC_EVERY == 0:
                    with torch.no_grad():
                        loss = float(loss_of(model(held_out), wanted))
                    contributed = len(islands.members().contributed)
                    said.write(json.dumps([step, loss, contributed]) + "\n")
                    print(f"{step=} {contributed=}", flush=True)
                time.sleep(arguments.pause)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Contributions so far and loss after each outer step, which all islands have said alike."""
    by_step: dict[int, tuple[float, int]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # A kill in the middle of a line.
                step, loss, contributed = json.loads(line)
                assert by_step.setdefault(step, (loss, contributed)) == (loss, contributed), (path, step)
    total, found = 0, []
    for _, (loss, contributed) in sorted(by_step.items()):
        total += contributed
        found.append((total, loss))
    return found


def run(arguments: argparse.Namespace, **options: Any) -> list[tuple[int, float]]:
    with tempfile.TemporaryDirectory() as folder:
        one = [f"--island={folder}", f"--members={arguments.members}", f"--pause={arguments.pause}"]
        if not chaos.play([sys.executable, "-m", "benchmarks.churn", *one], **options):
            raise SystemExit(1)
        return losses(Path(folder))


def near(found: list[tuple[int, float]], contributions: float) -> float:
    """The mean loss of the outer steps around that number of contributions."""
    closest = sorted(found, key=lambda one: abs(one[0] - contributions))[:NEAR]
    return statistics.fmean(loss for _, loss in closest)


def main() -> None:
    parser = chaos.make_parser(__doc__, faults=180, mix="kill:28,stop:8,partition:9", minutes=4.0)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of sleep in each inner step")
    parser.add_argument("--island", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.island:
        island(arguments.island, arguments)
        return
    options = {name: value for name, value in vars(arguments).items() if name not in {"pause", "island"}}
    churn, undisturbed = run(arguments, **options), run(arguments, **options | {"faults": 0})
    last, ratio = min(churn[-1][0], undisturbed[-1][0]), 0.0
    for part in (0.25, 0.5, 0.75, 1.0):
        here, there = near(churn, part * last), near(undisturbed, part * last)
        ratio = here / there
        print(f"after {part * last:.0f} contributions: {here:.5f}, undisturbed {there:.5f}, ratio {ratio:.3f}")
    raise SystemExit(ratio > LIMIT)


if __name__ == "__main__":
    main()
