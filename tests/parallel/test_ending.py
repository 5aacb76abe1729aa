"""A run that ends with weights that differ between ranks says so, once, with its steps and its period."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import subprocess
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LocalUpdates,
    Mean,
    Replace,
    Weights,
    around,
    registry,
)
from bagua.parallel import BaguaModule, with_bagua
from bagua.parallel.decentralized import DecentralizedDataParallel
from tests.harness import loss_of, mlp, sgd, train_steps
from tests.launching import PATIENCE_S, REPOSITORY, launched
from tests.parallel.wrapping import Loop

NOTHING = "trained 4 steps and exchanged nothing: "
OF_DILOCO = f"{NOTHING}diloco exchanges every 100 steps (sync_every). Set sync_every, or call model.bagua_finish()."
DIFFER = "trained 4 steps, and ranks end with different weights: "


def trained(algorithm: Algorithm, steps: int = 4) -> BaguaModule:
    loop = Loop("with_bagua", algorithm=algorithm)
    loop.train(steps)
    assert isinstance(loop.wrapped, BaguaModule)
    return loop.wrapped


def closed(algorithm: Algorithm) -> None:
    trained(algorithm).bagua_close()


def saved_and_closed(algorithm: Algorithm) -> None:
    model = trained(algorithm)
    model.bagua_state_dict()
    model.bagua_close()


def dropped(algorithm: Algorithm) -> None:
    """The rank that is looked at waits: another thread closes the model."""
    trained(algorithm)
    gc.collect()


def ended(algorithm: Algorithm) -> None:
    """The model is there when its group is closed, after this."""
    bagua.comm.get_default_group()._model = trained(algorithm)


def finished(algorithm: Algorithm) -> None:
    model = trained(algorithm)
    model.bagua_finish()
    model.bagua_close()


def evaluated(algorithm: Algorithm) -> None:
    model = trained(algorithm)
    with model.bagua_global_average():
        model.state_dict()
    model.bagua_close()


def finished_before_the_last_step(algorithm: Algorithm) -> None:
    model = trained(algorithm, 3)
    model.bagua_finish()
    train_steps(model, model.bagua_optimizers[0], bagua.comm.get_rank(), [3])
    model.bagua_close()


def switched(algorithm: Algorithm) -> None:
    model = trained(algorithm)
    with_bagua(model, model.bagua_optimizers, "gradient_allreduce").bagua_close()


def untrained(algorithm: Algorithm) -> None:
    trained(algorithm, 0).bagua_close()


def failed(algorithm: Algorithm) -> None:
    model = trained(algorithm)
    with contextlib.suppress(KeyboardInterrupt), model.bagua_closing():
        raise KeyboardInterrupt


def saved_only(algorithm: Algorithm) -> None:
    model = trained(algorithm)
    model.bagua_state_dict()
    model.bagua_finish()


def resumed(algorithm: Algorithm, steps: Sequence[int] = (3,)) -> None:
    state = trained(algorithm, 3)
    state.bagua_finish()
    saved = state.bagua_state_dict()
    model = mlp()
    optimizer = sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm)
    wrapped.bagua_load_state_dict(saved)
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), steps)
    wrapped.bagua_close()


def resumed_only(algorithm: Algorithm) -> None:
    resumed(algorithm, ())


def mixed(_: Algorithm) -> None:
    """Its engine is that of a wrapper with optimizers of its own."""
    wrapped = DecentralizedDataParallel(mlp(), lambda named: torch.optim.SGD([one for _, one in named], lr=0.1))
    for step in range(4):
        loss_of(wrapped, bagua.comm.get_rank(), step).backward()
    wrapped.bagua_close()


SILENT = DiLoCoAlgorithm(100)
TALES: list[tuple[Callable[[Algorithm], None], Algorithm, str]] = [
    (closed, SILENT, OF_DILOCO),
    (saved_and_closed, SILENT, OF_DILOCO),
    (dropped, SILENT, OF_DILOCO),
    (ended, SILENT, OF_DILOCO),
    (finished, SILENT, ""),
    (evaluated, SILENT, ""),
    (finished_before_the_last_step, SILENT, OF_DILOCO),
    (switched, SILENT, ""),
    (untrained, SILENT, ""),
    (failed, SILENT, ""),
    (resumed, SILENT, OF_DILOCO),
    (resumed_only, SILENT, ""),
    (closed, DiLoCoAlgorithm(4), ""),
    (closed, DiLoCoAlgorithm(8, fragments=2), f"{DIFFER}diloco"),
    (closed, DiLoCoAlgorithm(5, overlap=1), f"{DIFFER}diloco"),
    (closed, LocalSGDAlgorithm(5), f"{NOTHING}local_sgd exchanges every 5 steps (sync_every)"),
    (closed, LocalSGDAlgorithm(4), ""),
    (closed, LocalSGDAlgorithm(3), f"{DIFFER}local_sgd"),
    (saved_only, LocalSGDAlgorithm(3), ""),
    (closed, LocalSGDAlgorithm(5, start_after=4), ""),
    (closed, LocalSGDAlgorithm(5, start_after=2), NOTHING),
    (closed, LocalSGDAlgorithm(2, start_after=2), ""),
    (closed, GradientAllReduceAlgorithm(), ""),
    (closed, DecentralizedAlgorithm(), f"{DIFFER}decentralized"),
    (closed, DecentralizedAlgorithm(communication_interval=9), f"{DIFFER}decentralized"),
    (closed, around("gradient_allreduce", Exchange(Weights(), Every(8), Mean(), Replace())), ""),
    (closed, around(LocalSGDAlgorithm(9)), f"{NOTHING}local_sgd exchanges every 9 steps (sync_every)"),
    (mixed, SILENT, f"{DIFFER}"),
]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("trained ")]


NAMES = [f"{number} {end.__name__}" for number, (end, _, _) in enumerate(TALES)]


@pytest.mark.parametrize(("end", "algorithm", "expected"), TALES, ids=NAMES)
def test_a_run_that_ends_apart_says_so_once(thread_ranks, end, algorithm, expected, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, end, algorithm)
        until = time.monotonic() + 20
        while len(told(caplog)) < bool(expected) and time.monotonic() < until:  # Another thread may close it.
            gc.collect()
            time.sleep(0.01)
    assert [one[: len(expected)] for one in told(caplog)] == [expected] * bool(expected)


def test_one_rank_says_nothing(thread_ranks, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(1, closed, SILENT)
    assert told(caplog) == []


def test_the_readme_names_the_period_of_each_algorithm():
    named = dict(re.findall(r"^\| `(\w+)` \| (\d+) steps", (REPOSITORY / "README.md").read_text(), re.MULTILINE))
    kinds = {name: registry.get(name) for name in registry}
    assert named == {name: str(kind().sync_every) for name, kind in kinds.items() if issubclass(kind, LocalUpdates)}


SCRIPT = """
import sys
import torch
import bagua.torch_api as bagua

bagua.init_process_group()

def main():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    model = bagua.with_bagua(layer, [optimizer], "diloco")
    for step in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if sys.argv[1] == "fails":
        raise ValueError("a mistake of the user")
    return model

if sys.argv[1] == "keeps":
    kept = main()
else:
    main()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("way", ["keeps", "drops", "fails"])
def test_a_process_that_ends_without_closing_says_so(way):
    with launched(2, "-c", SCRIPT, each=(way, way), stderr=subprocess.PIPE) as ranks:
        errors = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    assert [one.count("exchanged nothing") for one in errors] == [int(way != "fails"), 0], errors
